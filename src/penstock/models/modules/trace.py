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

import bisect
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.errors import InputError
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.cutting.dividing import Division, Styles, divided_weights
from penstock.models.modules.cutting.seen import SeenMicroBatch
from penstock.models.modules.cutting.skipping import Call, Skipping
from penstock.models.modules.cutting.weights import WeightTable
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Block, Collective, Model, Op, Split, TensorSpec
from penstock.models.shapes import FEATURES, Form, Quantity, Shape

__all__ = ["Divided", "trace_module"]

Example = Callable[[int, int], Any] | Sequence[torch.Tensor] | torch.Tensor
Called = Callable[[nn.Module, Any], Any]
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_AMOUNTS = ("parameters", "flops", "backward_flops", "traffic", "backward_traffic", "workspace", "kept")
TOLERANCE = 1e-2
"""A form may be off by this share of the whole model's amount before the user is told."""
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

                def measured(point: tuple[int, ...], halved: Division | None = None) -> _Run:
                    kind = TORCH_DTYPES[dtype]
                    return _Run(chain, run, lambda: _cast(make(*point), kind), kind, _where(name, *point), halved)

                runs = [measured(point) for point in points]
                halves = [measured(point, division) for point in points] if present.limit > 1 else []
                weights = WeightTable(chain)
        finally:
            division.close()
        if any(run.names != runs[0].names for run in runs):
            raise InputError(f"trace of '{name}': the module calls other children for other shapes; its chain must stay the same.")
        has_length = short < middle and runs[0].numbers() != runs[2].numbers()  # These two differ in length alone.
        shapes = [Shape.padded(*point) if has_length else Shape.images(point[0]) for point in points]
        return _Fit(name, dtype, runs, halves, present, shapes, basis if has_length else _BASIS[:2], weights).ops(), has_length

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


@dataclass(frozen=True)
class _Present:
    """The same of a module whose lists may be shorter, by the paths that parts have now."""

    styles: Styles
    limit: int

    def inside(self, unit: str) -> Styles:
        """Of the parts of a unit, by their names in it."""
        at = f"{unit}." if unit else ""
        here = {path: style for path, style in self.styles.items() if path == unit or path.startswith(at)}
        return {"" if path == unit else path.removeprefix(at): style for path, style in here.items()}


def _present(module: nn.Module, divided: Divided | None) -> _Present:
    if divided is None:
        return _Present({}, 1)
    return _Present({path: divided.styles[part] for path, part in module.named_modules() if part in divided.styles}, divided.limit)


def _where(name: str, samples: int, *lengths: int) -> str:
    return f"trace of '{name}' at {samples} samples of length {' and '.join(map(str, lengths))}"


@contextmanager
def _chain(module: nn.Module, call: Call, where: str) -> Iterator[Skipping]:
    """The module as a chain of units, with the order of their calls and what crosses between them."""
    chain = Skipping(module)
    try:
        with _buffers_off_meta(module), _told(where, lambda: "" if chain.last_begun is None else chain.last_begun):
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


@contextmanager
def _told(where: str, last: Callable[[], str]) -> Iterator[None]:
    """What the module itself raises, as an error that says where it was."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"{where}: stopped in or after '{last() or 'the start'}': {type(error).__name__}: {first_line} "
            "A module can be traced if its example fits and nothing in its forward pass depends on values of tensors."
        ) from error


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Inputs in the dtype of the module."""
    if isinstance(given, SeenMicroBatch):
        given.ids = given.ids.to(dtype) if given.ids.is_floating_point() else given.ids
        return given
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, given)


class _Called(nn.Module):
    """A module with what is done to it, so that both can be run with other weights."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self) -> Any:
        return self.call(self.module)


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


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Flops by torch's own table, which leaves out the CPU's fused attention; a causal one counts its triangle alone."""
    packet = func._overloadpacket
    if packet is _CPU_FLASH:
        query, key, value, *rest = args
        return sdpa_flop_count(query.shape, key.shape, value.shape) * (0.5 if len(rest) > 1 and rest[1] else 1)
    if packet is _CPU_FLASH_BACKWARD:
        grad, query, key, value, _, _, _, causal = args[:8]
        return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape) * (0.5 if causal else 1)
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=out) if count else 0


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns. Torch's shape function of grouped products (experts) knows bf16 alone."""
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype != torch.float32:
        return func(*args, **kwargs)
    half = tree_map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs))
    return func(*half[0], **half[1]).float()


