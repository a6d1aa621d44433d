"""Reads DynaPipe's cost models: layer times and activations by micro-batch size and length, with and without recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from penstock.costs.table import CostTable, Floats
from penstock.errors import InputError, ProfileMissingError, near_misses
from penstock.models.ops import Model, TensorSpec
from penstock.models.shapes import Shape
from penstock.systems.dynapipe.grid import Grid
from penstock.systems.dynapipe.models import MODELS, RECOMPUTE, Dimensions, Links, PlannerConfig, layer_runs
from penstock.systems.tables import Costs, Row, device_names, existing_folder, read_checked, read_rows, ring_time_s, same_node

if TYPE_CHECKING:
    from penstock.clusters import Cluster

__all__ = ["COMPONENTS", "DynaPipeTables", "LayerCost"]

COMPONENTS = ("encoder", "decoder", "postprocess")
_QUANTITIES = ("fw_ms", "bw_ms", "stored_activation_mb", "peak_activation_mb")
_MB = 1e6
_ITEM_BYTES = 2


class LayerCost(NamedTuple):
    """Costs of one layer, or of the head, at many points; infinite where DynaPipe calls a point infeasible."""

    fw_ms: Floats
    bw_ms: Floats
    """Recomputation included."""
    stored_mb: Floats
    """Kept from forward to backward, in 1e6 bytes per rank."""
    peak_mb: Floats
    """Highest point above the level before the layer."""


@dataclass(frozen=True)
class DynaPipeTables:
    """One of DynaPipe's cost models as a cost source; open it with `DynaPipeTables.open("DIR/gpt_6.7b")`."""

    name: str
    folder: Path
    table_name: str
    dimensions: Dimensions
    links: Links = field(default_factory=Links)

    @classmethod
    def open(cls, path: str | Path) -> DynaPipeTables:
        """Finds the tables; they are read when first needed."""
        folder, table = Path(path).parent, Path(path).name
        if Path(path).is_dir():
            folder, table = Path(path), ""
        folder = existing_folder(folder, "folder of DynaPipe tables")
        held = sorted(file.name.removesuffix("_cost_model.csv") for file in folder.glob("*_cost_model.csv"))
        if not held:
            raise InputError(f"folder '{folder}' holds no DynaPipe tables (<name>_cost_model.csv).")
        if table not in held:
            problem = f"has no table '{table}'. {near_misses(table, held)}" if table else f"holds {', '.join(held)}; add one to the path."
            raise InputError(f"folder '{folder}' {problem}")
        if table not in MODELS:
            raise InputError(f"the hidden size of DynaPipe's '{table}' is not in its tables. {near_misses(table, MODELS)}")
        links = Links()
        if (folder / "configs.json").is_file():
            links = read_checked(folder / "configs.json", "DynaPipe configurations", Links, "_common")
        return cls(f"dynapipe:{path}", folder, table, MODELS[table], links)

    @cached_property
    def _grids(self) -> dict[tuple[int, str, str], Grid]:
        columns = ("tp", "recompute", "component", "micro_batch_size", "enc_or_input_seqlen", "dec_seqlen", *_QUANTITIES)
        points: dict[tuple[int, str, str], list[tuple[list[float], list[float]]]] = {}
        for row in read_rows(self.folder / f"{self.table_name}_cost_model.csv", columns):
            component = row.choice("component", COMPONENTS)
            key = row.count("tp"), row.choice("recompute", RECOMPUTE), component
            points.setdefault(key, []).append((_point(row, component), _costs(row, component)))
        return {key: Grid.of([at for at, _ in found], [value for _, value in found]) for key, found in points.items()}

    @cached_property
    def _parameter_mb(self) -> dict[tuple[int, str, str], float]:
        rows = read_rows(self.folder / f"{self.table_name}_model_state.csv", ("tp", "recompute", "component", "fp16_param_mb_per_layer"))
        known = ("embedding", *COMPONENTS[:2])
        return {
            (row.count("tp"), row.choice("recompute", RECOMPUTE), row.choice("component", known)): row.number("fp16_param_mb_per_layer")
            for row in rows
        }

    def interpolate(
        self, component: str, tp: int, recompute: str, mbs: ArrayLike, seqlen: ArrayLike, dec_seqlen: ArrayLike = 0
    ) -> LayerCost:
        """DynaPipe's multilinear interpolation at all points at once; the head is priced by the decoder's length where there is one."""
        grid = self._grids.get((tp, recompute, component))
        if grid is None:
            raise self._missing(f"{component} with tp {tp} and recompute '{recompute}'", list(self._grids))
        rows, enc, dec = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (mbs, seqlen, dec_seqlen)))
        axes = {"encoder": (rows, enc), "decoder": (rows, enc, dec), "postprocess": (rows, np.where(dec > 0, dec, enc))}[component]
        values = grid.at(axes)
        return LayerCost(*(values[..., column] for column in range(len(_QUANTITIES))))

    def knots(self, component: str, tp: int, recompute: str) -> tuple[Floats, ...]:
        """Where a component was profiled, on each axis (micro-batch size, lengths); the last knot is the virtual one that ends it."""
        grid = self._grids.get((tp, recompute, component))
        if grid is None:
            raise self._missing(f"{component} with tp {tp} and recompute '{recompute}'", list(self._grids))
        return grid.axes

    def model_state_bytes(self, component: str, tp: int, recompute: str = "none", zero: int = 1, dp: int = 1) -> float:
        """Weights, gradients, fp32 copy and two moments of one layer (or `embedding`) per rank; ZeRO divides them over dp."""
        shards = [dp if zero >= level else 1 for level in (3, 2, 1)]
        return self._weights_mb(component, tp, recompute) * _MB * (1 / shards[0] + 1 / shards[1] + 6 / shards[2])

    def _weights_mb(self, component: str, tp: int, recompute: str) -> float:
        weights = self._parameter_mb.get((tp, recompute, component))
        if weights is None:
            raise self._missing(f"the weights of {component} with tp {tp} and recompute '{recompute}'", list(self._parameter_mb))
        return weights

    def _missing(self, what: str, held: Sequence[tuple[int, str, str]]) -> ProfileMissingError:
        tps, modes, components = ({key[part] for key in held} for part in range(3))
        texts = [", ".join(map(str, sorted(values, key=str))) for values in (components, tps, modes)]
        return ProfileMissingError(f"{self.name} does not hold {what}; it holds {texts[0]} with tp {texts[1]} and recompute {texts[2]}.")

    def configs(self) -> dict[str, PlannerConfig]:
        """The configurations in `configs.json` by name."""
        return read_checked(self.folder / "configs.json", "DynaPipe configurations", dict[str, PlannerConfig], "configs")

    def model(self, num_layers: int = 0, seq_length: int = 2048, dec_length: int = 512) -> Model:
        """Layers and head as a chain; the first layer of each side holds its embedding, as DynaPipe counts memory."""
        if num_layers < 0:
            raise InputError(f"num_layers is {num_layers}, 1 or more was expected.")
        dims = self.dimensions
        layers = num_layers or dims.layers
        sides = ("encoder", "decoder") if dims.has_decoder else ("encoder",)
        held = [{part: self._weights_mb(part, tp, "none") * _MB / _ITEM_BYTES for part in ("embedding", *sides)} for tp in self.tps()[:2]]
        runs = layer_runs(self.table_name, layers, sides, dims.hidden, held, max(self.tps()))
        config = {"source": "dynapipe", "table": self.table_name, "num_layers": layers}
        name = self.table_name + (f"_{num_layers}layers" if num_layers else "")
        dec_length = dec_length if dims.has_decoder else 0
        return Model(name, "t5" if dims.has_decoder else "gpt", "fp16", runs, (), seq_length, dec_length, ("padded",), config)

    def tps(self, model: Model | None = None) -> tuple[int, ...]:
        """Tensor-parallel degrees that were profiled."""
        return tuple(sorted({tp for tp, _, _ in self._grids}))

    def micro_batches(self, model: Model | None = None) -> tuple[int, ...]:
        """Micro-batch sizes that were profiled; those between them are interpolated."""
        return tuple(sorted({int(size) for grid in self._grids.values() for size in grid.axes[0][:-1]}))

    def shapes(self, model: Model) -> tuple[Shape, ...]:
        """Profiled micro-batch sizes at the model's usual length."""
        return tuple(model.usual_shape(mbs) for mbs in self.micro_batches())

    def table(
        self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster | None = None, recompute: str = "none"
    ) -> CostTable:
        """Costs of padded shapes of any length; packed ones and those outside the profile have infinite times."""
        if model.config.get("source") != "dynapipe" or model.config.get("table") != self.table_name:
            raise InputError(f"model '{model.name}' is not the chain of {self.name}; get it from the reader's `model()`.")
        devices = device_names(cluster, ("a100-40gb",))
        if len(devices) > 1:
            raise InputError(f"{self.name} was measured on one device kind; the cluster has {', '.join(devices)}.")
        costs = Costs(model, shapes, tps, (0,), devices)
        points = _padded_points(shapes)
        for t, tp in enumerate(tps):
            if tp in self.tps():
                for o, op in enumerate(costs.op_names):
                    part = op.removesuffix("-first")
                    _fill(costs, (o, slice(None), t, 0), self.interpolate(part, tp, recompute, *points))
                    costs.parameters[o, t, 0] = self._op_weights_mb(op, tp, recompute) * _MB / _ITEM_BYTES
        carries = [_carry_elements(op.carry, shapes) * _ITEM_BYTES for op in model.distinct_ops]
        for o, place in enumerate(np.unique(costs.chain, return_index=True)[1]):
            costs.output_bytes[o] = carries[o][:, None, None]
            costs.input_bytes[o] = carries[costs.chain[place - 1]][:, None, None] if place else 0.0
        return costs.table()

    def _op_weights_mb(self, op: str, tp: int, recompute: str) -> float:
        """Weights of an op of the chain; the head shares the embedding's, which DynaPipe counts once."""
        side = op.removesuffix("-first")
        layer = 0.0 if side == "postprocess" else self._weights_mb(side, tp, recompute)
        return layer if side == op else layer + self._weights_mb("embedding", tp, recompute)

    def collective_s(self, kind: str, size_bytes: float, cluster: Cluster, ranks: Sequence[int]) -> float:
        """A ring over DynaPipe's bandwidths; its own model charges no collective outside the layers."""
        return ring_time_s(kind, size_bytes, len(ranks), self._link(same_node(cluster, ranks))[0])

    def transfer_s(self, size_bytes: float, cluster: Cluster, sender: int, receiver: int) -> float:
        """Latency and bandwidth that DynaPipe assumes inside and between nodes."""
        bandwidth, latency = self._link(same_node(cluster, (sender, receiver)))
        return latency + size_bytes / bandwidth

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0
    ) -> float:
        """Zero: DynaPipe does not model the optimizer step."""
        return 0.0

    def _link(self, inside: bool) -> tuple[float, float]:
        """(bytes per second, seconds of latency)."""
        gbit = self.links.intra_node_gbit_per_s if inside else self.links.inter_node_gbit_per_s
        latency_us = self.links.intra_node_latency_us if inside else self.links.inter_node_latency_us
        return gbit * 1e9 / 8, latency_us * 1e-6


