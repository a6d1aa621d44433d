"""Builders of the ops that transformer families are chained from, with their formulas.

Activations are flat: `tokens × width` in both layouts, so only attention knows where a sequence ends.

    hidden ─ norm ─ hidden ─ qkv ─ qkv ─ attention ─ context ─ out ─ hidden ─ norm ─ up ─ ffn ─ act ─ act ─ down ─ hidden
       └──────────── residual ─────────────────────────────────(+)      └── residual ─────────────────────────(+)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.models.ops import ITEM_BYTES, Collective, Op, Split, TensorSpec
from penstock.models.shapes import Form, Quantity

__all__ = ["Stream", "activation", "attention", "embedding", "linear", "logits", "loss", "norm", "pooler", "tensor"]

LOSS_CHUNK_ELEMENTS = 2**23
"""The loss works through the logits in fp32 pieces of this many elements."""
RAGGED_WIDTHS = (16, 32, 64, 128)
"""Widths of a head that our own kernels for attention of packed samples are made for."""


class Stream:
    """Names the side of the model an op works on: which features count its tokens and its squares."""

    def __init__(self, tokens: str = "tokens", squares: str = "squares") -> None:
        self.tokens, self.squares = tokens, squares
        self.side = "own" if tokens == "tokens" else "decoder"

    def per_token(self, amount: float) -> Form:
        """`amount` for each token position of this side."""
        return Form.of(**{self.tokens: amount})


def tensor(name: str, stream: Stream, width: int, split: bool = False) -> TensorSpec:
    """A carry tensor of `width` values per token."""
    return TensorSpec(name, (stream.tokens, width), split=split)


def _constant(value: float) -> Form:
    return Form.of(one=value)


def embedding(
    stream: Stream, vocab: int, width: int, dtype: str, *, carry: Sequence[TensorSpec], max_positions: int = 0, types: int = 0,
    buckets: int = 0, heads: int = 0, dropout: float = 0.0, tied_to: str = "", bias_output: str = "",
) -> Op:  # fmt: skip
    """Token ids → hidden; divides the vocabulary under tp. May add positions, token types, and a table of position biases."""
    item = ITEM_BYTES[dtype]
    extra = (max_positions + types) * width + buckets * heads
    moved = stream.per_token((3 if max_positions else 2) * width * item)
    config: dict[str, Any] = {
        "vocab": vocab, "width": width, "max_positions": max_positions, "types": types, "position_offset": 0,
        "buckets": buckets, "heads": heads, "bidirectional": True, "scale": 1.0, "dropout": dropout,
        "side": stream.side, "output": "hidden", "bias_output": bias_output,
    }  # fmt: skip
    if tied_to:
        config["untied_parameters"] = extra
    return Op(
        "embedding", "embedding", config, tuple(carry),
        parameters=Quantity(whole=_constant(extra), split=_constant(vocab * width)),
        traffic=Quantity(whole=moved), backward_traffic=Quantity(whole=moved * 1.5),
        backward_workspace=Quantity(split=_constant(vocab * width * item)),
        splits=(Split((Collective("all_reduce", "forward", stream.per_token(width * item)),)),),
        tp_limit=0, num_kernels=3 if max_positions else 1, tied_to=tied_to,
    )  # fmt: skip


def norm(
    name: str, stream: Stream, width: int, dtype: str, *, carry: Sequence[TensorSpec], rms: bool, eps: float,
    residual: bool = False, source: str = "hidden", output: str = "hidden", dropout: float = 0.0,
) -> Op:  # fmt: skip
    """Layer norm or RMS norm; with `residual` it first puts its input aside for the next addition."""
    item = ITEM_BYTES[dtype]
    statistics = 4 if rms else 8
    return Op(
        name, "norm", {"width": width, "rms": rms, "eps": eps, "residual": residual, "source": source, "output": output,
                       "dropout": dropout, "side": stream.side},
        tuple(carry), parameters=Quantity(whole=_constant(width if rms else 2 * width)),
        flops=Quantity(), traffic=Quantity(whole=stream.per_token(2 * width * item)),
        backward_traffic=Quantity(whole=stream.per_token(4 * width * item)),
        splits=(Split(kept=Quantity(whole=stream.per_token(statistics)), saves_in=(source,)),), tp_limit=0,
    )  # fmt: skip


def linear(
    name: str, stream: Stream, inputs: int, outputs: int, dtype: str, *, carry: Sequence[TensorSpec], source: str, output: str,
    split: str, bias: bool, residual: str = "", dropout: float = 0.0, tp_limit: int = 0, parts: tuple[int, ...] = (),
) -> Op:  # fmt: skip
    """A matrix product per token.

    `split` is "column" (outputs divided), "row" (inputs divided) or "whole" (repeated on every rank); `algo` 1 swaps column and
    row and communicates so that the carry on both sides stays the same. `residual` is "take" (put the input aside), "add" (add
    what was put aside) or "".
    `parts` are the widths of outputs that are divided separately, such as q, k and v.
    """
    item = ITEM_BYTES[dtype]
    size_in, size_out = stream.per_token(inputs * item), stream.per_token(outputs * item)
    weights = inputs * outputs
    flops = Quantity(split=stream.per_token(2 * weights))
    splits: tuple[Split, ...]
    if split == "whole":
        flops = Quantity(whole=stream.per_token(2 * weights))
        traffic = Quantity(whole=size_in + size_out + _constant(weights * item))
        splits = (Split(saves_in=(source,)),)
    elif split == "column":
        traffic = Quantity(whole=size_in, split=size_out + _constant(weights * item))
        splits = (
            Split((Collective("all_reduce", "backward", size_in),), saves_in=(source,)),
            Split((Collective("reduce_scatter", "forward", size_out), Collective("all_gather", "backward", size_out),
                   Collective("all_gather", "backward", size_in)), saves_in=(source,)),
        )  # fmt: skip
    else:
        traffic = Quantity(whole=size_out * (2 if residual == "add" else 1), split=size_in + _constant(weights * item))
        splits = (
            Split((Collective("all_reduce", "forward", size_out),), saves_in=(source,)),
            Split((Collective("all_gather", "forward", size_in), Collective("all_gather", "forward", size_out),
                   Collective("reduce_scatter", "backward", size_in)), kept=Quantity(whole=size_in)),
        )  # fmt: skip
    bias_amount = outputs if bias else 0
    everywhere = {"column": 0, "row": bias_amount, "whole": weights + bias_amount}[split]
    parameters = Quantity(whole=_constant(everywhere), split=_constant(weights + bias_amount - everywhere))
    config = {
        "inputs": inputs, "outputs": outputs, "source": source, "output": output, "split": split, "bias": bias,
        "residual": residual, "dropout": dropout, "parts": list(parts), "side": stream.side,
    }  # fmt: skip
    return Op(
        name, "linear", config, tuple(carry), parameters=parameters, flops=flops, backward_flops=flops * 2,
        traffic=traffic, backward_traffic=traffic * 2, splits=splits, tp_limit=tp_limit,
        backward_workspace=Quantity(split=_constant(weights * item)),
        num_kernels=2 if residual == "add" else 1,
    )  # fmt: skip


def attention(
    name: str, stream: Stream, heads: int, kv_heads: int, head_width: int, dtype: str, *, carry: Sequence[TensorSpec], causal: bool,
    source: str = "qkv", cross_source: str = "", rotary: dict[str, Any] | None = None, qk_norm: float = 0.0,
    bias_source: str = "", buckets: int = 0, max_distance: int = 0, bidirectional: bool = True, scale: float = 0.0,
    fused: bool = True, dropout: float = 0.0, window: int = 0,
) -> Op:  # fmt: skip
    """Scaled dot-product attention inside each sequence; divides heads under tp.

    `cross_source` names keys and values that come from the encoder. `bias_source` names a table of relative position biases in the
    carry. `qk_norm` is the epsilon of RMS norms on queries and keys (0: none).
    """
    item = ITEM_BYTES[dtype]
    width, kv_width = heads * head_width, kv_heads * head_width
    squares = "cross" if cross_source else stream.squares
    # A fused kernel works on one triangle of a causal square, and makes the scores once more in its backward pass.
    flops = Quantity(split=Form.of(**{squares: 4 * width * (0.5 if causal and fused else 1)}))
    kept = Quantity(split=stream.per_token(heads * 4))
    saves = [source, cross_source] if cross_source else [source]
    parameters = Quantity()
    rotated = stream.per_token((width + kv_width) * item)
    if rotary or qk_norm:
        kept = kept + Quantity(split=rotated)
    if qk_norm:
        kept = kept + Quantity(split=stream.per_token((heads + kv_heads) * 4))
        parameters = Quantity(whole=_constant(2 * head_width))
    if not fused:
        # Probabilities, and queries, keys and values copied head by head; with dropout also what is left of the probabilities, and an
        # int64 key for each row.
        copies = stream.per_token((width + 2 * kv_width) * item + (8 * heads if dropout else 0))
        kept = Quantity(split=Form.of(**{squares: heads * item * (2 if dropout else 1)}) + copies)
        saves = []
    passes = 0 if fused else 6
    moved = Quantity(split=stream.per_token(2 * (width + kv_width) * item) + Form.of(**{squares: passes * heads * item}))
    config = {
        "heads": heads, "kv_heads": kv_heads, "head_width": head_width, "causal": causal, "source": source, "output": "context",
        "cross_source": cross_source, "rotary": rotary, "qk_norm": qk_norm, "bias_source": bias_source, "buckets": buckets,
        "max_distance": max_distance, "bidirectional": bidirectional, "scale": scale, "fused": fused, "dropout": dropout,
        "window": window, "side": stream.side,
    }  # fmt: skip
    return Op(
        name, "attention", config, tuple(carry), parameters=parameters, flops=flops, backward_flops=flops * (2.5 if fused else 2),
        repeated_flops=flops * (0.5 if fused else 0),
        traffic=moved, backward_traffic=moved * 2, tp_limit=kv_heads,
        splits=(Split(kept=kept, saves_in=tuple(saves), saves_out=("context",) if fused else ()),),
        num_kernels=7 if rotary else 1, mask_item_bytes=item if window and fused else 0,
    )  # fmt: skip


def activation(
    name: str, stream: Stream, width: int, dtype: str, *, carry: Sequence[TensorSpec], function: str, gated: bool,
    source: str = "ffn", output: str = "act", split: bool = True,
) -> Op:  # fmt: skip
    """An element-wise function; `gated` multiplies the function of one half of the input with the other half."""
    item = ITEM_BYTES[dtype]
    inputs = 2 * width if gated else width
    amount = stream.per_token((inputs + width) * item)
    # A plain ReLU's gradient needs only the sign of its result, which the next op saves anyway; the others need the input.
    from_result = function == "relu" and not gated
    moved = Quantity(split=amount) if split else Quantity(whole=amount)
    return Op(
        name, "activation", {"width": width, "function": function, "gated": gated, "source": source, "output": output, "split": split,
                             "side": stream.side},
        tuple(carry), traffic=moved, backward_traffic=moved * 1.5,
        splits=(Split(saves_in=() if from_result else (source,), saves_out=(output,) if from_result else ()),),
        tp_limit=width if split else 0, num_kernels=2 if gated else 1,
    )  # fmt: skip


def pooler(width: int, dtype: str, *, carry: Sequence[TensorSpec]) -> Op:
    """BERT's next-sentence head: first token of each sample → dense → tanh → two logits, kept beside the hidden state."""
    item = ITEM_BYTES[dtype]
    per_sample = Form.of(samples=2 * width * width + 4 * width)
    return Op(
        "pooler", "pooler", {"width": width, "side": "own", "output": "next_sentence"}, tuple(carry),
        parameters=Quantity(whole=_constant(width * width + width + 2 * width + 2)),
        flops=Quantity(whole=per_sample), backward_flops=Quantity(whole=per_sample * 2),
        traffic=Quantity(whole=Form.of(samples=4 * width * item, one=width * width * item)),
        # First tokens and the tanh's result.
        splits=(Split(kept=Quantity(whole=Form.of(samples=2 * width * item))),), tp_limit=0, num_kernels=5,
    )  # fmt: skip


