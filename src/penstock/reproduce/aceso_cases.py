"""Search problems over Aceso's tables whose answers by Aceso's own search are known, and our searches of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from penstock.reproduce.figures import Evidence
from penstock.systems.aceso.rules import Cuts
from penstock.systems.aceso.search import AcesoAnswer, AcesoProblem, search_aceso
from penstock.systems.aceso.tables import AcesoTables

__all__ = ["KNOWN_CASES", "AcesoCase", "SearchedCase", "searched", "searched_cases"]

_GPT, _WRN = (1, 2, 4, 8), (16, 32, 48, 64)


@dataclass(frozen=True)
class AcesoCase:
    """One search problem over Aceso's tables; `aceso_s` is what Aceso's own search found, where known."""

    folder: str
    model: str
    size: str
    nodes: int
    gpus_per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]
    memory_mb: float
    aceso_s: float | None = None
    layers: int = 0
    """Another number of layers than the size has."""
    cuts: Cuts = "ops"

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def title(self) -> str:
        """What axes of figures call it: the model, its size and the GPUs."""
        return f"{self.model} {self.size.replace('_', '.')}\n{self.num_gpus} × {self.memory_mb / 1000:g} GB"


KNOWN_CASES = (
    AcesoCase("miniset", "gpt", "1_3B", 1, 4, 512, _GPT, 12000, 58.76), AcesoCase("miniset", "t5", "770M", 1, 4, 512, _GPT, 12000, 33.66),
    AcesoCase("miniset", "resnet", "1B", 1, 4, 768, (8, *_WRN), 12000, 17.67),
    AcesoCase("eurosys", "gpt", "1_3B", 1, 4, 1024, _GPT, 28000, 101.2), AcesoCase("eurosys", "gpt", "6_7B", 2, 8, 1024, _GPT, 28000, 87.3),
    AcesoCase("eurosys", "t5", "6B", 1, 8, 1024, _GPT, 28000, 168.7), AcesoCase("eurosys", "resnet", "2B", 1, 4, 1536, _WRN, 28000, 49.3),
    AcesoCase("eurosys", "resnet", "6_8B", 2, 8, 1536, _WRN, 28000, 45.7),
)  # fmt: skip
"""Cases of the small experiment and of the paper whose tables are published."""


@dataclass(frozen=True)
class SearchedCase:
    """What our search found, and the wall and processor seconds it took."""

    answer: AcesoAnswer
    took_s: float
    cpu_s: float


def searched(case: AcesoCase, folder: Path) -> SearchedCase:
    """Our search over the tables in a folder."""
    tables = AcesoTables.open(folder)
    problem = AcesoProblem(
        tables, tables.model(case.model, case.size, case.layers), case.nodes, case.gpus_per_node, case.global_batch, case.micro_batches,
        case.memory_mb, case.cuts,
    )  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    answer = search_aceso(problem)
    return SearchedCase(answer, time.perf_counter() - start, time.process_time() - cpu)


def searched_cases(evidence: Evidence) -> dict[AcesoCase, SearchedCase]:
    """Every known case whose tables are there; the short form leaves two nodes out."""

    def work() -> dict[AcesoCase, SearchedCase]:
        cases = [case for case in KNOWN_CASES if (evidence.folder / case.folder).is_dir() and (case.nodes == 1 or not evidence.quick)]
        return {case: searched(case, evidence.folder / case.folder) for case in cases}

    return evidence.once("aceso searches", work)
