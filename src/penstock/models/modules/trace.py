"""Turns a user's own module into a model description, without memory or arithmetic: one pass on fake tensors per shape.

The module runs as it is. Wherever one of its units (a child of a Sequential, a block of a ModuleList, …) starts, an op starts:

    units      embed        blocks.0      blocks.1            head
    ops        ├─ embed ────┼─ blocks.0 ──┼─ blocks.1 ────────┼─ head ────
    code of the module itself between two units belongs to the first of them

A dispatch mode sees every operation: its flops and bytes go to the op it runs in (in the backward pass, to the op that made the
autograd node). What travels in an op's carry is what a stage that ends there would send, see `cutting.skipping`: masks and angles that
follow from the micro-batch are made by every stage itself. Runs at several shapes give each amount as a linear form over the features of
a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from penstock.errors import InputError
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.cutting.dividing import Division
from penstock.models.modules.cutting.seen import SeenMicroBatch
from penstock.models.modules.cutting.skipping import Call, Skipping
from penstock.models.modules.cutting.weights import WeightTable
from penstock.models.modules.trace_fit import PresentDivision, TraceFit
from penstock.models.modules.traced_pass import Called, TracedPass, told_where
from penstock.models.ops import Block, Model, Op
from penstock.models.shapes import Shape

__all__ = ["Divided", "trace_module"]

Example = Callable[[int, int], Any] | Sequence[torch.Tensor] | torch.Tensor
_BASIS = ("one", "samples", "tokens", "squares")
_DECODER_BASIS = ("dec_tokens", "dec_squares", "cross")


def trace_module(
    module: nn.Module, example: Example, name: str = "traced", dtype: str = "fp32", *, length: int = 128, call: Called | None = None,
    divided: Divided | None = None, two_sided: bool = False,
) -> Model:  # fmt: skip
    """The description of `module` when it trains in `dtype`; its weights may be on the meta device.

    `example` makes the arguments of a forward pass from (samples, length), or is such arguments: then the first dimension counts
    samples, and the second of integer matrices and of float tensors with three dimensions is the length. `length` is the longest
    that a callable `example` is asked for. `call` runs the module on what `example` makes, perhaps up to its loss. `divided` says what
    tensor parallelism divides; with `two_sided` the example is given the length of a decoder's side too. Kept bytes are those of
    torch's CPU kernels.

        model = trace_module(net, lambda samples, length: (torch.randint(100, (samples, length)),), "mine", "bf16")
        write_json("mine.json", model_to_description(model))
    """
    make, length = (example, length) if call is not None and callable(example) else _maker(example, length)
    run = call or (lambda own, given: own(**given) if isinstance(given, Mapping) else own(*given))
    if dtype not in TORCH_DTYPES:
        raise InputError(f"trace of '{name}': dtype is {dtype!r}; known: {', '.join(TORCH_DTYPES)}.")
    if next(module.parameters(), None) is None:
        raise InputError(f"trace of '{name}': {type(module).__name__} has no parameters, so there is nothing to train or to divide.")
    short, middle, long = (max(1, length * quarters // 4) for quarters in (1, 2, 3))
    # Four lengths, so that a cube cannot pass for a square. Never one sample: torch skips copies where the first dimension is 1.
    points: list[tuple[int, ...]] = [(2, short), (3, short), (2, middle), (4, long), (3, length)]
    if two_sided:
        others = [middle, short, middle, short, long]
        points = [(*point, other) for point, other in zip(points, others, strict=True)]
        points += [(2, short, length), (4, middle, long), (2, length, short), (3, long, length)]

    basis = (*_BASIS, *_DECODER_BASIS) if two_sided else _BASIS

    def trace() -> tuple[list[Op], bool]:
        present = _present(module, divided)
        division = Division(module, present.styles)
        try:
            with _chain(module, lambda own: run(own, make(*points[0])), _where(name, *points[0])) as chain:

                def measured(point: tuple[int, ...], halved: Division | None = None) -> TracedPass:
                    kind = TORCH_DTYPES[dtype]
                    return TracedPass(chain, run, lambda: _cast(make(*point), kind), kind, _where(name, *point), halved)

                runs = [measured(point) for point in points]
                halves = [measured(point, division) for point in points] if present.limit > 1 else []
                weights = WeightTable(chain)
        finally:
            division.close()
        if any(run.names != runs[0].names for run in runs):
            raise InputError(f"trace of '{name}': the module calls other children for other shapes; its chain must stay the same.")
        has_length = short < middle and runs[0].numbers() != runs[2].numbers()  # These two differ in length alone.
        shapes = [Shape.padded(*point) if has_length else Shape.images(point[0]) for point in points]
        return TraceFit(name, dtype, runs, halves, present, shapes, basis if has_length else _BASIS[:2], weights).ops(), has_length

    ops, has_length = _with_few_blocks(module, trace, divided) or trace()
    return Model(name, "traced", dtype, tuple(_grouped(ops)), seq_length=length if has_length else 0, layouts=("padded",),
                 config={"module": type(module).__name__}, names=tuple(op.name for op in ops))  # fmt: skip


@dataclass(frozen=True)
class Divided:
    """What tensor parallelism divides of a module."""

    styles: Mapping[nn.Module, str]
    """Of each such part."""
    limit: int
    """Degrees that divide it are possible."""


def _present(module: nn.Module, divided: Divided | None) -> PresentDivision:
    if divided is None:
        return PresentDivision({}, 1)
    return PresentDivision({path: divided.styles[part] for path, part in module.named_modules() if part in divided.styles}, divided.limit)


def _where(name: str, samples: int, *lengths: int) -> str:
    return f"trace of '{name}' at {samples} samples of length {' and '.join(map(str, lengths))}"


@contextmanager
def _chain(module: nn.Module, call: Call, where: str) -> Iterator[Skipping]:
    """The module as a chain of units, with the order of their calls and what crosses between them."""
    chain = Skipping(module)
    try:
        with _buffers_off_meta(module), told_where(where, lambda: "" if chain.last_begun is None else chain.last_begun):
            chain.trace(call)
        yield chain
    finally:
        chain.close()


@contextmanager
def _buffers_off_meta(module: nn.Module) -> Iterator[None]:
    """Buffers without values are zeros meanwhile: code between units mixes them with the micro-batch, which is on the host."""
    saved = [(part._buffers, name, b) for part in module.modules() for name, b in part._buffers.items() if b is not None and b.is_meta]
    for store, name, buffer in saved:
        store[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    try:
        yield
    finally:
        for store, name, buffer in saved:
            store[name] = buffer


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Inputs in the dtype of the module."""
    if isinstance(given, SeenMicroBatch):
        given.ids = given.ids.to(dtype) if given.ids.is_floating_point() else given.ids
        return given
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, given)


