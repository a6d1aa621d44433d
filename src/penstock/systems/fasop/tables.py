"""Reads FASOP's inputs: layer times of three models on two GPU kinds, node kinds with prices, and its experiments.

FASOP's conventions are kept: backward takes twice the forward, activations and weights travel in 16 bits, a tensor-parallel
group's communication is inside its layer times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, near_misses
from penstock.models.ops import Block, Model, TensorSpec
from penstock.models.shapes import Form, Quantity
from penstock.systems.fasop.inputs import OUTER_LAYERS, FasopModel, NodeKind, Setting
from penstock.systems.fasop.vectors import layer_times, vector_files
from penstock.systems.tables import existing_folder, imported_op, read_checked, read_rows

__all__ = ["FasopTables"]

_TIMES = "layer_fwdbwd_cost.csv"


@dataclass(frozen=True)
class FasopTables:
    """A folder of FASOP's inputs; open it with `FasopTables.open(folder)`."""

    name: str
    folder: Path
    models: Mapping[str, FasopModel]

    @classmethod
    def open(cls, folder: str | Path) -> FasopTables:
        """Reads the models; times are read when first needed."""
        path = existing_folder(folder, "folder of FASOP tables")
        missing = [file for file in ("models.json", _TIMES) if not (path / file).is_file()]
        if missing and not (missing == [_TIMES] and vector_files(path)):
            raise InputError(f"folder '{path}' holds no FASOP tables: '{missing[0]}' is missing.")
        return cls(f"fasop:{folder}", path, read_checked(path / "models.json", "FASOP models", dict[str, FasopModel]))

    @cached_property
    def _times(self) -> dict[str, dict[tuple[str, int, int], Floats]]:
        """Forward and backward seconds together: model → (GPU, tp, micro-batch) → one for each layer, infinite where missing."""
        columns = ("model", "gpu", "tp", "mbs", "layer_index", "fwdbwd_seconds")
        times: dict[str, dict[tuple[str, int, int], Floats]] = {name: {} for name in self.models}
        if not (self.folder / _TIMES).is_file():
            for model, key, seconds in layer_times(vector_files(self.folder), self.models):
                times[model][key] = seconds
            return times
        for row in read_rows(self.folder / _TIMES, columns):
            model = row.choice("model", list(self.models))
            layers = len(self.models[model].layer_types)
            key = row.text("gpu"), row.count("tp"), row.count("mbs")
            layer = row.count("layer_index")
            if layer >= layers:
                raise row.error("layer_index", f"0 to {layers - 1}, the layers of {model}")
            times[model].setdefault(key, np.full(layers, np.inf))[layer] = row.number("fwdbwd_seconds")
        return times

    def layer_times_s(self, name: str) -> Mapping[tuple[str, int, int], Floats]:
        """Forward and backward seconds together of a model's layers by (GPU, tp, micro-batch), infinite where one is missing."""
        if name not in self.models:
            raise InputError(f"{self.name} has no model '{name}'. {near_misses(name, self.models)}")
        return self._times[name]

    def settings(self) -> dict[str, Setting]:
        """The shipped experiments by name."""
        return read_checked(self.folder / "settings.json", "FASOP settings", dict[str, Setting])

    def node_kinds(self, table: str = "default") -> dict[str, NodeKind]:
        """Node kinds by the letter that settings use (`A`, `B`)."""
        tables = read_checked(self.folder / "node_types.json", "FASOP node types", dict[str, dict[str, NodeKind]])
        if table not in tables:
            raise InputError(f"{self.name} has no node table '{table}'. {near_misses(table, tables)}")
        return tables[table]

    def model(self, name: str) -> Model:
        """The list of layers as a chain; entries with the same times become one block."""
        if name not in self.models:
            raise InputError(f"{self.name} has no model '{name}'. {near_misses(name, self.models)}")
        dims = self.models[name]
        runs: list[tuple[Block, int]] = []
        for first in self._first_alike(name):
            block = _layer_block(name, dims, first, tp_limit=max((tp for _, tp, _ in self._times[name]), default=1))
            same = bool(runs) and runs[-1][0] == block
            runs[-1:] = [(block, runs[-1][1] + 1)] if same else [*runs[-1:], (block, 1)]
        outer = [index for index, layer in enumerate(dims.layer_types) if layer == "embedding_layer"]
        config = {"source": "fasop", "table": name, "global_batch_size": dims.global_batch_size, "required_cuts": outer[1:]}
        return Model(name, name, "fp16", tuple(runs), (), dims.sequence_length, 0, ("padded",), config)

    def _first_alike(self, name: str) -> list[int]:
        """For each layer the first one of its type with the same times: T5's last ones hold a norm and the head as well."""
        types = self.models[name].layer_types
        columns = np.array(list(self._times[name].values())).T if self._times[name] else np.zeros((len(types), 0))
        ends = (0, len(types) - 1)  # these are like no other: nothing crosses the boundary before or after them
        found: dict[tuple[str, bytes, bool], int] = {}
        return [found.setdefault((layer, columns[index].tobytes(), index in ends), index) for index, layer in enumerate(types)]


def _layer_block(table: str, dims: FasopModel, layer: int, tp_limit: int) -> Block:
    """An entry of the list as a block of one op, named after its type and, if others of the type differ, its place."""
    kind = dims.layer_types[layer]
    name = kind if dims.layer_types.index(kind) == layer else f"{kind}-{layer}"
    carry = () if layer == len(dims.layer_types) - 1 else (TensorSpec("hidden", ("tokens", dims.hidden_size)),)
    weights = Quantity(split=Form.of(one=dims.parameters(kind)))
    tied = "embedding_layer" if kind == "post_process" else ""
    op_name = name if kind in OUTER_LAYERS else "layer"
    op = imported_op(
        op_name, table, f"{kind}@{layer}", carry, parameters=weights, kept=dims.kept_bytes(kind), tp_limit=tp_limit, tied_to=tied
    )
    return Block(name, (op,))