def logits(
    stream: Stream, width: int, vocab: int, dtype: str, *, tied_to: str, bias: bool = False, scale: float = 1.0,
    keep: Sequence[TensorSpec] = (),
) -> Op:  # fmt: skip
    """hidden → vocabulary logits, divided over the vocabulary under tp."""
    item = ITEM_BYTES[dtype]
    weights = vocab * width
    flops = Quantity(split=stream.per_token(2 * weights))
    size_in, size_out = stream.per_token(width * item), stream.per_token(vocab * item)
    traffic = Quantity(whole=size_in, split=size_out + _constant(weights * item))
    config: dict[str, Any] = {"inputs": width, "outputs": vocab, "bias": bias, "scale": scale, "tied": bool(tied_to), "output": "logits",
                              "side": stream.side}  # fmt: skip
    if tied_to:
        config["untied_parameters"] = vocab if bias else 0
    return Op(
        "logits", "logits", config, (tensor("logits", stream, vocab, split=True), *keep),
        parameters=Quantity(split=_constant(weights + (vocab if bias else 0))), flops=flops, backward_flops=flops * 2,
        traffic=traffic, backward_traffic=traffic * 2, backward_workspace=Quantity(split=_constant(weights * item)),
        splits=(Split((Collective("all_reduce", "backward", size_in),),
                      kept=Quantity(whole=size_in) if scale != 1.0 else Quantity(), saves_in=() if scale != 1.0 else ("hidden",)),),
        tp_limit=0, tied_to=tied_to,
    )  # fmt: skip


def loss(name: str, stream: Stream, vocab: int, dtype: str, *, next_sentence: bool = False) -> Op:
    """Cross entropy of the labels, weighted per token; works in fp32 pieces and keeps the logits and their log-sums."""
    item = ITEM_BYTES[dtype]
    size = stream.per_token(vocab * item)
    chunk = Quantity(split=_constant(2 * LOSS_CHUNK_ELEMENTS * 4))
    # A log-sum in fp32, the label's int64 index and whether it is this rank's; of the next-sentence loss two log-probabilities and scalars.
    kept = stream.per_token(4 + 8 + 1) + (Form.of(samples=8, one=4) if next_sentence else Form())
    return Op(
        name, "loss", {"vocab": vocab, "next_sentence": next_sentence, "side": stream.side},
        (TensorSpec("loss", (), dtype="fp32"),),
        traffic=Quantity(split=size * 2), backward_traffic=Quantity(split=size * 2), workspace=chunk, backward_workspace=chunk,
        splits=(Split((Collective("all_reduce", "forward", stream.per_token(12)),),
                      kept=Quantity(whole=kept), saves_in=("logits",)),),
        tp_limit=0, num_kernels=8,
    )  # fmt: skip
