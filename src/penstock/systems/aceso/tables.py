"""Reads Aceso's profiled database: op chains of GPT, T5 and Wide-ResNet with their times and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, near_misses
from penstock.models.ops import ITEM_BYTES, Model, Op, TensorSpec
from penstock.systems.aceso.links import MB, SENTINELS, CollectiveTables, MessageTable, collective_files, read_messages
from penstock.systems.aceso.models import FAMILIES, SAME_TABLE, layer_runs, residual_runs
from penstock.systems.tables import existing_folder, imported_op, read_rows, split_quantity

__all__ = ["AcesoTables", "OpTable"]

_NAME = re.compile(r"(?P<table>(?P<family>[a-z0-9]+)_(?P<size>.+))_mbs(?P<mbs>\d+)_tp(?P<tp>\d+)_algo(?P<algo>\d+)\.csv")
_COLUMNS = ("forward-compute", "backward-compute", "input_size", "output_size", "weights", "activations", "fwd_reserved", "bwd_reserved")
@dataclass(frozen=True)
class OpTable:
    """One file: a row for each op, in the order and the units of the file (microseconds, MB)."""

    path: Path
    ops: Mapping[str, int]
    """Row of each op."""
    values: Floats
    """[rows, 8] in the order of the file's columns; times that were not measured are infinite."""

    def rows(self, names: Sequence[str]) -> Floats:
        """[names, 8]; an op that the file lacks has infinite times and no bytes."""
        absent = np.array([[np.inf, np.inf, *[0.0] * 6]])
        return np.concatenate([self.values, absent])[[self.ops.get(name, -1) for name in names]]


def _read_op_table(path: Path) -> OpTable:
    rows = read_rows(path, ("op_name", *_COLUMNS))
    values = np.array([[row.number(column) for column in _COLUMNS] for row in rows])
    unmeasured = np.isin(values[:, :2], SENTINELS).any(axis=1)
    values[unmeasured] = [np.inf, np.inf, *[0.0] * 6]
    return OpTable(path, {row.text("op_name"): number for number, row in enumerate(rows)}, values)


