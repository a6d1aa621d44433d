"""Costs from formulas alone: an op takes as long as its arithmetic or its memory traffic, whichever is longer, plus its launches.

    time = max(flops / (peak · efficiency), bytes / (bandwidth · efficiency)) + kernels · launch        (attention: + in place of max)

Amounts are linear in the features of a micro-batch, so those of all ops and shapes are one matrix product; attention's squares and
its tokens are separate features, so a packed micro-batch pays for the sum of its squared lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.clusters import Cluster, Device, resolve_device
from penstock.costs.collectives import Group, group_of
from penstock.costs.company import slowest_of, sustained, with_achieved_links
from penstock.costs.efficiency import Curve, adds_up, arithmetic_dtype, load_calibration, op_class
from penstock.costs.memory import bytes_per_parameter
from penstock.costs.replay import formula_bytes
from penstock.costs.source import DeviceBytes
from penstock.costs.table import CostTable, Floats
from penstock.errors import InputError
from penstock.models.kept import kept_per_op, shortened
from penstock.models.ops import Model, Op
from penstock.models.shapes import Quantity, Shape, feature_matrix

__all__ = ["Roofline", "tp_group"]

BACKWARD_KERNELS = 2
"""Kernels of a backward pass for each of the forward pass."""
OPTIMIZER_PASSES = 2.5
"""How often a step moves each byte of state: 16 bytes of a bf16 weight with fp32 master and AdamW cost 40 of traffic."""

Pass = Literal["forward", "backward"]


class Roofline:
    """The source `roofline`: needs no measurement, only the catalogue's peaks and the efficiency curves."""

    name = "roofline"
    error = 0.06
    """Of two steps of one model against each other, on the device whose profile the curves were fitted to (docs/accuracy.md)."""

    def __init__(self, cluster: Cluster | None = None, in_company: bool = True) -> None:
        """`cluster` makes its devices known by name where they differ from the catalogue's. Without `in_company` every device is as fast as
        if it were alone, as those are that were measured."""
        self._calibration = load_calibration()
        self._in_company = in_company
        self._devices = {device.name: device for device, _ in cluster.kinds} if cluster is not None else {}

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """All op costs of `model`; a degree that an op cannot have, or that a device kind is too few for, is infinite."""
        ops, devices = model.distinct_ops, [device for device, _ in cluster.kinds]
        num_algos = max(len(op.splits) for op in ops)
        amounts = _Amounts(model, shapes, tps, num_algos)
        groups = [[tp_group(cluster, device, tp) for device in devices] for tp in tps]
        num_devices = cluster.num_at_work if self._in_company else 1
        forward, backward = (self._times(model, amounts, devices, when, num_devices) for when in ("forward", "backward"))
        possible = _possible(ops, tps, num_algos, groups)
        return CostTable(
            op_names=tuple(op.name for op in ops), chain=amounts.chain, shapes=tuple(shapes), tps=tuple(tps),
            algos=tuple(range(num_algos)), devices=tuple(device.name for device in devices),
            forward_s=np.where(possible, forward, np.inf), backward_s=np.where(possible, backward, np.inf),
            forward_comm_s=_comm(ops, amounts, groups, "forward"), backward_comm_s=_comm(ops, amounts, groups, "backward"),
            parameters=amounts.parameters(), kept_bytes=amounts.kept(),
            workspace_bytes=amounts.per_algo(lambda op: op.workspace),
            backward_workspace_bytes=amounts.per_algo(lambda op: op.backward_workspace),
            input_bytes=amounts.boundary(0), output_bytes=amounts.boundary(1),
        )  # fmt: skip

    def _times(self, model: Model, amounts: _Amounts, devices: Sequence[Device], when: Pass, num_devices: int) -> Floats:
        """[O, S, T, 1, D] times of the ops themselves, on the slowest of so many devices; splits differ in what they communicate only."""
        backward = when == "backward"
        flops = amounts.of(_backward_flops if backward else lambda op: op.flops) * amounts.seen()
        traffic = amounts.of(lambda op: op.backward_traffic if backward else op.traffic)
        kernels = _column([op.num_kernels * (BACKWARD_KERNELS if backward else 1) for op in model.distinct_ops])
        idle = (flops == 0) & (traffic == 0)
        packed = np.array([shape.layout == "packed" for shape in amounts.shapes])[None, :, None]
        times = []
        for device in devices:
            needed = flops / sustained(device, num_devices)
            busy = self._busy_s(model, device, needed, traffic, "padded", backward)
            if packed.any():
                busy = np.where(packed, self._busy_s(model, device, needed, traffic, "packed", backward), busy)
            busy *= 1.0 if device.name.startswith("cpu") else slowest_of(num_devices)
            times.append(np.where(idle, 0.0, busy + kernels * self._calibration.of(device.name).launch_s))
        return np.stack(times, axis=-1)[:, :, :, None, :]

    def _busy_s(self, model: Model, device: Device, flops: Floats, traffic: Floats, layout: str, backward: bool) -> Floats:
        """[O, S, T] time on one device without launches, with the curves of a layout."""
        classes = [op_class(op.kind, op.config, layout) for op in model.distinct_ops]
        curves = [self._calibration.of(device.name).curves(name, backward) for name in classes]
        peaks = _column([device.peak_flops_per_s(arithmetic_dtype(name, model.dtype)) for name in classes])
        compute = _curve_times(flops / peaks, [c.flops for c in curves])
        moving = _curve_times(traffic / device.memory_bandwidth_bytes_per_s, [c.bytes for c in curves])
        return np.where(_column([adds_up(name) for name in classes]) > 0, compute + moving, np.maximum(compute, moving))

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        """Time of the optimizer step; the state is a weight with its gradient, master copy and moments."""
        known = self._devices.get(device) or resolve_device(device)
        efficiency = self._calibration.of(device)
        moved = num_parameters * sum(bytes_per_parameter(precision, optimizer, gradients)) * OPTIMIZER_PASSES
        return efficiency.curves("optimizer").bytes.time_s(moved, known.memory_bandwidth_bytes_per_s)

    def memory_of(self, device: str, dtype: str) -> DeviceBytes:
        """The formulas of the description, on every device."""
        return DeviceBytes(formula_bytes, 0.0)

    def links_of(self, cluster: Cluster) -> Cluster:
        """Links as collectives reach them."""
        return with_achieved_links(cluster) if self._in_company else cluster

    def notes(self, model: Model) -> tuple[str, ...]:
        """Everything is modelled, and the name says so; devices whose rates are guesses besides."""
        return tuple(
            f"the rates of {device.name} are a guess ({device.source}), and times may be ten times off; measure: `penstock profile`."
            for device in self._devices.values()
            if device.is_guess
        )