_FEW = 4
"""Of a longer list of equal blocks the first three and the last are traced; the second stands for those left out."""


def _with_few_blocks(
    module: nn.Module, trace: Callable[[], tuple[list[Op], bool]], divided: Divided | None
) -> tuple[list[Op], bool] | None:
    """`trace()` while long lists of equal blocks are cut short; None where that does not work or would not tell the truth."""
    cut: dict[str, tuple[nn.ModuleList, dict[str, nn.Module | None]]] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in cut)
        if isinstance(part, nn.ModuleList) and not inside and len(part) > _FEW and len({_structure(block, divided) for block in part}) == 1:
            cut[path] = part, part._modules
    if not cut:
        return None
    try:
        for part, blocks in cut.values():
            few = [*list(blocks.values())[: _FEW - 1], list(blocks.values())[-1]]
            part._modules = {str(index): block for index, block in enumerate(few)}
        ops, has_length = trace()
    except InputError:
        return None
    finally:
        for part, blocks in cut.values():
            part._modules = blocks
    for path, (_, blocks) in cut.items():
        places = [index for index, op in enumerate(ops) if op.name.startswith(f"{path}.")]
        if [ops[index].name for index in places] != [f"{path}.{index}" for index in range(_FEW)]:
            return None
        second = places[1]
        if places != list(range(places[0], places[0] + _FEW)) or ops[second].signature != ops[second + 1].signature:
            return None
        ops = [*ops[:second], *[ops[second]] * (len(blocks) - _FEW), *ops[second:]]
        for index in range(len(blocks)):
            ops[places[0] + index] = replace(ops[places[0] + index], name=f"{path}.{index}")
    return ops, has_length


def _structure(block: nn.Module, divided: Divided | None) -> tuple[Any, ...]:
    state = [*block.named_parameters(), *block.named_buffers()]
    styles = tuple(_present(block, divided).styles.items())
    return repr(block), styles, tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in state)


def _maker(example: Example, length: int) -> tuple[Callable[[int, int], Any], int]:
    """A function from (samples, length) to arguments, and the longest length to ask it for."""
    if callable(example) and not isinstance(example, torch.Tensor):

        def call(samples: int, size: int) -> Any:
            args = example(samples, size)
            return args if isinstance(args, Mapping) else tuple(args) if isinstance(args, tuple | list) else (args,)

        return call, length
    given = (example,) if isinstance(example, torch.Tensor) else tuple(example)
    timed = [x.dim() == (3 if x.is_floating_point() else 2) for x in given]
    longest = max((x.shape[1] for x, has in zip(given, timed, strict=True) if has), default=1)

    def resize(samples: int, size: int) -> tuple[Any, ...]:
        sizes = [(samples, max(1, x.shape[1] * size // longest), *x.shape[2:]) if has else (samples, *x.shape[1:])
                 for x, has in zip(given, timed, strict=True)]  # fmt: skip
        return tuple(torch.zeros(shape, dtype=x.dtype) for x, shape in zip(given, sizes, strict=True))

    return resize, longest


def _grouped(ops: list[Op]) -> Iterator[tuple[Block, int]]:
    """Runs of equal ops of one list, each stored once. Ops that share weights with others keep their own names."""
    tied = {op.tied_to for op in ops} - {""} | {op.name for op in ops if op.tied_to}
    for (parent, _, _), run in itertools.groupby(
        ops, key=lambda op: (op.name.rpartition(".")[0], op.signature, op.name if op.name in tied else "")
    ):
        first, *others = run
        yield (Block(parent or "ops", (replace(first, name="block"),)) if others else Block(first.name, (first,))), 1 + len(others)
