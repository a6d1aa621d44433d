"""Somebody's modules beside plain torch: every model of the test suite's zoo on one, two and four ranks, and what skipping costs.

    python benchmarks/front_door.py [MODEL …]

Of each model five AdamW steps on 1, 2 and 4 ranks (pipeline; replicas; ZeRO-1; ZeRO-3; where it has a `tp_plan`, tp 2) against a plain loop
over samples: the largest difference of losses and weights. Then one module as a single stage beside its plain loop, and the time of a
skipped unit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import module_zoo  # noqa: E402
import torch  # noqa: E402
from module_cases import described, module_case, plain_training, weights_apart  # noqa: E402
from training_jobs import train_programs  # noqa: E402

from penstock.models.modules.cutting.skipping import Skipping  # noqa: E402
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings  # noqa: E402
from penstock.runtime.workers import WorkerPool  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "1 rank": {}, "pp 2": {"pp": 2}, "2 replicas": {"replicas": 2, "pp": 1}, "pp 4": {"pp": 4},
    "pp 2 × dp 2, ZeRO-1": {"pp": 2, "dp": 2, "zero": 1}, "dp 4, ZeRO-3": {"dp": 4, "zero": 3},
}  # fmt: skip
DIVIDED: dict[str, dict[str, Any]] = {"tp 2": {"tp": 2}, "tp 2 × pp 2": {"tp": 2, "pp": 2}}
"""Of models with a `tp_plan`."""
MODELS = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi", "gpt2", "bert", "t5", "mixtral", "long_skips", "plain_gpt", "vit")
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)


def main(names: list[str]) -> None:
    """Prints the tables."""
    print("| model | plan | loss | weights |\n|---|---|---|---|")
    with WorkerPool(4, timeout_s=600) as pool:
        for name in names or MODELS:
            for title, choice in (PLANS | (DIVIDED if described(name).max_tp() > 1 else {})).items():
                case = module_case(name, iterations=5, **choice)
                outcomes = [one for one in pool.run(train_programs, case.plan, case.programs(), ADAMW) if one.losses]
                losses, weights = plain_training(name, case, ADAMW)
                off = max(abs(mine - other) / abs(other) for mine, other in zip(outcomes[0].losses, losses, strict=True))
                print(f"| {name} | {title} | {off:.0e} | {weights_apart(case, outcomes, weights):.0e} |", flush=True)
    print("\n| | measured |\n|---|---|")
    for title, value in speeds():
        print(f"| {title} | {value} |", flush=True)


def speeds() -> list[tuple[str, str]]:
    """What cutting costs on this machine."""
    torch.set_num_threads(1)
    module, kwargs = module_zoo.make("llama"), module_zoo.example("llama", 8, 64)
    plain = _best(lambda: module(**kwargs).loss.backward())
    chain = Skipping(module)
    chain.trace(lambda own: own(**kwargs))
    whole = _best(lambda: chain.run(lambda own: own(**kwargs), 0, len(chain.calls), {}).loss.backward())
    few, many = (_last_but_one(lambda depth=depth: module_zoo.make("llama", num_hidden_layers=depth), "llama") for depth in (4, 24))
    fewer, more = (_last_but_one(lambda depth=depth: module_zoo.LongSkips(layers=depth), "long-skips") for depth in (4, 24))
    return [
        ("module as one stage beside its plain loop", f"{whole / plain:.3f} ×"),
        ("a skipped unit of Llama: 24 layers less 4", f"{(many[0] - few[0]) / (many[1] - few[1]) * 1e6:.0f} µs"),
        ("a skipped unit with sums between, in place and not", f"{(more[0] - fewer[0]) / (more[1] - fewer[1]) * 1e6:.0f} µs"),
        ("a pass of Llama's last norm alone: masks and angles too", f"{few[0] * 1e6:.0f} µs"),
    ]


def _last_but_one(make: Callable[[], Any], name: str) -> tuple[float, int]:
    """Seconds of a pass of the last unit but one, all before it skipped; how many that are."""
    kwargs = {key: value for key, value in module_zoo.example(name, 8, 64).items() if key != "labels"}
    chain = Skipping(make())
    chain.trace(lambda own: own(**kwargs))
    at = len(chain.calls) - 2
    carry = {site: x.detach() for site, x in chain.run(lambda own: own(**kwargs), 0, at, {}).items()}
    return _best(lambda: chain.run(lambda own: own(**kwargs), at, at + 1, carry), 50), at


def _best(work: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main(sys.argv[1:])
