"""Costs from a profile: measured times and bytes, interpolated; what was not measured comes from the roofline and is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from penstock.clusters import Cluster, with_measured_links
from penstock.costs.interpolation import MeasuredCurves, fit_optimizer
from penstock.costs.measured_links import measured_links
from penstock.costs.memory import bytes_per_parameter
from penstock.costs.profile import HOST_COLUMNS, DeviceProfile, Profile, SeriesKey, WholeFactors, coordinates, read_profile, series_key
from penstock.costs.replay import OpBytes, OpBytesSource, OpPeaks, formula_bytes
from penstock.costs.roofline import Roofline
from penstock.costs.source import DeviceBytes
from penstock.costs.table import CostTable, Floats
from penstock.errors import ProfileMissingError
from penstock.models.ops import Model, Op
from penstock.models.shapes import Shape

__all__ = ["DeviceCosts", "Profiled"]


class DeviceCosts:
    """What a profile knows of one device."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._curves: dict[SeriesKey, MeasuredCurves] = {}
        self._bytes_of: dict[str, OpBytesSource] = {}

    def curves(self, op: Op, dtype: str, tp: int, algo: int, layout: str) -> MeasuredCurves | None:
        """The measured curves of an op, or None where it was not measured."""
        key = series_key(op, dtype, tp, algo, layout)
        if key not in self.profile.series:
            return None
        if key not in self._curves:
            self._curves[key] = MeasuredCurves(self.profile.series[key])
        return self._curves[key]

    def columns(self, op: Op, dtype: str, shapes: Sequence[Shape], tp: int, algo: int, names: Sequence[str]) -> dict[str, Floats] | None:
        """Measured columns at each shape; None where the op was not measured in these layouts."""
        result = {name: np.zeros(len(shapes)) for name in names}
        for layout in {shape.layout for shape in shapes}:
            which = np.array([index for index, shape in enumerate(shapes) if shape.layout == layout])
            curves = self.curves(op, dtype, tp, algo, layout)
            if curves is None:
                return None
            where = np.array([coordinates(op, shapes[index]) for index in which])
            where[:, 0] /= tp if op.sequence == "rows" else 1
            factors = self.profile.whole.get(op.signature, WholeFactors())
            for name in names:
                if name in HOST_COLUMNS:
                    result[name][which] = factors.host * curves.host_s(name, where[:, 0])
                    continue
                timed = name.endswith("_s")
                values = curves(name, where[:, 0], where[:, 1], log=timed)
                result[name][which] = factors.of_device(values) if timed else values
        return result

    def bytes_of(self, dtype: str) -> OpBytesSource:
        """Measured peaks of single ops where there are any, formulas elsewhere; the same function every time, so that it can be a key."""
        if dtype not in self._bytes_of:
            self._bytes_of[dtype] = partial(self._op_bytes, dtype)
        return self._bytes_of[dtype]

    def _op_bytes(self, dtype: str, op: Op, shape: Shape, tp: int, algo: int) -> OpBytes | OpPeaks:
        formula = formula_bytes(op, shape, tp, algo)
        found = self.columns(op, dtype, [shape], tp, algo, ("forward_peak_bytes", "backward_peak_bytes"))
        if found is None or not self.profile.base_bytes or op.sequence:  # measured without rows gathered and handed out
            return formula
        return OpPeaks(formula.kept, float(found["forward_peak_bytes"][0]), float(found["backward_peak_bytes"][0]))

    @cached_property
    def optimizer_rates(self) -> dict[str, tuple[float, float]]:
        """dtype → (seconds per weight, seconds per tensor) of an optimizer step."""
        rates = {}
        for dtype in {point.dtype for point in self.profile.optimizer}:
            points = [p for p in self.profile.optimizer if p.dtype == dtype]
            parameters, tensors, times_s = (np.array([getattr(p, name) for p in points]) for name in (
                "num_parameters", "num_tensors", "time_s"))  # fmt: skip
            rates[dtype] = fit_optimizer(parameters, tensors, times_s)
        return rates

    def optimizer_s(self, num_parameters: float, num_tensors: float, dtype: str) -> float | None:
        """Time of an optimizer step, or None where none was measured.

        It is the device's: while that ends the last backward pass, its host has issued the step.
        """
        if dtype not in self.optimizer_rates:
            return None
        per_parameter, per_tensor = self.optimizer_rates[dtype]
        return per_parameter * num_parameters + per_tensor * num_tensors


