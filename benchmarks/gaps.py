"""How far plans over Aceso's tables are from their bounds: random problems of Aceso's form, the same ones for the same seed.

    python benchmarks/gaps.py --data DIR [--cases 400] [--seed 0] [--family gpt|t5|resnet] [--edge]

DIR holds aceso/eurosys and aceso/miniset. A problem is a model of the tables, 1 to 32 GPUs, a limit of 6 to 80 GB, a global batch and some
micro-batch sizes. `--edge` lowers each limit to just above what the model needs at all, where recomputation of single ops decides
which pipelines there are. Prints a line for each problem that is above 3 %, and a table: how many have a plan, shares of gaps above 3 %
and 10 %, the worst, and CPU seconds. Status 1 if more than 5 % of all gaps are above 3 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import InfeasibleError, InputError
from penstock.reproduce.aceso_cases import AcesoCase, searched

MODELS = (
    ("eurosys", "gpt", "350M"), ("eurosys", "gpt", "1_3B"), ("eurosys", "gpt", "6_7B"), ("eurosys", "t5", "770M"), ("eurosys", "t5", "6B"),
    ("eurosys", "resnet", "500M"), ("eurosys", "resnet", "2B"), ("eurosys", "resnet", "6_8B"), ("miniset", "gpt", "1_3B"),
    ("miniset", "t5", "770M"), ("miniset", "resnet", "1B"), ("miniset", "resnet", "500M"),
)  # fmt: skip
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8), (3, 4), (3, 8), (4, 2), (4, 8))
GOOD = 0.03
_LOWERED = 0.97
"""At the edge, each limit that is tried is this share of the one before; the last that has a plan is taken."""


@dataclass(frozen=True)
class Gap:
    """One problem and how far its plan is from the bound; None without a plan, `proven` where none can fit."""

    case: AcesoCase
    gap: float | None
    cpu_s: float
    proven: bool = False


def cases(seed: int, count: int, family: str) -> Iterator[AcesoCase]:
    """Problems by a seed, whatever the family: the same draws are made, others are left out."""
    numbers, found = random.Random(seed), 0
    while found < count:
        folder, model, size = numbers.choice(MODELS)
        nodes, per_node = numbers.choice([shape for shape in SHAPES if folder == "eurosys" or (shape[0] == 1 and shape[1] <= 4)])
        sizes = (8, 16, 32, 48, 64) if model == "resnet" else (1, 2, 4, 8)
        chosen = tuple(sorted(numbers.sample(sizes, numbers.randint(1, len(sizes)))))
        batch = numbers.choice((96, 192, 384, 768, 1536)) if model == "resnet" else numbers.choice((8, 16, 32, 64, 256, 1024))
        memory_mb = round(6000 * (80 / 6) ** numbers.random())
        if family in ("", model):
            found += 1
            yield AcesoCase(folder, model, size, nodes, per_node, batch, chosen, memory_mb)


def measured(case: AcesoCase, data: Path) -> Gap:
    """Searches a problem."""
    cpu = time.process_time()
    try:
        answer = searched(case, data / "aceso" / case.folder).answer
    except (InfeasibleError, InputError) as error:
        return Gap(case, None, time.process_time() - cpu, "that is proven" in str(error))
    return Gap(case, answer.time_s / answer.bound_s - 1 if answer.bound_s else float("inf"), time.process_time() - cpu)


def at_the_edge(case: AcesoCase, data: Path) -> Gap:
    """The same problem with the lowest limit of a row of lower and lower ones at which there is a plan."""
    found = measured(case, data)
    low, high = 500.0, case.memory_mb
    while found.gap is not None and high > low / _LOWERED:
        middle = (low * high) ** 0.5
        tried = measured(replace(case, memory_mb=round(middle)), data)
        if tried.gap is None:
            low = middle
        else:
            found, high = tried, middle
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="", choices=("", "gpt", "t5", "resnet"))
    parser.add_argument("--edge", action="store_true")
    given = parser.parse_args()
    found: list[Gap] = []
    for case in cases(given.seed, given.cases, given.family):
        one = (at_the_edge if given.edge else measured)(case, given.data)
        found.append(one)
        if one.gap is not None and one.gap > GOOD:
            print(f"{one.gap:7.2%} {one.cpu_s:5.1f} s  {one.case}", flush=True)
    print(f"{'family':8} {'problems':>8} {'no plan':>8} {'proven':>7} {'median':>7} {'> 3 %':>7} {'> 10 %':>7} {'worst':>7} {'CPU s':>7}")
    above = 0.0
    for family in ("gpt", "t5", "resnet", "all"):
        own = [one for one in found if family in (one.case.model, "all")]
        gaps = [one.gap for one in own if one.gap is not None]
        if not gaps:
            continue
        above = sum(gap > GOOD for gap in gaps) / len(gaps)
        counts = f"{len(own):8} {len(own) - len(gaps):8} {sum(one.proven for one in own):7}"
        large = sum(gap > 0.1 for gap in gaps) / len(gaps)
        cpu_s = sum(one.cpu_s for one in own)
        print(f"{family:8} {counts} {statistics.median(gaps):7.2%} {above:7.1%} {large:7.1%} {max(gaps):7.1%} {cpu_s:7.0f}")
    return int(above > 0.05)


if __name__ == "__main__":
    sys.exit(main())
