"""GPT: learned positions, layer norm before each half of a layer, GELU, word embedding shared with the output."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InputError
from penstock.models import transformer as t
from penstock.models.config import require_divides
from penstock.models.ops import Block, Model, Op

__all__ = ["GPT_SIZES", "GptConfig", "gpt"]


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a GPT."""

    layers: int
    hidden: int
    heads: int
    seq_length: int = 2048
    vocab: int = 51200
    ffn: int = 0
    """0: four times hidden."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    fused_attention: bool = True
    tied: bool = True
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    dtype: str = "bf16"


GPT_SIZES = {
    "gpt-tiny": GptConfig(4, 64, 4, seq_length=128, vocab=512, dtype="fp32"),
    "gpt-small": GptConfig(8, 256, 8, seq_length=256, vocab=4096, dtype="fp32"),
    "gpt-350m": GptConfig(24, 1024, 16),
    "gpt-1.3b": GptConfig(24, 2048, 32),
    "gpt-2.6b": GptConfig(32, 2560, 32),
    "gpt-6.7b": GptConfig(32, 4096, 32),
    "gpt-13b": GptConfig(40, 5120, 40),
    "gpt-175b": GptConfig(96, 12288, 96),
    "gpt2": GptConfig(12, 768, 12, seq_length=1024, vocab=50257),
    "gpt2-medium": GptConfig(24, 1024, 16, seq_length=1024, vocab=50257),
    "gpt2-large": GptConfig(36, 1280, 20, seq_length=1024, vocab=50257),
    "gpt2-xl": GptConfig(48, 1600, 25, seq_length=1024, vocab=50257),
}


def _layer(config: GptConfig) -> Block:
    c, stream, width = config, t.Stream(), config.ffn or 4 * config.hidden
    hidden = t.tensor("hidden", stream, c.hidden)
    residual = t.tensor("residual", stream, c.hidden)

    def linear(name: str, inputs: int, outputs: int, source: str, output: str, split: str, **more: object) -> Op:
        wide = t.tensor(output, stream, outputs, split=split == "column")
        carry = (wide, residual) if split == "column" else (hidden,)
        return t.linear(name, stream, inputs, outputs, c.dtype, carry=carry, source=source, output=output, split=split, bias=True,
                        **more)  # type: ignore[arg-type]  # fmt: skip

    def norm(name: str) -> Op:
        return t.norm(name, stream, c.hidden, c.dtype, carry=(hidden, residual), rms=False, eps=c.eps, residual=True)

    context = t.tensor("context", stream, c.hidden, split=True)
    act = t.tensor("act", stream, width, split=True)
    return Block("layers", (
        norm("norm1"),
        linear("qkv", c.hidden, 3 * c.hidden, "hidden", "qkv", "column", tp_limit=c.heads, parts=(c.hidden,) * 3),
        t.attention("attention", stream, c.heads, c.heads, c.hidden // c.heads, c.dtype, carry=(context, residual), causal=True,
                    fused=c.fused_attention, dropout=c.attention_dropout),
        linear("out", c.hidden, c.hidden, "context", "hidden", "row", residual="add", dropout=c.dropout, tp_limit=c.heads),
        norm("norm2"),
        linear("up", c.hidden, width, "hidden", "ffn", "column", tp_limit=width),
        t.activation("act", stream, width, c.dtype, carry=(act, residual), function=c.activation, gated=False),
        linear("down", width, c.hidden, "act", "hidden", "row", residual="add", dropout=c.dropout, tp_limit=width),
    ))  # fmt: skip


def gpt(config: GptConfig, name: str = "gpt") -> Model:
    """The chain of a GPT: embedding, layers, final norm, logits, loss."""
    c = config
    require_divides("heads", c.heads, "hidden", c.hidden)
    if c.attention_dropout and c.fused_attention:
        raise InputError(
            f"{name}: attention_dropout={c.attention_dropout} exists only on the unfused path. "
            "Set fused_attention: false, or attention_dropout: 0."
        )
    stream = t.Stream()
    hidden = t.tensor("hidden", stream, c.hidden)
    head = Block("embedding", (
        t.embedding(stream, c.vocab, c.hidden, c.dtype, carry=(hidden,), max_positions=c.seq_length, dropout=c.dropout),
    ))  # fmt: skip
    tail = Block("head", (
        t.norm("norm", stream, c.hidden, c.dtype, carry=(hidden,), rms=False, eps=c.eps),
        t.logits(stream, c.hidden, c.vocab, c.dtype, tied_to="embedding" if c.tied else ""),
        t.loss("loss", stream, c.vocab, c.dtype),
    ))  # fmt: skip
    return Model(name, "gpt", c.dtype, ((head, 1), (_layer(c), c.layers), (tail, 1)), seq_length=c.seq_length, config=vars(c))