class Profiled:
    """The source `profile:FILE`."""

    error = 0.04
    """Of two steps of one model against each other, of such as do not wait for the host, with the shipped profile (docs/accuracy.md)."""

    def __init__(self, profile: Profile, path: str = "memory") -> None:
        self.devices = {name: DeviceCosts(device) for name, device in profile.devices.items()}
        self._path = path
        self._roofline = Roofline(in_company=False)
        self._modelled: set[str] = set()
        """Ops that were asked for and had to be modelled."""

    @classmethod
    def open(cls, path: str | Path) -> Profiled:
        """Reads a profile."""
        return cls(read_profile(path), str(path))

    @property
    def name(self) -> str:
        return f"profile:{self._path}"

    def device(self, name: str) -> DeviceCosts:
        """The measurements of one device kind."""
        if name not in self.devices:
            raise ProfileMissingError(
                f"profile '{self._path}' was measured on {', '.join(self.devices) or 'nothing'}, but the cluster has '{name}'. "
                f"Measure it there (penstock profile --merge), or use --costs roofline."
            )
        return self.devices[name]

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """The roofline's table with every measured op put in its place."""
        table = self._roofline.table(model, shapes, tps, cluster)
        table = replace(table, host_s=np.zeros((len(table.op_names), len(shapes), 3, len(tps), len(table.devices))))
        for d, name in enumerate(table.devices):
            costs = self.device(name)
            for o, op in enumerate(model.distinct_ops):
                for t, tp in enumerate(tps):
                    for a in range(len(table.algos)):
                        if not np.isfinite(table.forward_s[o, 0, t, a, d]):
                            continue
                        self._fill(table, costs, op, model.dtype, (o, t, a, d), tp)
        return table

    def _fill(self, table: CostTable, costs: DeviceCosts, op: Op, dtype: str, where: tuple[int, int, int, int], tp: int) -> None:
        o, t, a, d = where
        found = costs.columns(op, dtype, table.shapes, tp, table.algos[a], ("forward_s", "backward_s", *HOST_COLUMNS))
        if found is None:
            self._modelled.add(op.name)
            return
        table.forward_s[o, :, t, a, d] = found["forward_s"]
        table.backward_s[o, :, t, a, d] = found["backward_s"]
        if table.algos[a] == 0:  # how an op is divided makes no difference to its host
            again_s = costs.profile.whole.get(op.signature, WholeFactors()).recompute_host_s
            host_s = table.host_s[o, :, :, t, d]
            host_s[:, 0], host_s[:, 1] = (found[name] for name in HOST_COLUMNS)
            host_s[:, 2] = again_s or host_s[:, 0]

    def memory_of(self, device: str, dtype: str) -> DeviceBytes:
        """Measured workspaces where this device's profile has them, the description's formulas elsewhere."""
        costs = self.device(device)
        return DeviceBytes(costs.bytes_of(dtype), costs.profile.base_bytes)

    def links_of(self, cluster: Cluster) -> Cluster:
        """The cluster with the links that fit this profile's transfers and collectives."""
        links = {key: link for name, device in self.devices.items() for key, link in measured_links(device.profile, name).items()}
        return with_measured_links(cluster, links) if links else cluster

    def notes(self, model: Model) -> tuple[str, ...]:
        """Names ops that had to be modelled in the tables made so far."""
        modelled = sorted(self._modelled & {op.name for op in model.distinct_ops})
        return (f"not in the profile at every degree or layout, so modelled by the roofline: {', '.join(modelled)}.",) if modelled else ()

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        """From measured steps, which are AdamW's; the roofline's otherwise.

        They were measured with gradients in fp32. A step only moves bytes: with narrower ones the device is done sooner in proportion.
        """
        measured = self.device(device).optimizer_s(num_parameters, num_tensors, precision) if optimizer == "adamw" else None
        if measured is None:
            return self._roofline.optimizer_s(num_parameters, device, precision, optimizer, gradients=gradients)
        moved, measured_moved = (sum(bytes_per_parameter(precision, optimizer, dtype)) for dtype in (gradients, "fp32"))
        return measured * moved / measured_moved
