"""The record by which a published planning system is known to the commands: what of it can be searched, imported, exported, batched.

A new system is a package with its readers and rules and one such record in its `__init__`, listed in `penstock.systems`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import SampleLengths
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["PlanFile", "PlanFiles", "System", "TableAnswer", "TableOther", "TableScore", "TableSearch", "parse_nodes", "unknown_name"]


@dataclass(frozen=True)
class PlanFile:
    """A plan of another system as the user names it: its file, and what the file leaves open."""

    path: str
    model: str
    cluster: str
    global_batch: int | None = None
    partition: Path | None = None
    mini_batch: int | None = None
    row: int | None = None


@dataclass(frozen=True)
class PlanFiles:
    """A system's plan files: how they are read and written, and what `penstock import` asks for beside them."""

    read: Callable[[PlanFile, Model, Cluster], tuple[Plan, list[str]]]
    """The plan that a file means, and remarks."""
    write: Callable[[Plan, Model, Path], None]
    read_example: str
    write_example: str
    options: tuple[str, ...]
    """Fields of `PlanFile` beside the path that are read; others are refused."""
    required: tuple[str, ...]
    """Those without which a file means no plan."""
    lack: str
    """The beginning of "… not name it", told where one of them is missing."""
    folder_files: tuple[str, ...] = ()
    """What it writes into a folder; one file where there is nothing here."""
    require_model: Callable[[Model], object] = lambda model: None
    """Refuses a model that no plan of the system can be of, or its dtype."""


@dataclass(frozen=True)
class TableSearch:
    """What the user asks of a search over a system's own tables; None and empty where the tables may say it."""

    costs: str
    """As on the command line: `aceso:DIR`."""
    model: str
    cluster: str
    global_batch: int | None
    micro_batches: Sequence[int]
    memory_limit_gb: float | None
    baselines: bool = False
    """Whether simpler spaces are searched by the same rules as well."""
    top: int = 1
    """Most plans that are wanted."""
    budget_s: float | None = None
    """Seconds after which the search begins nothing more."""
    lengths: Path | None = None
    """Samples of the batch to plan for, where the tables are by length."""
    cuts: str = "ops"
    """Where plans may be cut, of tables whose ops are not those of our own chains."""

    @property
    def folder(self) -> str:
        """The folder of the tables."""
        kind, _, folder = self.costs.partition(":")
        if not folder or "\0" in folder:
            raise InputError(f"costs '{self.costs}': expected {kind}:DIR.")
        return folder


@dataclass(frozen=True)
class TableOther:
    """A plan that is not the best one."""

    what: str
    time_s: float
    text: str


@dataclass(frozen=True)
class TableAnswer:
    """The plan that a search over a system's tables found, in the words of a table of stages."""

    title: str
    time_s: float
    bound_s: float
    stages: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    note: str
    text: str
    """The plan's file as the system itself has it."""
    usd_per_step: float | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the best plan of simpler spaces, by their names; infinite where none fits."""
    others: Sequence[TableOther] = ()
    """The next best plans, where they were asked for."""
    is_torn: bool = False
    """Whether the plan cuts inside what is one op of our chains, so that `penstock import` rounds it."""


@dataclass(frozen=True)
class TableScore:
    """What a plan file of a system takes by the system's own tables."""

    title: str
    time_s: float
    stages: Sequence[Mapping[str, Any]]
    note: str


@dataclass(frozen=True)
class System:
    """A published planning system; what it does not have is None."""

    name: str
    """As it is written before the colon: `aceso:PATH`."""
    plans: PlanFiles | None = None
    search: Callable[[TableSearch, Callable[[str], None]], TableAnswer] | None = None
    """The best plan by the system's own tables and rules; the second argument is told how far the search is."""
    score: Callable[[str, Path], TableScore] | None = None
    """Time and memory of a plan file by the tables in a folder."""
    chain: Callable[[str, str], Model] | None = None
    """The model that the tables in a folder have under a name."""
    batch_costs: Callable[[str, Sequence[SampleLengths], bool], PipelineCosts] | None = None
    """What micro-batches cost by the configuration at DIR/NAME; True places its layers so that these samples are fastest."""


def parse_nodes(text: str, why: str) -> tuple[int, int]:
    """Nodes and GPUs of each, as in `2x8`; `why` says what the tables know of them."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*[x×]\s*([1-9][0-9]{0,5})\s*", text)
    if match is None:
        raise InputError(f"--cluster is '{text}'; nodes x GPUs, such as 2x8, were expected: {why}")
    return int(match[1]), int(match[2])


def unknown_name(where: str, what: str, name: str, known: Sequence[str]) -> InputError:
    """The error of a name that a folder of tables does not have, with all that it has."""
    names = sorted(known)
    close = near_misses(name, names)
    hint = f" {close}" if close.startswith("Did") else ""
    return InputError(f"{what} '{name}': {where} has no such {what}.{hint} It has {', '.join(names)}.")
