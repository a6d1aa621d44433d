"""Small models of many families as other people write them, each with how it is called: transformers' own, and nets written by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 97
_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip

HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SMALL),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SMALL, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SMALL, "sliding_window": 8}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {
        **_SMALL, "sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_SMALL, "head_dim": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SMALL, "head_dim": 8, "sliding_window": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", _SMALL),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **_SMALL, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_BERT, "vocab_size": VOCAB, "max_position_embeddings": 128}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_BERT, "image_size": 16, "patch_size": 8, "num_labels": 10}),
}  # fmt: skip

SEEN_OTHERWISE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**_SMALL, "num_local_experts": 4, "sliding_window": 8}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {
        **_SMALL, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8,
        "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "doge": ("DogeForCausalLM", "DogeConfig", {**_SMALL, "keep_window_size": 4, "pad_token_id": 0}),
    "glm-dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {
        **_SMALL, "num_key_value_heads": 4, "head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_topk": 4,
        "index_n_heads": 2, "index_head_dim": 8, "pad_token_id": 0}),
}  # fmt: skip
"""Models whose layers see less than all before them, each in a way of its own."""


class LongSkips(nn.Module):
    """Two lists side by side, weights that the net itself uses, a skip over several blocks, a tied head, sums in place."""

    tp_plan: ClassVar = {"mlps.*.1": "colwise", "mlps.*.3": "rowwise"}

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.places = nn.Parameter(torch.randn(128, width) * 0.02)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.gate = nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        first = x
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            y = mlp(x)
            y += x
            x = y
            if index == 2:
                x = x + self.gate * first
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


NAMES = (*HF, "long-skips")


def make(name: str, **changes: Any) -> nn.Module:
    """The model, with the same random weights each time."""
    torch.manual_seed(0)
    if name == "long-skips":
        return LongSkips()
    import transformers

    kind, config, sizes = (HF | SEEN_OTHERWISE)[name]
    made = getattr(transformers, config)(**{**sizes, **changes})
    made.use_cache = False
    return getattr(transformers, kind)(made).train()  # type: ignore[no-any-return]


def example(name: str, samples: int = 3, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass that ends in a loss."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(1, VOCAB, (samples, length), generator=generator) for _ in range(2))
    if name == "vit":
        images = torch.randn(samples, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 10, (samples,), generator=generator)}
    if name == "t5":
        return {"input_ids": ids, "labels": labels[:, : max(1, length // 2)].contiguous()}
    return {"ids" if name == "long-skips" else "input_ids": ids, "labels": labels}


def llama() -> tuple[nn.Module, None]:
    """As `module:module_zoo.py:llama` names it."""
    return make("llama"), None


def qwen2() -> tuple[nn.Module, None]:
    return make("qwen2"), None


def mistral() -> tuple[nn.Module, None]:
    return make("mistral"), None


def qwen3() -> tuple[nn.Module, None]:
    return make("qwen3"), None


def gemma3() -> tuple[nn.Module, None]:
    return make("gemma3"), None


def mixtral() -> tuple[nn.Module, None]:
    return make("mixtral"), None


def long_skips() -> tuple[nn.Module, None]:
    return make("long-skips"), None


def gpt2() -> tuple[nn.Module, None]:
    return make("gpt2"), None


def gemma2() -> tuple[nn.Module, None]:
    return make("gemma2"), None


def phi() -> tuple[nn.Module, None]:
    return make("phi", resid_pdrop=0.0), None


def bert() -> tuple[nn.Module, None]:
    return make("bert"), None


def qwen3_moe() -> tuple[nn.Module, None]:
    return make("qwen3-moe"), None


def t5() -> tuple[nn.Module, None]:
    return make("t5"), None


class PlainGpt(nn.Module):
    """A decoder that calls torch's attention, and knows nothing of samples that lie end to end."""

    def __init__(self, width: int = 32, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(128, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_PlainBlock(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1])[None].expand(ids.shape) if positions is None else positions)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _PlainBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        dropped = self.drop.p if self.training else 0.0
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, None, dropped, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


def plain_gpt() -> tuple[nn.Module, None]:
    torch.manual_seed(0)
    return PlainGpt(), None


class Odd(nn.Module):
    """Products alone, one of them called twice, a scale of one number, and layers of which some weights are frozen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = _ScaledWords(width)
        self.first, self.second, self.third, self.shared, self.between = (_Residual(width) for _ in range(5))
        self.head = nn.Linear(width, VOCAB, bias=False)
        for frozen in (self.first.product.weight, self.second.product.bias, self.between.product.bias):
            frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.third(self.second(self.first(self.words(ids))))
        return self.head(self.shared(self.between(self.shared(x))))  # type: ignore[no-any-return]


class _ScaledWords(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(VOCAB, width), nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * self.scale  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.product(x))


def odd() -> tuple[nn.Module, None]:
    torch.manual_seed(0)
    return Odd(), None


class ConvNet(nn.Module):
    """Convolutions, with running statistics if `norm` has any."""

    def __init__(self, norm: type[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), norm(width), nn.Tanh()) for inputs in (3, width, width)
        )
        self.head = nn.Linear(width, 6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ConvNet(nn.BatchNorm2d), torch.zeros(1, 3, 8, 8)


def plain_conv_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ConvNet(nn.Identity), torch.zeros(1, 3, 8, 8)


def packed_gemma3() -> tuple[nn.Module, None]:
    from penstock.models.modules.cutting.transformers_models import use_our_attention

    module = make("gemma3")
    use_our_attention(module)
    return module, None


def vit() -> tuple[nn.Module, torch.Tensor]:
    return make("vit"), torch.zeros(1, 3, 16, 16)
