"""Llama and its relatives (Qwen2, Qwen3, Mistral): RMS norm, rotary positions, grouped queries, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.models import transformer as t
from penstock.models.config import require_divides
from penstock.models.ops import Block, Model, Op

__all__ = ["LLAMA_SIZES", "LlamaConfig", "llama"]

_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 128256
    seq_length: int = 4096
    head_width: int = 0
    """0: hidden / heads."""
    rope_theta: float = 500000.0
    rope_scaling: dict[str, Any] | None = None
    """As in Hugging Face configs: `rope_type` "llama3" or "linear" with its factors; None: plain."""
    eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    """Sliding-window attention over this many tokens; 0: none."""
    dropout: float = 0.0
    dtype: str = "bf16"


LLAMA_SIZES = {
    "llama-tiny": LlamaConfig(4, 64, 4, 2, 176, vocab=512, seq_length=128, dtype="fp32"),
    "llama-1b": LlamaConfig(16, 2048, 32, 8, 8192, tied=True, rope_scaling=_LLAMA3),
    "llama-3b": LlamaConfig(28, 3072, 24, 8, 8192, tied=True, rope_scaling=_LLAMA3),
    "llama-8b": LlamaConfig(32, 4096, 32, 8, 14336),
    "llama-70b": LlamaConfig(80, 8192, 64, 8, 28672),
}


def _layer(c: LlamaConfig) -> Block:
    stream = t.Stream()
    head_width = c.head_width or c.hidden // c.heads
    width, kv_width = c.heads * head_width, c.kv_heads * head_width
    hidden, residual = t.tensor("hidden", stream, c.hidden), t.tensor("residual", stream, c.hidden)

    def norm(name: str) -> Op:
        return t.norm(name, stream, c.hidden, c.dtype, carry=(hidden, residual), rms=True, eps=c.eps, residual=True)

    def wide(name: str, columns: int) -> tuple[Any, Any]:
        return t.tensor(name, stream, columns, split=True), residual

    return Block("layers", (
        norm("norm1"),
        t.linear("qkv", stream, c.hidden, width + 2 * kv_width, c.dtype, carry=wide("qkv", width + 2 * kv_width), source="hidden",
                 output="qkv", split="column", bias=c.qkv_bias, tp_limit=c.kv_heads, parts=(width, kv_width, kv_width)),
        t.attention("attention", stream, c.heads, c.kv_heads, head_width, c.dtype, carry=wide("context", width), causal=True,
                    rotary={"theta": c.rope_theta, "scaling": c.rope_scaling}, qk_norm=c.eps if c.qk_norm else 0.0, window=c.window),
        t.linear("out", stream, width, c.hidden, c.dtype, carry=(hidden,), source="context", output="hidden", split="row",
                 bias=c.out_bias, residual="add", dropout=c.dropout, tp_limit=c.heads),
        norm("norm2"),
        t.linear("up", stream, c.hidden, 2 * c.ffn, c.dtype, carry=wide("ffn", 2 * c.ffn), source="hidden", output="ffn",
                 split="column", bias=False, tp_limit=c.ffn, parts=(c.ffn, c.ffn)),
        t.activation("act", stream, c.ffn, c.dtype, carry=wide("act", c.ffn), function="silu", gated=True),
        t.linear("down", stream, c.ffn, c.hidden, c.dtype, carry=(hidden,), source="act", output="hidden", split="row", bias=False,
                 residual="add", dropout=c.dropout, tp_limit=c.ffn),
    ))  # fmt: skip


def llama(config: LlamaConfig, name: str = "llama") -> Model:
    """The chain of a Llama: embedding, layers, final norm, logits, loss."""
    c = config
    if not c.head_width:
        require_divides("heads", c.heads, "hidden", c.hidden)
    require_divides("kv_heads", c.kv_heads, "heads", c.heads)
    stream = t.Stream()
    hidden = t.tensor("hidden", stream, c.hidden)
    head = Block("embedding", (t.embedding(stream, c.vocab, c.hidden, c.dtype, carry=(hidden,)),))
    tail = Block("head", (
        t.norm("norm", stream, c.hidden, c.dtype, carry=(hidden,), rms=True, eps=c.eps),
        t.logits(stream, c.hidden, c.vocab, c.dtype, tied_to="embedding" if c.tied else ""),
        t.loss("loss", stream, c.vocab, c.dtype),
    ))  # fmt: skip
    note = (
        f"padded rows longer than attention's window of {c.window:,} tokens take the time of full attention, since their kernel works on a "
        "mask, which every layer keeps; packed ones take less. Both are counted."
    )
    return Model(
        name, "llama", c.dtype, ((head, 1), (_layer(c), c.layers), (tail, 1)), seq_length=c.seq_length, config=vars(c),
        notes=(note,) if 0 < c.window < c.seq_length else (),
    )  # fmt: skip
