"""How fast a host issues small passes to its GPU, from moment to moment, and what torch's own thread for backward passes costs.

    python benchmarks/host_pace.py [--seconds 60] [--models gpt-1.3b bert-large t5-770m]

Passes of one sample of 120 tokens, forward and backward, keep a GPU busy for less time than the host takes to issue them. The same ones run
again and again in turns: on the calling thread, as ours do, and on the thread that torch would wake. Printed are medians, how far a single
measurement is off from its own median on average, which no prediction can be better than, and the ratio of both ways.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from accuracy import recomputed

from penstock.models import resolve_model
from penstock.models.modules import build_chain, random_batch, run_backward
from penstock.profiling.measure import hold_gradients

TOKENS, DEC_TOKENS, PASSES = 120, 40, 2


def passes(name: str, device: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Forward passes of a model, with nothing and with all of its layers recomputed."""
    model = resolve_model(name)
    chain = build_chain(model, device=torch.device(device))
    hold_gradients(chain.parameters())
    config = model.config
    batch = random_batch(
        [TOKENS], config["vocab"], dec_lengths=[DEC_TOKENS] if model.dec_length else [], layout="padded", types=config.get("types", 0),
        next_sentence=bool(config.get("next_sentence")), device=torch.device(device),
    )  # fmt: skip
    for pattern in ("none", "full"):
        flags = recomputed(model, pattern)
        yield f"{name}, {pattern} recomputed", lambda flags=flags: chain(batch, recompute=flags)["loss"]


def timed_s(forward: Callable[[], torch.Tensor], backward: Callable[[Sequence[torch.Tensor]], None], device: str) -> float:
    """Seconds of one pass."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(PASSES):
        backward([forward()])
    wait()
    return (time.perf_counter() - start) / PASSES


def spread(times: Sequence[float]) -> float:
    """How far one is off from the median, on average."""
    return statistics.mean(abs(one / statistics.median(times) - 1) for one in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", nargs="+", default=["gpt-1.3b", "bert-large", "t5-770m"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    forwards = dict(one for name in given.models for one in passes(name, given.device))
    ways = {"ours": run_backward, "torch": torch.autograd.backward}
    for forward in forwards.values():
        for way in ways.values():
            timed_s(forward, way, given.device)
    times: dict[tuple[str, str], list[float]] = {(name, way): [] for name in forwards for way in ways}
    until = time.monotonic() + given.seconds
    while time.monotonic() < until:
        for (name, way), found in times.items():
            found.append(timed_s(forwards[name], ways[way], given.device))
    print("| pass | calling thread | off by | torch's thread | off by | ratio |\n|---|---|---|---|---|---|")
    for name in forwards:
        ours, theirs = times[name, "ours"], times[name, "torch"]
        ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
        print(f"| {name} | {statistics.median(ours) * 1e3:.1f} ms | {spread(ours):.0%} | {statistics.median(theirs) * 1e3:.1f} ms "
              f"| {spread(theirs):.0%} | {ratio:.2f} × |")  # fmt: skip


if __name__ == "__main__":
    main()
