"""Reads FASOP's inputs: layer times of three models on two GPU kinds, node kinds with prices, and its experiments.

FASOP's conventions are kept: backward takes twice the forward, activations and weights travel in 16 bits, a tensor-parallel
group's communication is inside its layer times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.table import CostTable, Floats
from penstock.errors import InputError, ProfileMissingError, near_misses
from penstock.models.ops import Block, Model, TensorSpec
from penstock.models.shapes import Form, Quantity, Shape
from penstock.systems.fasop.inputs import OUTER_LAYERS, FasopModel, NodeKind, Setting
from penstock.systems.tables import Costs, device_names, existing_folder, imported_op, read_checked, read_rows, ring_time_s, same_node

if TYPE_CHECKING:
    from penstock.clusters import Cluster

__all__ = ["FasopTables"]

_ITEM_BYTES = 2
_INTRA_OVERHEAD, _INTER_OVERHEAD = 3.5, 1.05
"""FASOP's fitted ratios of a link's bandwidth to what one message reaches."""


@dataclass(frozen=True)
class FasopTables:
    """A folder of FASOP's inputs as a cost source; open it with `FasopTables.open(folder)`."""

    name: str
    folder: Path
    models: Mapping[str, FasopModel]

    @classmethod
    def open(cls, folder: str | Path) -> FasopTables:
        """Reads the models; times are read when first needed."""
        path = existing_folder(folder, "folder of FASOP tables")
        for file in ("models.json", "layer_fwdbwd_cost.csv"):
            if not (path / file).is_file():
                raise InputError(f"folder '{path}' holds no FASOP tables: '{file}' is missing.")
        return cls(f"fasop:{folder}", path, read_checked(path / "models.json", "FASOP models", dict[str, FasopModel]))

    @cached_property
    def _times(self) -> dict[str, dict[tuple[str, int, int], Floats]]:
        """Forward and backward seconds together: model → (GPU, tp, micro-batch) → one for each layer, infinite where missing."""
        columns = ("model", "gpu", "tp", "mbs", "layer_index", "fwdbwd_seconds")
        times: dict[str, dict[tuple[str, int, int], Floats]] = {name: {} for name in self.models}
        for row in read_rows(self.folder / "layer_fwdbwd_cost.csv", columns):
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

    @cached_property
    def profiled_forward_s(self) -> dict[tuple[str, str, int, int], float]:
        """The raw profile: forward seconds of one sample by (model, GPU, tp, layer)."""
        rows = read_rows(self.folder / "layer_fwd_cost_mbs1.csv", ("model", "gpu", "tp", "layer_index", "fwd_seconds"))
        return {(r.text("model"), r.text("gpu"), r.count("tp"), r.count("layer_index")): r.number("fwd_seconds") for r in rows}

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU kinds as the tables name them."""
        return tuple(sorted({gpu for times in self._times.values() for gpu, _, _ in times}, reverse=True))

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

    def micro_batches(self, model: Model) -> tuple[int, ...]:
        """Micro-batch sizes that the tables hold."""
        return tuple(sorted({mbs for _, _, mbs in self._times[self._own(model)]}))

    def shapes(self, model: Model) -> tuple[Shape, ...]:
        """The same as micro-batches of the model's usual length."""
        return tuple(model.usual_shape(mbs) for mbs in self.micro_batches(model))

    def tps(self, model: Model) -> tuple[int, ...]:
        """Tensor-parallel degrees that the tables hold."""
        return tuple(sorted({tp for _, tp, _ in self._times[self._own(model)]}))

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster | None = None) -> CostTable:
        """All layer costs on the cluster's device kinds; what the tables lack has infinite times."""
        name = self._own(model)
        if shapes and not any(shape == model.usual_shape(shape.samples) for shape in shapes):
            raise ProfileMissingError(f"{self.name} holds only padded samples of {model.seq_length} tokens; {shapes[0]} was asked for.")
        devices = device_names(cluster, [gpu.lower() for gpu in self.gpus])
        costs = Costs(model, shapes, tps, (0,), devices)
        layers = [int(op.rpartition("@")[2]) for op in costs.op_names]
        for d, gpu in enumerate([self._gpu(device) for device in devices]):
            for t, tp in enumerate(tps):
                for s, shape in enumerate(shapes):
                    times = self._times[name].get((gpu, tp, shape.samples))
                    if times is not None and shape == model.usual_shape(shape.samples):
                        costs.forward_s[:, s, t, 0, d] = times[layers] / 3
                        costs.backward_s[:, s, t, 0, d] = 2 * times[layers] / 3
        self._fill_amounts(costs, self.models[name], layers)
        return costs.table()

    def _fill_amounts(self, costs: Costs, dims: FasopModel, layers: Sequence[int]) -> None:
        """Weights and bytes by FASOP's formulas; every boundary but the two ends carries one hidden state."""
        last = len(dims.layer_types) - 1
        for o, layer in enumerate(layers):
            kind = dims.layer_types[layer]
            for t, tp in enumerate(costs.tps):
                costs.parameters[o, t, 0] = dims.parameters(kind) / tp
                for s, shape in enumerate(costs.shapes):
                    boundary = shape.samples * dims.sequence_length * dims.hidden_size * _ITEM_BYTES
                    costs.kept_bytes[o, s, t, 0] = dims.kept_bytes(kind).at(shape, tp)
                    costs.input_bytes[o, s, t, 0] = boundary if layer else 0
                    costs.output_bytes[o, s, t, 0] = boundary if layer != last else 0

    def collective_s(self, kind: str, size_bytes: float, cluster: Cluster, ranks: Sequence[int]) -> float:
        """A ring at the slowest link's full bandwidth, as FASOP charges gradient reduction."""
        return ring_time_s(kind, size_bytes, len(ranks), cluster.slowest_link(ranks).bandwidth_bytes_per_s) if len(ranks) > 1 else 0.0

    def transfer_s(self, size_bytes: float, cluster: Cluster, sender: int, receiver: int) -> float:
        """One message at the link's bandwidth over FASOP's fitted overhead; other messages at the same time are not counted."""
        overhead = _INTRA_OVERHEAD if same_node(cluster, (sender, receiver)) else _INTER_OVERHEAD
        return size_bytes * overhead / cluster.link(sender, receiver).bandwidth_bytes_per_s

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0
    ) -> float:
        """Zero: FASOP does not model the optimizer step."""
        return 0.0

    def _own(self, model: Model) -> str:
        name = str(model.config.get("table", ""))
        if model.config.get("source") != "fasop" or name not in self.models:
            raise InputError(f"model '{model.name}' is not a chain of {self.name}, which holds {', '.join(self.models)}.")
        return name

    def _gpu(self, device: str) -> str:
        """The tables' name of a device kind: `a100-40gb` is measured as A100."""
        alike = [gpu for gpu in self.gpus if device.lower().startswith(gpu.lower())]
        if not alike:
            raise ProfileMissingError(f"{self.name} holds GPUs {', '.join(self.gpus)}; the cluster has '{device}'.")
        return max(alike, key=len)


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