@dataclass
class _Segment:
    """What one op did at one shape."""

    amounts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_AMOUNTS, 0.0))
    num_kernels: int = 0
    parameters: list[str] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    """Storage → bytes, of all it saves but weights and the micro-batch."""
    scratch: list[int] = field(default_factory=list)
    """Bytes of what it makes and neither saves nor hands on."""


class _Run(TorchDispatchMode):
    """One forward and backward pass on fake tensors, taken apart into segments."""

    def __init__(
        self, chain: Skipping, call: Called, make: Callable[[], Any], dtype: torch.dtype, where: str, halved: Division | None = None
    ) -> None:
        """`halved`: as one of two ranks that divide the module runs it."""
        super().__init__()
        self.halved = halved
        self.collectives: list[tuple[int, str, str, int]] = []
        """Op, kind, pass and bytes of what it then runs with the other."""
        self.chain, self.backward = chain, False
        self.handed: list[dict[Any, torch.Tensor]] = []
        """For each op the tensors of the carry that it returns, by their sites; of the last, what the module returns."""
        self._unit: int | None = None
        """Which op's unit runs; None in the code between."""
        self._inner: dict[int, int] = {}
        """Storages that depend on weights → the op whose unit made them and did not return them."""
        self.segments: list[_Segment] = [_Segment()]
        self.names: list[str] = []
        self.edges: list[int] = []
        """Autograd's sequence number at the start of each op but the first."""
        self.owner: dict[int, tuple[str, int]] = {}
        """Weight storages: name and number of elements."""
        self.first_use: dict[str, int] = {}
        self.made_in: dict[int, int] = {}
        """Storage → segment that made it; absent: weights and the micro-batch."""
        self.sizes: dict[int, int] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        """One tensor of each storage, which also keeps the storage from being made anew for another."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with fakes:
            state = self._state(chain.module, dtype, fakes)
            with _told(where, lambda: self.names[-1] if self.names else ""), self._in_half():
                given = make()  # before anything is watched: the micro-batch is nobody's work
                self._measure(state, lambda own: call(own, given))

    @contextmanager
    def _in_half(self) -> Iterator[None]:
        if (division := self.halved) is not None:
            division.tps = dict.fromkeys(division.styles, TensorParallel(0, 2, lone=True))
            division.told = lambda kind, when, x: self.collectives.append((len(self.segments) - 1, kind, when, _size(x)))
        try:
            yield
        finally:
            if division is not None:
                division.tps, division.told = {}, None

    def _state(self, module: nn.Module, dtype: torch.dtype, fakes: FakeTensorMode) -> dict[str, torch.Tensor]:
        """Fake weights of the same shapes, one for each distinct weight; buffers keep their values where they have any."""
        fake: dict[int, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        styles = {} if self.halved is None else self.halved.styles
        dims = {name: dim for path, style in styles.items() for name, dim in divided_weights(path, style).items()}
        for name, p in module.named_parameters(remove_duplicate=False):
            kind = dtype if p.is_floating_point() else p.dtype
            if id(p) not in fake:
                sizes = [-(-size // 2) if dims.get(name) == dim else size for dim, size in enumerate(p.shape)]
                fake[id(p)] = torch.empty(sizes, dtype=kind).requires_grad_(p.requires_grad)
                self.owner[_storage(fake[id(p)])] = (name, fake[id(p)].numel())
            state[name] = fake[id(p)]
        for name, b in module.named_buffers(remove_duplicate=False):
            if id(b) not in fake:
                whole = torch.empty(b.shape, dtype=b.dtype) if b.is_meta else fakes.from_tensor(b)
                fake[id(b)] = whole.to(dtype) if b.is_floating_point() else whole
            state[name] = fake[id(b)]
        return state

    def _measure(self, state: dict[str, torch.Tensor], call: Call) -> None:
        hooks = [unit.register_forward_pre_hook(self._start(path)) for path, unit in self.chain.units.items()]
        hooks += [unit.register_forward_hook(self._done) for unit in self.chain.units.values()]
        found: dict[Any, torch.Tensor] = {}
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x):
                weights = {f"module.{name}": x for name, x in state.items()}
                out = self.chain.watch(lambda module: torch.func.functional_call(_Called(module, call), weights, ()), found)
        finally:
            for hook in hooks:
                hook.remove()
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.handed = [{site: found[site] for site in cut.sites} for cut in self.chain.cuts] + [
            dict(enumerate({_storage(x): x for x in outputs}.values()))
        ]
        self._close(outputs)
        roots = [x for x in outputs if x.requires_grad]
        self.backward = True
        with self:
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])

    def _start(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls = sum(name == path or name.startswith(f"{path}#") for name in self.names)
            if self.names:  # What ran before the first unit belongs to it.
                self.edges.append(torch.autograd._get_sequence_nr())
                self.segments.append(_Segment())
            self.names.append(f"{path}#{calls + 1}" if calls else path or "module")
            self._unit = len(self.names) - 1

        return hook

    def _done(self, unit: nn.Module, given: Any, out: Any) -> None:
        self._unit = None
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._inner.pop(_storage(x), None)

    def _close(self, outputs: list[torch.Tensor]) -> None:
        """Weights that nothing used count with the first op."""
        if not self.names:
            raise InputError("none of the module's children was called")
        self.segments[0].amounts["parameters"] += sum(count for name, count in self.owner.values() if name not in self.first_use)
        crossing = {_storage(x) for handed in self.handed for x in handed.values()}
        for index, segment in enumerate(self.segments):
            kept = crossing.union(segment.saved)
            segment.scratch = [self.sizes[key] for key, made in self.made_in.items() if made == index and key not in kept]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _result(func, args, kwargs)
        index = self._segment()
        segment = self.segments[index]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        before = {_storage(x) for x in given}
        new = [x for x in results if _storage(x) not in before]
        prefix = "backward_" if self.backward else ""
        segment.amounts[f"{prefix}flops"] += _flops(func, args, kwargs, out)
        if new or func._schema.is_mutable:  # Otherwise a view: nothing moves.
            segment.amounts[f"{prefix}traffic"] += sum(map(_size, given)) + sum(map(_size, new))
            segment.num_kernels += not self.backward
        if not self.backward:
            self._follow(index, given, new)
        return out

    def _segment(self) -> int:
        """The op that runs now: in the backward pass, the one that made the running autograd node."""
        if not self.backward:
            return len(self.segments) - 1
        node = torch._C._current_autograd_node()
        if node is None:
            return len(self.segments) - 1
        return min(bisect.bisect_right(self.edges, node._sequence_nr()), len(self.segments) - 1)

    def _follow(self, index: int, given: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        learnt = False
        for x in given:
            key = _storage(x)
            learnt |= key in self.owner or key in self._inner
            if self._inner.get(key, self._unit) != self._unit:
                raise InputError(
                    f"'{self.names[self._inner[key]]}' hands a tensor out by a side door (a hook or attribute), which a stage that has "
                    "not this part would lack. Return it from the part's forward pass."
                )
            if key in self.owner:
                name, count = self.owner[key]
                if name not in self.first_use:
                    self.first_use[name] = index
                if name not in self.segments[index].parameters:
                    self.segments[index].parameters.append(name)
                    self.segments[index].amounts["parameters"] += count
        for x in new:
            self.made_in[_storage(x)], self.tensors[_storage(x)] = index, x
            self.sizes[_storage(x)] = x.untyped_storage().nbytes()
            if learnt and self._unit is not None:
                self._inner[_storage(x)] = self._unit

    def _save(self, x: torch.Tensor) -> torch.Tensor:
        if _storage(x) in self.made_in:
            self.segments[-1].saved[_storage(x)] = x.untyped_storage().nbytes()
        return x

    def numbers(self) -> list[Any]:
        """Everything measured, to tell whether two runs differ."""
        return [(segment.amounts, sorted(segment.saved.values())) for segment in self.segments]


class _Fit:
    """From what each op did at several shapes to ops with forms."""

    def __init__(
        self, name: str, dtype: str, runs: list[_Run], halves: list[_Run], divided: _Present, shapes: list[Shape], basis: Sequence[str],
        weights: WeightTable,
    ) -> None:  # fmt: skip
        """`halves`: the same as one of two ranks runs it; none where the module is not divided."""
        self.name, self.dtype, self.runs, self.basis, self.weights = name, dtype, runs, basis, weights
        self.halves, self.divided = halves, divided
        self.columns = [FEATURES.index(feature) for feature in basis]
        self.rows = np.array([shape.features for shape in shapes], dtype=np.float64)[:, self.columns]
        self.carries = [list(handed) for handed in runs[0].handed]
        """The sites of each op's carry."""
        for index in range(len(self.carries)):
            self._add_held(index, runs)
            if halves:
                self._add_held(index, halves)

    def quantity(self, amount: str, index: int) -> Quantity:
        """One op's amount: what is half as much on one of two ranks is divided."""
        whole = self.form(amount, index, self.runs)
        if not self.halves or not self.divided.inside(_path(self.runs[0].names[index])):
            return Quantity(whole=whole)
        half = self.form(amount, index, self.halves)
        both = zip(whole.coefficients, half.coefficients, strict=True)
        split = Form(tuple(min(all_, max(0.0, 2 * (all_ - part))) for all_, part in both))
        return Quantity(whole + split * -1.0, split)

    def collectives(self, index: int) -> tuple[Collective, ...]:
        """What an op's ranks then run with each other."""
        of_each = [[one for one in run.collectives if one[0] == index] for run in self.halves]
        found = []
        for same in zip(*of_each, strict=True):
            _, kind, when, _ = same[0]
            found.append(Collective(kind, when, self.fitted(np.array([size for *_, size in same], dtype=np.float64))))  # type: ignore[arg-type]
        return tuple(found)

    def fitted(self, wanted: np.ndarray) -> Form:
        """The form without negative terms that is nearest to what was seen at each shape."""
        scale = self.rows.max(0)
        return Form.of(**dict(zip(self.basis, np.round(nnls(self.rows / scale, wanted)[0] / scale, 3).tolist(), strict=True)))

    def form(self, amount: str, index: int, runs: list[_Run]) -> Form:
        """The linear form of one op's amount; where there is none, the best without negative terms, and a warning if it matters."""
        wanted = np.array([run.segments[index].amounts[amount] for run in runs])
        if not wanted.any():
            return Form()
        scale = self.rows.max(0)
        found = np.linalg.lstsq(self.rows / scale, wanted, rcond=None)[0] / scale
        found = np.round(found * 2) / 2  # Amounts are whole numbers, or halves under a causal mask.
        if np.abs(self.rows @ found - wanted).max() > 1e-9 * wanted.max() or (found < 0).any():
            found = nnls(self.rows / scale, wanted)[0] / scale
            whole = np.array([sum(segment.amounts[amount] for segment in run.segments) for run in runs])
            off = (np.abs(self.rows @ found - wanted) / whole).max()
            if off > TOLERANCE and amount != "workspace":
                warnings.warn(f"trace of '{self.name}': {amount} of '{self.runs[0].names[index]}' is not linear in the shape; "
                              f"the description is off by up to {off:.1%} of the model's.", stacklevel=5)  # fmt: skip
        return Form.of(**dict(zip(self.basis, found.tolist(), strict=True)))

    def spec(self, index: int, site: Any, name: str) -> TensorSpec:
        """A carry tensor: which feature counts its elements. Where none does exactly, the smallest that suffices at every shape."""
        tensors = [run.handed[index][site] for run in self.runs]
        counts = np.array([x.numel() for x in tensors], dtype=np.float64)
        ratios = counts[:, None] / self.rows
        feature = next((f for f, ratio in zip(self.basis, ratios.T, strict=True) if np.ptp(ratio) == 0), "")
        if not feature:  # what is one for all samples, as a bias of positions is, counts most where there is one sample
            alone = ratios * self.rows[:, [self.basis.index("samples")]]
            feature = next((f for f, ratio in zip(self.basis, alone.T, strict=True) if np.ptp(ratio) == 0), "")
            ratios = alone if feature else ratios
        if not feature:
            worst = ratios.max(0)
            feature = self.basis[int((worst * self.rows).sum(0).argmin())]
        each = int(np.ceil(ratios[:, self.basis.index(feature)].max()))
        one = tensors[0]
        dtype = "compute" if one.dtype == TORCH_DTYPES[self.dtype] else "fp32" if one.is_floating_point() else "int64"
        return TensorSpec(name, (each,) if feature == "one" else (feature, each), dtype, one.requires_grad)

    def _add_held(self, index: int, runs: list[_Run]) -> None:
        """What an op keeps for its backward pass besides its carry, and the largest that it makes in passing."""
        segments = [run.segments[index] for run in runs]
        # The tensor that is largest at the last shape, so that its size is one form and not a maximum of several.
        largest = int(np.argmax(segments[-1].scratch)) if segments[-1].scratch else 0
        for segment, run in zip(segments, runs, strict=True):
            handed = {_storage(x) for x in (*run.handed[index].values(), *(run.handed[index - 1].values() if index else ()))}
            segment.amounts["kept"] = sum(size for key, size in segment.saved.items() if key not in handed)
            segment.amounts["workspace"] = segment.scratch[largest] if largest < len(segment.scratch) else 0

    def ops(self) -> list[Op]:
        """The ops of the chain, each with a name of its own."""
        first = self.runs[0]
        named: dict[Any, str] = {}
        made: list[Op] = []
        for index, path in enumerate(first.names):
            before = dict(named)
            named = _names(first.handed[index], before, last=index == len(first.names) - 1)
            carry = tuple(self.spec(index, site, named[site]) for site in self.carries[index])
            made.append(self._op(index, path, carry, before, named))
        return made

    def _op(self, index: int, path: str, carry: tuple[TensorSpec, ...], named_before: dict[Any, str], named_after: dict[Any, str]) -> Op:
        first = self.runs[0]
        after = {_storage(first.handed[index][site]): name for site, name in named_after.items()}
        before = {_storage(first.handed[index - 1][site]): name for site, name in named_before.items()}
        segments = [run.segments[index] for run in self.runs]
        forms = {amount: self.quantity(amount, index) for amount in _AMOUNTS}
        styles = self.divided.inside(_path(path)) if self.halves else {}
        saved = [key for key in segments[0].saved if key in before or key in after]
        split = Split(self.collectives(index), forms.pop("kept"), saves_in=tuple(sorted(before[key] for key in saved if key in before)),
                      saves_out=tuple(sorted(after[key] for key in saved if key not in before)))  # fmt: skip
        shared = [name for name in segments[0].parameters if first.first_use[name] < index]
        made = sorted(name for site, name in named_after.items() if site not in named_before)
        config: dict[str, Any] = {"made": made, **self.weights.config(index), **({"tp": styles} if styles else {})}
        if shared:
            weights = dict(first.owner.values())
            config["untied_parameters"] = sum(weights[name] for name in segments[0].parameters if name not in shared)
        config["measures"] = _digest(carry, forms, split)
        return Op(
            path, "traced", config, carry, **forms, backward_workspace=forms["parameters"] * TORCH_DTYPES[self.dtype].itemsize,
            splits=(split,), tp_limit=self.divided.limit if styles or not self.halves else 0, num_kernels=segments[0].num_kernels,
            tied_to=first.names[first.first_use[shared[0]]] if shared else "",
        )  # fmt: skip


