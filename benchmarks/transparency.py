"""Whether any plan trains like one process: the whole matrix of what `tests/runtime/test_transparency.py` samples.

  python benchmarks/transparency.py [--plans 400] [--steps 20] [--seed 0] [--ranks 8]

Draws plans over families, degrees, replicas, schedules, layouts, recomputation, cuts, per-stage and per-op degrees, ZeRO and sequence
parallelism, with micro-batches of random sizes and lengths; runs each for `--steps` steps in long-lived workers on CPU, and compares
losses and final weights with plain torch in one process. Prints the worst relative difference for each value of each dimension; ends with
status 1 if any is above 1e-5.

Nets with batch norm before ReLU (ResNet) run in doubles and are held to 1e-10: in fp32 one process whose first weights are off by 1e-7 ends
up as far from itself as from any plan (ResNet, tp 2, dp 2, ZeRO-3, three steps: both 1.3e-3; in doubles the plan is within 4e-15).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles import in_doubles, train_in_doubles
from runtime_cases import DIMENSIONS, Choice, is_possible, largest_difference, make_case, reference
from training_jobs import train_programs

from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerError, WorkerPool

TOLERANCE, TOLERANCE_IN_DOUBLES = 1e-5, 1e-10
SETTINGS = TrainingSettings(LearningRate(0.02, warmup_steps=3), OptimizerSettings("sgd"), clip_norm=1.0)


def drawn(count: int, seed: int, ranks: int) -> list[Choice]:
    """Different possible plans, families in turn, so that each has its share."""
    generator, found = random.Random(seed), []
    seen: set[tuple[object, ...]] = set()
    families = DIMENSIONS["family"]
    for _ in range(count * 2000):
        choice = {name: generator.choice(values) for name, values in DIMENSIONS.items()} | {"family": families[len(found) % len(families)]}
        key = tuple(choice.values())
        if key not in seen and is_possible(choice, ranks):
            seen.add(key)
            found.append(choice)
        if len(found) == count:
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8)
    given = parser.parse_args()
    worst: dict[tuple[str, object], tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    wrong, start = [], time.monotonic()
    pool = WorkerPool(given.ranks)
    for number, choice in enumerate(drawn(given.plans, given.seed, given.ranks)):
        case = make_case(choice, given.seed * 1_000_003 + number, given.steps)
        doubles = choice["family"] == "resnet"
        try:
            outcomes = pool.run(train_in_doubles if doubles else train_programs, case.plan, case.programs(), SETTINGS, timeout_s=120)
        except WorkerError as error:
            wrong.append(f"{choice}: {error}")
            pool = WorkerPool(given.ranks)
            continue
        with in_doubles() if doubles else nullcontext():
            losses, weights = reference(case, SETTINGS)
        of_losses = max(abs(mine - other) / abs(other) for mine, other in zip(outcomes[0].losses, losses, strict=True))
        of_weights, where = largest_difference(case, [outcome for outcome in outcomes if outcome.losses], weights)
        if not max(of_losses, of_weights) <= (TOLERANCE_IN_DOUBLES if doubles else TOLERANCE):
            wrong.append(f"{choice}: losses {of_losses:.1e}, weights {of_weights:.1e} ({where})")
        for name, value in choice.items():
            count, loss, weight = worst[name, value]
            worst[name, value] = (count + 1, max(loss, of_losses), max(weight, of_weights))
    pool.close()
    print(
        f"{'dimension':18} {'value':12} {'plans':>6} {'losses':>9} {'weights':>9}   largest relative difference after {given.steps} steps"
    )
    for name, values in DIMENSIONS.items():
        for value in values:
            count, loss, weight = worst[name, value]
            print(f"{name:18} {value!s:12} {count:6} {loss:9.1e} {weight:9.1e}")
    limits = f"{TOLERANCE:.0e} (in doubles {TOLERANCE_IN_DOUBLES:.0e})"
    print(f"{given.plans} plans in {time.monotonic() - start:.0f} s, {len(wrong)} beyond {limits}")
    for line in wrong:
        print(f"  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
