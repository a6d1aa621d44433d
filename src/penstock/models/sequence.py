"""A model as it is under sequence parallelism: the same chain, with what each op then holds, moves and sends.

Between tensor-parallel products each rank has some rows of the tokens and works on those alone; a product by column gathers the rows
before it, one by row hands out the rows of its sum. What stood whole on every rank is divided:

    op                     works on   sends, forward / backward                               keeps
    norm                   rows       - / sums of its weights' gradients                      its input, by rows
    product by column      all        all-gather / reduce-scatter of its input                its input, gathered: whole
    product by row         all        reduce-scatter / all-gather of its result               its input, by columns
    product not divided    rows       - / sums of its weights' gradients                      its input, by rows
    activation             as given   -                                                       as given
    embedding              all        as without / and an all-gather of its result
    logits, pooler         all        an all-gather of its input and as without               its input, gathered: whole

Both ways send as many bytes as the all-reduce that they replace; the sums of small gradients come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.models.ops import ITEM_BYTES, Block, Collective, Model, Op, Split, TensorSpec
from penstock.models.shapes import Form, Quantity

__all__ = ["by_rows", "divides_tokens", "with_sequence_parallelism"]

_TOKENS = ("tokens", "dec_tokens")
_WITHOUT_CHANGE = ("attention", "loss")


def by_rows(spec: TensorSpec) -> bool:
    """Whether a tensor of the carry is divided by rows: what counts tokens and is not divided otherwise."""
    return not spec.split and bool(spec.dims) and spec.dims[0] in _TOKENS


def divides_tokens(model: Model) -> bool:
    """Whether sequence parallelism means anything for a model: its ops are those of a transformer."""
    kinds = {op.kind for op in model.distinct_ops}
    return kinds <= {*_CHANGES, *_WITHOUT_CHANGE} and any(by_rows(spec) for op in model.distinct_ops for spec in op.carry)


def with_sequence_parallelism(model: Model) -> Model:
    """The description of the same chain under sequence parallelism; `split` of a tensor then means its rows as well as its columns."""
    changed: dict[int, Op] = {}

    def change(op: Op) -> Op:
        if id(op) not in changed:
            changed[id(op)] = _changed(op, model.dtype)
        return changed[id(op)]

    runs = tuple((Block(block.name, tuple(map(change, block.ops))), copies) for block, copies in model.runs)
    return replace(model, runs=runs, inputs=tuple(map(_rows_of, model.inputs)))


def _rows_of(spec: TensorSpec) -> TensorSpec:
    return replace(spec, split=True) if by_rows(spec) else spec


def _changed(op: Op, dtype: str) -> Op:
    found = _CHANGES[op.kind](op, ITEM_BYTES[dtype]) if op.kind in _CHANGES else op
    return replace(found, carry=tuple(map(_rows_of, op.carry)))


def _divided(amount: Quantity) -> Quantity:
    """The same amount, of which each rank of a tensor-parallel group has its part."""
    return Quantity(split=amount.whole + amount.split)


def _summed(*counts: int, item: int) -> tuple[Collective, ...]:
    """Gradients of weights that ranks use on different rows."""
    return tuple(Collective("all_reduce", "backward", Form.of(one=count * item)) for count in counts if count)


def _norm(op: Op, item: int) -> Op:
    width = op.config["width"]
    (split,) = op.splits
    sums = _summed(width, 0 if op.config["rms"] else width, item=item)
    return replace(
        op, sequence="rows", traffic=_divided(op.traffic), backward_traffic=_divided(op.backward_traffic),
        splits=(replace(split, collectives=sums, kept=_divided(split.kept)),),
    )  # fmt: skip


def _linear(op: Op, item: int) -> Op:
    c = op.config
    per_token = "dec_tokens" if c["side"] == "decoder" else "tokens"
    size_in, size_out = (Form.of(**{per_token: c[name] * item}) for name in ("inputs", "outputs"))
    bias = c["outputs"] if c["bias"] else 0
    if c["split"] == "whole":
        weights = Form.of(one=c["inputs"] * c["outputs"] * item)
        sums = _summed(c["inputs"] * c["outputs"], bias, item=item)
        return replace(
            op, sequence="rows", flops=_divided(op.flops), backward_flops=_divided(op.backward_flops),
            traffic=Quantity(weights, size_in + size_out), backward_traffic=Quantity(weights, size_in + size_out) * 2,
            splits=(replace(op.splits[0], collectives=sums),),
        )  # fmt: skip
    first, second = op.splits
    if c["split"] == "column":
        gathered = Quantity(whole=size_in)
        first = Split((Collective("all_gather", "forward", size_in), Collective("reduce_scatter", "backward", size_in)), kept=gathered)
        gathers = Collective("all_gather", "forward", size_in)
        second = replace(second, collectives=(gathers, *second.collectives), kept=gathered, saves_in=())
        return replace(
            op, sequence="whole", splits=(first, second), workspace=op.workspace + gathered,
            backward_workspace=op.backward_workspace + gathered,
        )  # fmt: skip
    result = Quantity(whole=size_out)
    traffic = op.traffic
    if c["residual"] == "add":  # the sum is by rows, the product's result is not
        traffic = Quantity(size_out, traffic.split + size_out)
    first = Split(
        (Collective("reduce_scatter", "forward", size_out), Collective("all_gather", "backward", size_out), *_summed(bias, item=item)),
        saves_in=first.saves_in,
    )  # fmt: skip
    residual = (Collective("all_gather", "forward", size_out),) if c["residual"] == "add" else ()
    second = replace(second, collectives=(*residual, *second.collectives, Collective("all_gather", "backward", size_out)))
    return replace(
        op, sequence="whole", traffic=traffic, backward_traffic=traffic * 2, splits=(first, second), workspace=op.workspace + result,
        backward_workspace=op.backward_workspace + result,
    )  # fmt: skip


def _activation(op: Op, item: int) -> Op:
    if op.config["split"]:
        return op
    return replace(op, sequence="rows", traffic=_divided(op.traffic), backward_traffic=_divided(op.backward_traffic))


def _embedding(op: Op, item: int) -> Op:
    """Every rank makes the whole result and keeps its rows of it."""
    results = [spec.elements() * item for spec in op.carry if by_rows(spec) and spec.name == op.config["output"]]
    (split,) = op.splits
    gathers = tuple(Collective("all_gather", "backward", size) for size in results)
    whole = sum((Quantity(whole=size) for size in results), Quantity())
    return replace(
        op, sequence="whole", splits=(replace(split, collectives=(*split.collectives, *gathers)),), workspace=op.workspace + whole,
        backward_workspace=op.backward_workspace + whole,
    )  # fmt: skip


def _head(op: Op, item: int) -> Op:
    """Reads the whole of the hidden state, which the logits then save and the pooler does not."""
    width = op.config["inputs"] if op.kind == "logits" else op.config["width"]
    size = Form.of(**{"dec_tokens" if op.config["side"] == "decoder" else "tokens": width * item})
    (split,) = op.splits
    split = replace(split, collectives=(Collective("all_gather", "forward", size), *split.collectives))
    if op.kind == "logits":
        split = replace(split, kept=Quantity(whole=size), saves_in=())
    return replace(op, sequence="whole", splits=(split,), workspace=op.workspace + Quantity(whole=size))


_CHANGES: dict[str, Callable[[Op, int], Op]] = {
    "norm": _norm, "linear": _linear, "activation": _activation, "embedding": _embedding, "logits": _head, "pooler": _head,
}  # fmt: skip
