"""One forward and backward pass of a module on fake tensors, taken apart into what each of its ops did."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.errors import InputError, first_of
from penstock.models.modules.cutting.dividing import Division, divided_weights
from penstock.models.modules.cutting.skipping import Call, Skipping
from penstock.models.modules.parallel import TensorParallel

__all__ = ["AMOUNTS", "Called", "TracedOp", "TracedPass", "storage_of", "told_where"]

Called = Callable[[nn.Module, Any], Any]
"""Runs a module on what an example makes."""
AMOUNTS = ("parameters", "flops", "backward_flops", "repeated_flops", "traffic", "backward_traffic", "workspace", "kept")
"""What is counted of each op."""
_DEVICE = torch.ops.prim.device.default
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def told_where(where: str, last: Callable[[], str]) -> Iterator[None]:
    """What the module itself raises, as an error that says where it was."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:
        if "nonzero" in str(error) or type(error).__name__ == "DynamicOutputShapeException":
            raise InputError(
                f"{where}: in or after '{last() or 'the start'}' shapes depend on values of tensors (`nonzero`, `torch.where(condition)`, "
                "a mask as an index), so that nobody could plan for them. Let every expert see all tokens, each weighed by its share, or "
                "use grouped products, as models of transformers do."
            ) from error
        first_line = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"{where}: stopped in or after '{last() or 'the start'}': {type(error).__name__}: {first_line} "
            "A module can be traced if its example fits, nothing in its forward pass depends on values of tensors, and it takes samples of "
            "that length: a table of places of its own (`pos[:, :n]`) must have as many rows, 128 for texts."
        ) from error


class _Called(nn.Module):
    """A module with what is done to it, so that both can be run with other weights."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self) -> Any:
        return self.call(self.module)


def _named(module: nn.Module, store: str) -> Iterator[tuple[str, Any]]:
    """Tensors under each name that parts have for them; of a part that stands in several places under its first alone, else torch would
    give it back another's."""
    return (
        (f"{path}.{name}" if path else name, x)
        for path, part in module.named_modules()
        for name, x in getattr(part, store).items()
        if x is not None
    )


def storage_of(x: torch.Tensor) -> int:
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


def _repeated_flops(func: Any, args: Any) -> float:
    """Those of the scores, which the backward pass of fused attention makes again: the first of its five products."""
    if func._overloadpacket is not _CPU_FLASH_BACKWARD:
        return 0
    _, query, key, *_ = args
    return float(2 * query.numel() * key.shape[-2] * (0.5 if args[7] else 1))


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns. A number that is drawn has a value, that of a layer which is kept: LayerDrop compares it, even where its
    probability is 0. Torch's shape function of grouped products (experts) knows bf16 alone."""
    if func is torch.ops.aten.rand.default and not args[0]:
        return torch.tensor(1.0)
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype != torch.float32:
        return func(*args, **kwargs)
    half = tree_map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs))
    return func(*half[0], **half[1]).float()


@dataclass
class TracedOp:
    """What one op did at one shape."""

    amounts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AMOUNTS, 0.0))
    num_kernels: int = 0
    parameters: list[str] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    """Storage → bytes, of all it saves but weights and the micro-batch."""
    scratch: list[int] = field(default_factory=list)
    """Bytes of what it makes and neither saves nor hands on."""


class TracedPass(TorchDispatchMode):
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
        self.segments: list[TracedOp] = [TracedOp()]
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
            with told_where(where, lambda: self.names[-1] if self.names else ""), self._in_half():
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
        for name, p in _named(module, "_parameters"):
            kind = dtype if p.is_floating_point() else p.dtype
            if id(p) not in fake:
                sizes = [-(-size // 2) if dims.get(name) == dim else size for dim, size in enumerate(p.shape)]
                fake[id(p)] = torch.empty(sizes, dtype=kind).requires_grad_(p.requires_grad)
                self.owner[storage_of(fake[id(p)])] = (name, fake[id(p)].numel())
            state[name] = fake[id(p)]
        for name, b in _named(module, "_buffers"):
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
                out = self.chain.watch(
                    lambda module: torch.func.functional_call(_Called(module, call), weights, (), tie_weights=False), found
                )
        finally:
            for hook in hooks:
                hook.remove()
        self._require_unchanged(state)
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.handed = [{site: found[site] for site in cut.sites} for cut in self.chain.cuts] + [
            dict(enumerate({storage_of(x): x for x in outputs}.values()))
        ]
        self._close(outputs)
        roots = [x for x in outputs if x.requires_grad]
        self.backward = True
        with self:
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])

    def _require_unchanged(self, state: Mapping[str, torch.Tensor]) -> None:
        """Refuses a module whose forward pass writes to its weights: each process would change its own copy by the samples it sees."""
        weights = {name for name, _ in self.owner.values()}
        if changed := [name for name, x in state.items() if name in weights and x._version]:
            raise InputError(
                f"the forward pass changes {first_of(changed, 3)}, as nn.Embedding does with max_norm. Processes that hold the same "
                "weights would no longer agree. Leave max_norm out, or scale what the forward pass reads and not the weights."
            )

    def _start(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls = sum(name == path or name.startswith(f"{path}#") for name in self.names)
            if self.names:  # What ran before the first unit belongs to it.
                self.edges.append(torch.autograd._get_sequence_nr())
                self.segments.append(TracedOp())
            self.names.append(f"{path}#{calls + 1}" if calls else path or "module")
            self._unit = len(self.names) - 1

        return hook

    def _done(self, unit: nn.Module, given: Any, out: Any) -> None:
        self._unit = None
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._inner.pop(storage_of(x), None)

    def _close(self, outputs: list[torch.Tensor]) -> None:
        """Weights that nothing used count with the first op."""
        if not self.names:
            raise InputError("none of the module's children was called")
        self.segments[0].amounts["parameters"] += sum(count for name, count in self.owner.values() if name not in self.first_use)
        crossing = {storage_of(x) for handed in self.handed for x in handed.values()}
        for index, segment in enumerate(self.segments):
            kept = crossing.union(segment.saved)
            segment.scratch = [self.sizes[key] for key, made in self.made_in.items() if made == index and key not in kept]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # two of three calls, by torch's own machinery: no work of the module
            return args[0].fake_device
        kwargs = kwargs or {}
        out = _result(func, args, kwargs)
        index = self._segment()
        segment = self.segments[index]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        before = {storage_of(x) for x in given}
        new = [x for x in results if storage_of(x) not in before]
        prefix = "backward_" if self.backward else ""
        segment.amounts[f"{prefix}flops"] += _flops(func, args, kwargs, out)
        segment.amounts["repeated_flops"] += _repeated_flops(func, args)
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
            key = storage_of(x)
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
            self.made_in[storage_of(x)], self.tensors[storage_of(x)] = index, x
            self.sizes[storage_of(x)] = x.untyped_storage().nbytes()
            if learnt and self._unit is not None:
                self._inner[storage_of(x)] = self._unit

    def _save(self, x: torch.Tensor) -> torch.Tensor:
        if storage_of(x) in self.made_in:
            self.segments[-1].saved[storage_of(x)] = x.untyped_storage().nbytes()
        return x

    def numbers(self) -> list[Any]:
        """Everything measured, to tell whether two runs differ."""
        return [(segment.amounts, sorted(segment.saved.values())) for segment in self.segments]