@dataclass(frozen=True)
class AcesoTables:
    """A folder of Aceso's tables; open it with `AcesoTables.open(folder)`."""

    name: str
    files: Mapping[str, Mapping[tuple[int, int, int], Path]]
    """Op tables: `gpt_1_3B` → (micro-batch, tp, algo) → file."""
    collectives: CollectiveTables
    p2p_intra: MessageTable
    p2p_inter: MessageTable
    """The one inside a node where the folder has none between nodes, as Aceso does."""
    _cache: dict[Path, OpTable] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: str | Path) -> AcesoTables:
        """Finds the tables of a folder; each is read when first needed."""
        path = existing_folder(folder, "folder of Aceso tables")
        files: dict[str, dict[tuple[int, int, int], Path]] = {}
        for file in sorted(path.glob("*_mbs*_tp*_algo*.csv")):
            match = _NAME.fullmatch(file.name)
            if match and match["family"] in FAMILIES:
                files.setdefault(match["table"], {})[int(match["mbs"]), int(match["tp"]), int(match["algo"])] = file
        if not files:
            below = sorted({file.parent.name for file in path.glob("*/*_mbs*_tp*_algo*.csv")})
            hint = f" Those below it do: {', '.join(below)}." if below else ""
            raise InputError(f"folder '{path}' holds no Aceso op tables (<model>_<size>_mbs<m>_tp<t>_algo<a>.csv).{hint}")
        intra = read_messages(path / "p2p_intra_node.csv")
        inter = path / "p2p_inter_node.csv"
        return cls(
            f"aceso:{folder}", files, CollectiveTables(collective_files(path)), intra, read_messages(inter) if inter.exists() else intra
        )

    @cached_property
    def models(self) -> tuple[tuple[str, str], ...]:
        """(family, size) of every model that the folder has tables for."""
        return tuple((table.split("_", 1)[0], table.split("_", 1)[1]) for table in sorted(self.files))

    def names(self) -> dict[str, tuple[str, str]]:
        """Family and size of every model that the tables hold, by its name."""
        alike = [(family, size) for (family, size), own in SAME_TABLE.items() if (family, own) in self.models]
        return {f"{family}_{size}": (family, size) for family, size in (*self.models, *alike)}

    def split_name(self, name: str) -> tuple[str, str, int] | None:
        """What `model` takes, from the name that it gives: `gpt_1_3B`, or, of another depth, `gpt_1_3B_48layers`; None if unknown."""
        names = self.names()
        match = re.fullmatch(r"(.+)_([1-9][0-9]{0,4})layers", name)
        base, layers = (match[1], int(match[2])) if match and match[1] in names else (name, 0)
        return (*names[base], layers) if base in names else None

    def model(self, family: str, size: str, num_layers: int = 0) -> Model:
        """Aceso's chain of ops, with the size's own number of layers unless another is given."""
        table = self._table_name(family, size)
        kind = FAMILIES[family]
        layers = num_layers or kind.layers.get(size, 0)
        if kind.runs and layers < 1:
            raise InputError(f"Aceso's {family} '{size}' has no fixed number of layers; give num_layers, 1 or more.")
        if num_layers and not kind.runs:
            raise InputError(f"Aceso's {family} '{size}' is profiled op by op; its number of layers cannot be changed.")
        ops = self._ops(family, table)
        runs = layer_runs(ops, kind, layers, self._first(table)[1].path) if kind.runs else residual_runs(ops)
        name = f"{family}_{size}" + (f"_{num_layers}layers" if num_layers else "")
        config = {"source": "aceso", "table": table, "family": family, "size": size, "num_layers": layers}
        return Model(name, family, kind.dtype, runs, (), kind.seq_length, kind.dec_length, ("padded",), config)

    def micro_batches(self, model: Model) -> tuple[int, ...]:
        """Micro-batch sizes that were profiled."""
        return tuple(sorted({mbs for mbs, _, _ in self.files[self._own(model)]}))

    def op_rows(self, model: Model, micro_batch: int, tp: int, algo: int = 0, partial: bool = False) -> Floats | None:
        """[ops of the chain, 8] the rows of one file in its own units (microseconds, MB).

        None where there is no such file, or, unless `partial`, where an op in it was not measured.
        """
        table = self._own(model)
        if (micro_batch, tp, algo) not in self.files[table]:
            return None
        rows = self._read(table, micro_batch, tp, algo).rows([place.op.config["op"] for place in model.ops])
        return rows if partial or bool(np.isfinite(rows[:, :2]).all()) else None

    def exact_collective_ms(self, kind: str, num_gpus: int, megabytes: float, model: Model) -> float | None:
        """Aceso's own lookup in the model's tables, sentinels as they stand; None where it finds nothing."""
        return self.collectives.exact_ms(self._own(model), kind, num_gpus, megabytes)

    def _table_name(self, family: str, size: str) -> str:
        if family not in FAMILIES:
            raise InputError(f"Aceso has no model family '{family}'. {near_misses(family, FAMILIES)}")
        for table in (f"{family}_{size}", f"{family}_{SAME_TABLE.get((family, size), size)}"):
            if table in self.files:
                return table
        sizes = [held for other, held in self.models if other == family]
        hint = near_misses(size, sizes) if sizes else f"It holds {', '.join(sorted(self.files))}."
        raise InputError(f"{self.name} has no tables of {family} size '{size}'. {hint}")

    def _own(self, model: Model) -> str:
        table = str(model.config.get("table", ""))
        if model.config.get("source") != "aceso" or table not in self.files:
            raise InputError(f"model '{model.name}' is not an op chain of {self.name}, which holds {', '.join(sorted(self.files))}.")
        return table

    def _read(self, table: str, mbs: int, tp: int, algo: int) -> OpTable:
        path = self.files[table][mbs, tp, algo]
        if path not in self._cache:
            self._cache[path] = _read_op_table(path)
        return self._cache[path]

    def _first(self, table: str) -> tuple[int, OpTable]:
        """The file that fixes the list of ops, with its micro-batch: the smallest on one GPU."""
        sizes = [mbs for mbs, tp, algo in self.files[table] if (tp, algo) == (1, 0)]
        if not sizes:
            raise InputError(f"{self.name}: {table} has no file for tp 1 and algo 0, from which the list of ops is read.")
        return min(sizes), self._read(table, min(sizes), 1, 0)

    def _ops(self, family: str, table: str) -> list[Op]:
        """One op for each row of the table; amounts are linear in the samples, as the smallest micro-batch gives them."""
        mbs, first = self._first(table)
        names, item = list(first.ops), ITEM_BYTES[FAMILIES[family].dtype]
        whole = first.rows(names)[:, 2:] * MB
        halved = self._read(table, mbs, 2, 0).rows(names)[:, 2:] * MB if (mbs, 2, 0) in self.files[table] else None
        tp_limit = max(tp for _, tp, _ in self.files[table])
        num_algos = len({algo for _, _, algo in self.files[table]})
        ops = []
        for row, name in enumerate(names):
            amounts = [split_quantity("samples", whole[row, c] / mbs, None if halved is None else halved[row, c] / mbs) for c in range(6)]
            weights = split_quantity("one", whole[row, 2] / item, None if halved is None else halved[row, 2] / item)
            elements = round(whole[row, 1] / item / mbs)
            ops.append(imported_op(
                name, table, name, (TensorSpec("hidden", ("samples", elements)),) if elements else (), parameters=weights, kept=amounts[3],
                workspace=amounts[4], backward_workspace=amounts[5], num_algos=num_algos, tp_limit=tp_limit,
                tied_to=names[0] if name.endswith("post-process") else "",
            ))  # fmt: skip
        return ops