def tp_group(cluster: Cluster, device: Device, tp: int) -> Group | None:
    """The ranks a tensor-parallel group of one device kind would take: inside a node if one is large enough; None if there are too few."""
    starts = np.cumsum([0, *(run.num_devices for run in cluster.runs)])
    own = [(int(start), run) for start, run in zip(starts[:-1], cluster.runs, strict=True) if run.node.device.name == device.kind]
    for start, run in own:
        if run.node.num_devices >= tp:
            return group_of(cluster, range(start, start + tp))
    ranks = [rank for start, run in own for rank in range(start, start + run.num_devices)][:tp]
    return group_of(cluster, ranks) if len(ranks) == tp else None


def _column(values: Sequence[float]) -> Floats:
    """One value per op, to be spread over shapes and degrees."""
    return np.array(values, dtype=np.float64)[:, None, None]


def _curve_times(work_s: Floats, curves: Sequence[Curve]) -> Floats:
    """`Curve.time_s` of every op at once, each with its own curve."""
    return np.where(work_s > 0, (work_s + _column([c.half_s for c in curves])) / _column([c.e_max for c in curves]), 0.0)


def _backward_flops(op: Op) -> Quantity:
    """Arithmetic of the backward pass; a frozen weight needs no gradient, which is half of it."""
    frozen = not op.trainable and op_class(op.kind) in ("gemm", "conv")
    return op.backward_flops * 0.5 if frozen else op.backward_flops


