"""Reads DynaPipe's cost models: layer times and activations by micro-batch size and length, with and without recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from penstock.costs.table import Floats
from penstock.errors import InputError, ProfileMissingError, near_misses
from penstock.systems.dynapipe.grid import CostGrid
from penstock.systems.dynapipe.inputs import MODELS, RECOMPUTE, TABLES, Dimensions, DynaPipeLinks, PlannerConfig
from penstock.systems.dynapipe.pickles import CostPoints, LayerSizes, read_cost_pickle
from penstock.systems.tables import Row, existing_folder, read_checked, read_rows

__all__ = ["COMPONENTS", "DynaPipeTables", "LayerCost", "open_configuration"]

COMPONENTS = ("encoder", "decoder", "postprocess")
_QUANTITIES = ("fw_ms", "bw_ms", "stored_activation_mb", "peak_activation_mb")
_MB = 1e6


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
    """One of DynaPipe's cost models; open it with `DynaPipeTables.open("DIR/gpt_6.7b")`."""

    name: str
    folder: Path
    table_name: str
    dimensions: Dimensions
    links: DynaPipeLinks = field(default_factory=DynaPipeLinks)

    @classmethod
    def open(cls, path: str | Path) -> DynaPipeTables:
        """Finds the tables; they are read when first needed."""
        folder, table = Path(path).parent, Path(path).name
        if Path(path).is_dir():
            folder, table = Path(path), ""
        folder = existing_folder(folder, "folder of DynaPipe tables")
        held = sorted({file.name.rsplit("_cost_model.", 1)[0] for kind in ("csv", "pkl") for file in folder.glob(f"*_cost_model.{kind}")})
        if not held:
            raise InputError(f"folder '{folder}' holds no DynaPipe tables (<name>_cost_model.csv or .pkl).")
        if table not in held:
            problem = f"has no table '{table}'. {near_misses(table, held)}" if table else f"holds {', '.join(held)}; add one to the path."
            raise InputError(f"folder '{folder}' {problem}")
        if table not in MODELS:
            raise InputError(f"the hidden size of DynaPipe's '{table}' is not in its tables. {near_misses(table, MODELS)}")
        links = DynaPipeLinks()
        if (folder / "configs.json").is_file():
            links = read_checked(folder / "configs.json", "DynaPipe configurations", DynaPipeLinks, "_common")
        return cls(f"dynapipe:{path}", folder, table, MODELS[table], links)

    @cached_property
    def measured(self) -> tuple[CostPoints, LayerSizes]:
        """Every profiled point and layer size: from the CSV files, or from DynaPipe's own pickle where there are none."""
        path = self.folder / f"{self.table_name}_cost_model.csv"
        return _read_csv(path) if path.is_file() else read_cost_pickle(path.with_suffix(".pkl"))

    @cached_property
    def _grids(self) -> dict[tuple[int, str, str], CostGrid]:
        return {key: CostGrid.of([at for at, _ in found], [value for _, value in found]) for key, found in self.measured[0].items()}

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

    def modes(self, tp: int) -> tuple[str, ...]:
        """Recomputation modes that were profiled at a tensor-parallel degree."""
        return tuple(mode for mode in RECOMPUTE if (tp, mode, "encoder") in self._grids)

    def model_state_bytes(self, component: str, tp: int, recompute: str = "none", zero: int = 1, dp: int = 1) -> float:
        """Weights, gradients, fp32 copy and two moments of one layer (or `embedding`) per rank; ZeRO divides them over dp."""
        shards = [dp if zero >= level else 1 for level in (3, 2, 1)]
        return self._weights_mb(component, tp, recompute) * _MB * (1 / shards[0] + 1 / shards[1] + 6 / shards[2])

    def _weights_mb(self, component: str, tp: int, recompute: str) -> float:
        weights = self.measured[1].get((tp, recompute, component))
        if weights is None:
            raise self._missing(f"the weights of {component} with tp {tp} and recompute '{recompute}'", list(self.measured[1]))
        return weights

    def _missing(self, what: str, held: Sequence[tuple[int, str, str]]) -> ProfileMissingError:
        tps, modes, components = ({key[part] for key in held} for part in range(3))
        texts = [", ".join(map(str, sorted(values, key=str))) for values in (components, tps, modes)]
        return ProfileMissingError(f"{self.name} does not hold {what}; it holds {texts[0]} with tp {texts[1]} and recompute {texts[2]}.")


def _read_csv(path: Path) -> tuple[CostPoints, LayerSizes]:
    points: CostPoints = {}
    columns = ("tp", "recompute", "component", "micro_batch_size", "enc_or_input_seqlen", "dec_seqlen", *_QUANTITIES)
    for row in read_rows(path, columns):
        component = row.choice("component", COMPONENTS)
        key = row.count("tp"), row.choice("recompute", RECOMPUTE), component
        points.setdefault(key, []).append((_point(row, component), _costs(row, component)))
    state = path.with_name(path.name.replace("_cost_model.", "_model_state."))
    known = ("embedding", *COMPONENTS[:2])
    sizes = {
        (row.count("tp"), row.choice("recompute", RECOMPUTE), row.choice("component", known)): row.number("fp16_param_mb_per_layer")
        for row in read_rows(state, ("tp", "recompute", "component", "fp16_param_mb_per_layer"))
    }
    return points, sizes


def _point(row: Row, component: str) -> list[float]:
    columns = ("micro_batch_size", "enc_or_input_seqlen", *(("dec_seqlen",) if component == "decoder" else ()))
    return [float(row.count(column)) for column in columns]


def _costs(row: Row, component: str) -> list[float]:
    """The four quantities; the head has times only, a cell left empty elsewhere was not measured."""
    if component == "postprocess":
        return [row.optional_number("fw_ms"), row.optional_number("bw_ms"), 0.0, 0.0]
    return [row.optional_number(column) for column in _QUANTITIES]


def open_configuration(path: str | Path) -> tuple[DynaPipeTables, PlannerConfig]:
    """The configuration DIR/NAME of a folder's `configs.json`, and the tables of its model."""
    folder, name = existing_folder(Path(path).parent, "folder of DynaPipe tables"), Path(path).name
    known = read_checked(folder / "configs.json", "DynaPipe configurations", dict[str, PlannerConfig], "configs")
    if name not in known:
        raise InputError(f"folder '{folder}' has no configuration '{name}' of DynaPipe. {near_misses(name, known)}")
    config = known[name]
    if config.model not in TABLES:
        raise InputError(f"configuration '{name}' in '{folder}': model is '{config.model}'. {near_misses(config.model, TABLES)}")
    return DynaPipeTables.open(folder / TABLES[config.model]), config