def _point(row: Row, component: str) -> list[float]:
    columns = ("micro_batch_size", "enc_or_input_seqlen", *(("dec_seqlen",) if component == "decoder" else ()))
    return [float(row.count(column)) for column in columns]


def _costs(row: Row, component: str) -> list[float]:
    """The four quantities; the head has times only, a cell left empty elsewhere was not measured."""
    if component == "postprocess":
        return [row.optional_number("fw_ms"), row.optional_number("bw_ms"), 0.0, 0.0]
    return [row.optional_number(column) for column in _QUANTITIES]


def _carry_elements(carry: Sequence[TensorSpec], shapes: Sequence[Shape]) -> Floats:
    return np.array([sum(spec.elements()(shape) for spec in carry) for shape in shapes], dtype=np.float64)


def _padded_points(shapes: Sequence[Shape]) -> tuple[Floats, Floats, Floats]:
    """(micro-batch, length, decoder length) of each shape; NaN for shapes that are not padded rows of one length."""
    rows = []
    for shape in shapes:
        samples = max(shape.samples, 1)
        enc, dec = shape.tokens // samples, shape.dec_tokens // samples
        rows.append((samples, enc, dec) if shape == Shape.padded(samples, enc, dec) else (np.nan,) * 3)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _fill(costs: Costs, at: tuple[int, slice, int, int], found: LayerCost) -> None:
    """Times and bytes of one op at one degree for all shapes; the forward peak is what it keeps plus its workspace."""
    priced = np.isfinite(np.sum(found, axis=0))
    costs.forward_s[at] = np.where(priced, found.fw_ms * 1e-3, np.inf)[:, None]
    costs.backward_s[at] = np.where(priced, found.bw_ms * 1e-3, np.inf)[:, None]
    costs.kept_bytes[at] = np.where(priced, found.stored_mb, 0.0) * _MB
    transient = np.subtract(found.peak_mb, found.stored_mb, out=np.zeros_like(found.peak_mb), where=priced)
    costs.workspace_bytes[at] = np.maximum(transient, 0.0) * _MB