class _Amounts:
    """Forms of the distinct ops evaluated for all shapes and degrees by matrix products."""

    def __init__(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], num_algos: int) -> None:
        if not shapes or not tps:
            raise InputError(f"a cost table needs shapes and tp degrees; got {len(shapes)} and {len(tps)}.")
        self.model, self.ops, self.num_algos = model, model.distinct_ops, num_algos
        self.shapes, self.features = shapes, feature_matrix(shapes)
        self.shares = 1 / np.array(tps, dtype=np.float64)
        index = {op.signature: number for number, op in enumerate(self.ops)}
        self.chain = np.array([index[place.op.signature] for place in model.ops], dtype=np.int32)

    def evaluate(self, quantities: Sequence[Quantity]) -> Floats:
        """[N, S, T] of any quantities."""
        whole = np.array([quantity.whole.coefficients for quantity in quantities]) @ self.features.T
        split = np.array([quantity.split.coefficients for quantity in quantities]) @ self.features.T
        return whole[:, :, None] + split[:, :, None] * self.shares

    def of(self, amount: Callable[[Op], Quantity]) -> Floats:
        """[O, S, T] of an amount of each op."""
        return self.evaluate([amount(op) for op in self.ops])

    def seen(self) -> Floats:
        """[O, S, 1] share of their arithmetic that ops do: kernels of packed sequences pass over keys outside of a window, those of padded
        rows work on a mask."""
        shares = [[op.seen_share(shape) if shape.layout == "packed" else 1.0 for shape in self.shapes] for op in self.ops]
        return np.array(shares)[:, :, None]

    def per_algo(self, amount: Callable[[Op], Quantity]) -> Floats:
        """[O, S, T, A] of an amount that is the same for every split."""
        return np.repeat(self.of(amount)[..., None], self.num_algos, axis=-1)

    def parameters(self) -> Floats:
        """[O, T, A] weights per rank."""
        counts = np.array([[op.parameters.whole.coefficients[0], op.parameters.split.coefficients[0]] for op in self.ops])
        return np.repeat((counts[:, :1] + counts[:, 1:] * self.shares)[..., None], self.num_algos, axis=-1)

    def kept(self) -> Floats:
        """[O, S, T, A]; an op whose copies keep different amounts (a tensor one of them shares) gets their mean, so that sums are right."""
        short, weights = shortened(self.model)
        index = {op.signature: number for number, op in enumerate(self.ops)}
        numbers = [index[place.op.signature] for place in short.ops]
        copies = np.bincount(self.chain, minlength=len(self.ops)).astype(np.float64)
        kept = []
        for algo in range(self.num_algos):
            algos = [min(algo, len(place.op.splits) - 1) for place in short.ops]
            totals = [Quantity()] * len(self.ops)
            for number, quantity, weight in zip(numbers, kept_per_op(short, algos), weights, strict=True):
                totals[number] = totals[number] + quantity * weight
            kept.append(self.evaluate([total * (1 / count) for total, count in zip(totals, copies, strict=True)]))
        return np.stack(kept, axis=-1)

    def boundary(self, offset: int) -> Floats:
        """[O, S, T, A] bytes of a pipeline cut before (0) or after (1) each op, the largest of its copies."""
        cuts = list(dict.fromkeys((int(number), self.model.carry_before(place + offset)) for place, number in enumerate(self.chain)))
        sizes = self.evaluate([sum((spec.size_bytes(self.model.dtype) for spec in carry), Quantity()) for _, carry in cuts])
        largest = np.zeros((len(self.ops), *sizes.shape[1:]))
        np.maximum.at(largest, [number for number, _ in cuts], sizes)
        return np.repeat(largest[..., None], self.num_algos, axis=-1)


def _possible(ops: Sequence[Op], tps: Sequence[int], num_algos: int, groups: Sequence[Sequence[Group | None]]) -> NDArray[np.bool_]:
    """[O, 1, T, A, D] whether an op can have this degree and split on this device kind."""
    degrees = np.array([[not op.tp_limit or op.tp_limit % tp == 0 for tp in tps] for op in ops])
    splits = np.array([[algo < len(op.splits) for algo in range(num_algos)] for op in ops])
    enough = np.array([[group is not None for group in row] for row in groups])
    possible: NDArray[np.bool_] = degrees[:, None, :, None, None] & splits[:, None, None, :, None] & enough[None, None, :, None, :]
    return possible


def _comm(ops: Sequence[Op], amounts: _Amounts, groups: Sequence[Sequence[Group | None]], when: Pass) -> Floats:
    """[O, S, T, A, D] times of the tensor-parallel collectives of each pass."""
    times = np.zeros((len(ops), len(amounts.features), len(groups), amounts.num_algos, len(groups[0])))
    for number, op in enumerate(ops):
        for algo, split in enumerate(op.splits):
            for collective in (c for c in split.collectives if c.when == when):
                sizes = amounts.features @ np.array(collective.size_bytes.coefficients)
                for t, row in enumerate(groups):
                    for d, group in enumerate(row):
                        if group is not None and group.num_ranks > 1:
                            times[number, :, t, algo, d] += group.times_s(collective.kind, sizes)
    return times
