"""T5: an encoder whose output travels in the carry through a decoder; relative position biases travel as small tables too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.models import transformer as t
from penstock.models.ops import Block, Model, Op, TensorSpec

__all__ = ["T5_SIZES", "T5Config", "t5"]


@dataclass(frozen=True)
class T5Config:
    """Sizes of a T5; `layers` on the encoder's side and as many on the decoder's unless said otherwise."""

    layers: int
    hidden: int
    heads: int
    head_width: int
    ffn: int
    vocab: int = 30592
    dec_layers: int = 0
    seq_length: int = 2048
    dec_length: int = 512
    buckets: int = 32
    max_distance: int = 128
    gated: bool = False
    activation: str = "relu"
    tied: bool = True
    scaled: bool | None = None
    """Whether the logits are made of hidden / √width; None: where the weight is tied."""
    eps: float = 1e-6
    dropout: float = 0.0
    dtype: str = "bf16"


T5_SIZES = {
    "t5-tiny": T5Config(2, 64, 4, 16, 128, vocab=512, seq_length=64, dec_length=32, dtype="fp32"),
    "t5-small": T5Config(6, 512, 8, 64, 2048, vocab=32128, seq_length=512),
    "t5-base": T5Config(12, 768, 12, 64, 3072, vocab=32128, seq_length=512),
    "t5-large": T5Config(24, 1024, 16, 64, 4096, vocab=32128, seq_length=512),
    "t5-770m": T5Config(24, 1024, 16, 64, 4096),
    "t5-3b": T5Config(24, 1024, 32, 128, 16384),
    "t5-6b": T5Config(24, 1024, 64, 128, 32768),
    "t5-11b": T5Config(24, 1024, 128, 128, 65536),
    "t5-22b": T5Config(48, 1024, 128, 128, 65536),
    "t5-fasop": T5Config(24, 1024, 32, 128, 3072, vocab=30522, seq_length=512, dec_length=512),
}


@dataclass(frozen=True)
class _Side:
    """Builds the ops of one stack, all of which also pass on `along`."""

    c: T5Config
    stream: t.Stream
    along: tuple[TensorSpec, ...]

    def carry(self, *own: TensorSpec) -> tuple[TensorSpec, ...]:
        return (*own, *self.along)

    def hidden(self, name: str = "hidden") -> TensorSpec:
        return t.tensor(name, self.stream, self.c.hidden)

    def wide(self, name: str, width: int) -> TensorSpec:
        return t.tensor(name, self.stream, width, split=True)

    def norm(self, name: str) -> Op:
        carry = self.carry(self.hidden(), self.hidden("residual"))
        return t.norm(name, self.stream, self.c.hidden, self.c.dtype, carry=carry, rms=True, eps=self.c.eps, residual=True)

    def linear(self, name: str, stream: t.Stream, inputs: int, outputs: int, carry: tuple[TensorSpec, ...], source: str, output: str,
               **more: Any) -> Op:  # fmt: skip
        split = "row" if output == "hidden" else "column"
        extra: dict[str, Any] = {"residual": "add", "dropout": self.c.dropout} if split == "row" else {}
        return t.linear(name, stream, inputs, outputs, self.c.dtype, carry=carry, source=source, output=output, split=split, bias=False,
                        **extra, **more)  # fmt: skip

    def self_attention(self, causal: bool, bias: str) -> tuple[Op, ...]:
        c, inner, residual = self.c, self.c.heads * self.c.head_width, self.hidden("residual")
        return (
            self.norm("norm1"),
            self.linear("qkv", self.stream, c.hidden, 3 * inner, self.carry(self.wide("qkv", 3 * inner), residual), "hidden", "qkv",
                        tp_limit=c.heads, parts=(inner,) * 3),
            t.attention("attention", self.stream, c.heads, c.heads, c.head_width, c.dtype,
                        carry=self.carry(self.wide("context", inner), residual), causal=causal, bias_source=bias, buckets=c.buckets,
                        max_distance=c.max_distance, bidirectional=not causal, scale=1.0, fused=False),
            self.linear("out", self.stream, inner, c.hidden, self.carry(self.hidden()), "context", "hidden", tp_limit=c.heads),
        )  # fmt: skip

    def cross_attention(self) -> tuple[Op, ...]:
        c, inner, residual = self.c, self.c.heads * self.c.head_width, self.hidden("residual")
        query = self.wide("q", inner)
        keys = TensorSpec("kv", ("tokens", 2 * inner), split=True)
        return (
            self.norm("norm2"),
            self.linear("cross_q", self.stream, c.hidden, inner, self.carry(query, residual), "hidden", "q", tp_limit=c.heads),
            self.linear("cross_kv", t.Stream(), c.hidden, 2 * inner, self.carry(query, residual, keys), "encoder", "kv",
                        tp_limit=c.heads, parts=(inner,) * 2),
            t.attention("cross_attention", self.stream, c.heads, c.heads, c.head_width, c.dtype,
                        carry=self.carry(self.wide("context", inner), residual), causal=False, source="q", cross_source="kv", scale=1.0),
            self.linear("cross_out", self.stream, inner, c.hidden, self.carry(self.hidden()), "context", "hidden", tp_limit=c.heads),
        )  # fmt: skip

    def mlp(self) -> tuple[Op, ...]:
        c, residual = self.c, self.hidden("residual")
        outputs = 2 * c.ffn if c.gated else c.ffn
        return (
            self.norm("norm3"),
            self.linear("up", self.stream, c.hidden, outputs, self.carry(self.wide("ffn", outputs), residual), "hidden", "ffn",
                        tp_limit=c.ffn, parts=(c.ffn,) * (2 if c.gated else 1)),
            t.activation("act", self.stream, c.ffn, c.dtype, carry=self.carry(self.wide("act", c.ffn), residual), function=c.activation,
                         gated=c.gated),
            self.linear("down", self.stream, c.ffn, c.hidden, self.carry(self.hidden()), "act", "hidden", tp_limit=c.ffn),
        )  # fmt: skip


def t5(config: T5Config, name: str = "t5") -> Model:
    """The chain of a T5: encoder, decoder with cross attention, logits, loss. Only padded: its position bias has no packed kernel."""
    c = config
    own, dec = t.Stream(), t.Stream("dec_tokens", "dec_squares")
    enc_bias, dec_bias = (TensorSpec(f"{side}_bias", (c.buckets, c.heads)) for side in ("enc", "dec"))
    memory = t.tensor("encoder", own, c.hidden)
    encoder, decoder = _Side(c, own, (enc_bias,)), _Side(c, dec, (memory, dec_bias))

    def embed(stream: t.Stream, carry: tuple[TensorSpec, ...], bias: str, tied_to: str) -> Op:
        return t.embedding(stream, c.vocab, c.hidden, c.dtype, carry=carry, buckets=c.buckets, heads=c.heads, dropout=c.dropout,
                           tied_to=tied_to, bias_output=bias)  # fmt: skip

    def norm(name: str, stream: t.Stream, result: TensorSpec) -> Op:
        return t.norm(name, stream, c.hidden, c.dtype, carry=(result,), rms=True, eps=c.eps, output=result.name, dropout=c.dropout)

    runs = (
        (Block("embedding", (embed(own, encoder.carry(encoder.hidden()), "enc_bias", ""),)), 1),
        (Block("encoder", (*encoder.self_attention(False, "enc_bias"), *encoder.mlp())), c.layers),
        (Block("bridge", (
            norm("norm", own, memory),
            embed(dec, decoder.carry(decoder.hidden()), "dec_bias", "embedding"),
        )), 1),
        (Block("decoder", (*decoder.self_attention(True, "dec_bias"), *decoder.cross_attention(), *decoder.mlp())),
         c.dec_layers or c.layers),
        (Block("head", (
            norm("norm", dec, decoder.hidden()),
            t.logits(dec, c.hidden, c.vocab, c.dtype, tied_to="embedding" if c.tied else "",
                     scale=c.hidden**-0.5 if (c.tied if c.scaled is None else c.scaled) else 1.0),
            t.loss("loss", dec, c.vocab, c.dtype),
        )), 1),
    )  # fmt: skip
    return Model(name, "t5", c.dtype, runs, seq_length=c.seq_length, dec_length=c.dec_length, layouts=("padded",), config=vars(c))
