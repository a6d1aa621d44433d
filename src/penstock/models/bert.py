"""BERT: norm after each half of a layer, attention in both directions, masked-token and next-sentence heads."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InputError
from penstock.models import transformer as t
from penstock.models.config import require_divides
from penstock.models.ops import Block, Model, Op, TensorSpec

__all__ = ["BERT_SIZES", "BertConfig", "bert"]


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int = 30522
    seq_length: int = 512
    types: int = 2
    next_sentence: bool = True
    tied: bool = True
    """Whether logits share the embedding's weight, as published; asynchronous schedules cannot have it on two stages."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    fused_attention: bool = True
    eps: float = 1e-12
    activation: str = "gelu"
    dtype: str = "bf16"


BERT_SIZES = {
    "bert-tiny": BertConfig(2, 64, 4, 256, vocab=512, seq_length=128, dtype="fp32"),
    "bert-base": BertConfig(12, 768, 12, 3072),
    "bert-large": BertConfig(24, 1024, 16, 4096),
}


def _layer(c: BertConfig) -> Block:
    stream = t.Stream()
    hidden, residual = t.tensor("hidden", stream, c.hidden), t.tensor("residual", stream, c.hidden)

    def norm(name: str) -> Op:
        return t.norm(name, stream, c.hidden, c.dtype, carry=(hidden,), rms=False, eps=c.eps)

    def column(name: str, outputs: int, output: str, limit: int, parts: tuple[int, ...] = ()) -> Op:
        return t.linear(name, stream, c.hidden, outputs, c.dtype, carry=(t.tensor(output, stream, outputs, split=True), residual),
                        source="hidden", output=output, split="column", bias=True, residual="take", tp_limit=limit,
                        parts=parts)  # fmt: skip

    def row(name: str, inputs: int, source: str, limit: int) -> Op:
        return t.linear(name, stream, inputs, c.hidden, c.dtype, carry=(hidden,), source=source, output="hidden", split="row", bias=True,
                        residual="add", dropout=c.dropout, tp_limit=limit)  # fmt: skip

    return Block("layers", (
        column("qkv", 3 * c.hidden, "qkv", c.heads, (c.hidden,) * 3),
        t.attention("attention", stream, c.heads, c.heads, c.hidden // c.heads, c.dtype,
                    carry=(t.tensor("context", stream, c.hidden, split=True), residual), causal=False, fused=c.fused_attention,
                    dropout=c.attention_dropout),
        row("out", c.hidden, "context", c.heads),
        norm("norm1"),
        column("up", c.ffn, "ffn", c.ffn),
        t.activation("act", stream, c.ffn, c.dtype, carry=(t.tensor("act", stream, c.ffn, split=True), residual),
                     function=c.activation, gated=False),
        row("down", c.ffn, "act", c.ffn),
        norm("norm2"),
    ))  # fmt: skip


def bert(config: BertConfig, name: str = "bert") -> Model:
    """The chain of a BERT for pre-training: embedding, layers, next-sentence head, masked-token head, loss."""
    c = config
    require_divides("heads", c.heads, "hidden", c.hidden)
    if c.attention_dropout and c.fused_attention:
        raise InputError(
            f"{name}: attention_dropout={c.attention_dropout} exists only on the unfused path. "
            "Set fused_attention: false, or attention_dropout: 0."
        )
    stream = t.Stream()
    hidden = t.tensor("hidden", stream, c.hidden)
    pooled = (TensorSpec("next_sentence", ("samples", 2)),) if c.next_sentence else ()
    carry = (hidden, *pooled)
    head = Block("embedding", (
        t.embedding(stream, c.vocab, c.hidden, c.dtype, carry=(hidden,), max_positions=c.seq_length, types=c.types),
        t.norm("norm", stream, c.hidden, c.dtype, carry=(hidden,), rms=False, eps=c.eps, dropout=c.dropout),
    ))  # fmt: skip
    transform = (t.tensor("transform", stream, c.hidden), *pooled)
    tail_ops = (
        t.linear("transform", stream, c.hidden, c.hidden, c.dtype, carry=transform, source="hidden", output="transform", split="whole",
                 bias=True),
        t.activation("transform_act", stream, c.hidden, c.dtype, carry=carry, function=c.activation, gated=False, source="transform",
                     output="hidden", split=False),
        t.norm("transform_norm", stream, c.hidden, c.dtype, carry=carry, rms=False, eps=c.eps),
        t.logits(stream, c.hidden, c.vocab, c.dtype, tied_to="embedding" if c.tied else "", bias=True, keep=pooled),
        t.loss("loss", stream, c.vocab, c.dtype, next_sentence=c.next_sentence),
    )  # fmt: skip
    pooling = (t.pooler(c.hidden, c.dtype, carry=carry),) if c.next_sentence else ()
    runs = ((head, 1), (_layer(c), c.layers), (Block("head", (*pooling, *tail_ops)), 1))
    return Model(name, "bert", c.dtype, runs, seq_length=c.seq_length, config=vars(c))