def _path(name: str) -> str:
    """The path of a unit, given the name of an op."""
    return "" if name == "module" else name.partition("#")[0]


def _names(handed: dict[Any, torch.Tensor], before: dict[Any, str], last: bool) -> dict[Any, str]:
    """Names of a carry's tensors: those handed on keep theirs, the newest with a gradient is `hidden` (`output` at the end)."""
    names = {} if last else {site: before[site] for site in handed if site in before}
    fresh = [site for site in reversed(handed) if site not in names]
    for site in sorted(fresh, key=lambda site: not handed[site].requires_grad):
        choices = itertools.chain(["output" if last else "hidden"], (f"extra{n}" for n in itertools.count(1)))
        names[site] = next(choice for choice in choices if choice not in names.values())
    return {site: names[site] for site in handed}


def _digest(*parts: object) -> str:
    """What ops of equal cost have in common."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _grouped(ops: list[Op]) -> Iterator[tuple[Block, int]]:
    """Runs of equal ops of one list, each stored once. Ops that share weights with others keep their own names."""
    tied = {op.tied_to for op in ops} - {""} | {op.name for op in ops if op.tied_to}
    for (parent, _, _), run in itertools.groupby(
        ops, key=lambda op: (op.name.rpartition(".")[0], op.signature, op.name if op.name in tied else "")
    ):
        first, *others = run
        yield (Block(parent or "ops", (replace(first, name="block"),)) if others else Block(first.name, (first,))), 1 + len(others)
