"""Whether valid input ends well: commands that people would type, drawn at random, and what must hold of their answers.

  python benchmarks/everyday.py [--seed 0] [--cases 40] [--limit 300] [--show]

Each case searches a plan for some model, cluster and batch under some options, then checks, simulates, explains, exports and reports it:

    every command            ends with status 0 or 3 (an export may refuse: 2), never with an error that was not expected
    what JSON says           is one object; the bound is not above the time; time limits, money and memory limits are kept
    `check` and `simulate`   find the plan valid, and as fast as `search` said

Prints tried and right, and each wrong case as a command to type; ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.cli.main import run
from penstock.clusters import DEVICES, INSTANCES
from penstock.models.catalog import model_names

SYSTEMS = ["megatron", "torchtitan", "deepspeed", "aceso", "fasop", "dynpipe", "runtime"]
LAUNCHERS = ["slurm", "kubernetes", "torchrun"]
GB = 1e9


@dataclass
class Case:
    """One request, and what was wrong with the answers."""

    arguments: list[str]
    limits: dict[str, float] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)


def drawn(rng: random.Random) -> Case:
    """A search that somebody might ask for."""
    case = Case(["--model", rng.choice(sorted(model_names())), "--cluster", _cluster(rng), "--global-batch", str(_batch(rng))])
    say = case.arguments.extend
    if rng.random() < 0.3:
        say(["--schedules", ",".join(rng.sample(["1f1b", "interleaved", "zero-bubble"], rng.randint(1, 3)))])
    elif rng.random() < 0.1:
        say(["--schedules", "pipedream"])
    if rng.random() < 0.3:
        say(["--micro-batches", ",".join(map(str, sorted(rng.sample([1, 2, 3, 4, 6, 8, 16], rng.randint(1, 3)))))])
    if rng.random() < 0.25:
        case.limits["memory_bytes"] = rng.choice([4, 8, 14, 30, 60]) * GB
        say(["--memory-limit", f"{case.limits['memory_bytes'] / GB:g}"])
    if rng.random() < 0.2:
        say(["--precision", rng.choice(["fp32", "bf16", "fp16"])])
    if rng.random() < 0.15:
        say(["--gradients", rng.choice(["fp32", "bf16"])])
    if rng.random() < 0.2 and case.arguments[1].startswith(("gpt", "llama", "bert", "t5")):
        say(["--seq-length", str(rng.choice([64, 100, 512, 1000, 1024]))])
    if rng.random() < 0.25:
        say([*_objective(rng), "--steps", str(rng.choice([1, 1000, 100_000]))])
    elif rng.random() < 0.15:
        say(["--for", rng.choice(SYSTEMS)])
    for option in ("--strict", "--baselines", "--proof"):
        if rng.random() < 0.15:
            say([option])
    say(["--top", str(rng.choice([1, 2, 5, 9]))])
    return case


def _cluster(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"{rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16])}x{rng.choice(sorted(DEVICES))}"
    kinds = rng.sample(sorted(INSTANCES), rng.choice([1, 1, 2, 2, 3]))
    return "+".join(f"{rng.choice([1, 1, 2, 3])}x{kind}" for kind in kinds)


def _batch(rng: random.Random) -> int:
    return rng.choice([1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 60, 61, 64, 100, 128, 256, 1000, 1024])


def _objective(rng: random.Random) -> list[str]:
    return ["--objective", rng.choice(["cost", f"time@cost<={10 ** rng.uniform(-3, 6):.3g}", f"cost@time<={10 ** rng.uniform(-4, 4):.3g}"])]


class OutOfTime(BaseException):
    """A command took longer than the limit; no error that a command could tell of."""


def ended(arguments: list[str], limit_s: float) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command; OutOfTime after the limit."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(limit_s))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run(arguments)
    finally:
        signal.alarm(0)
    return status, out.getvalue(), err.getvalue()


def asked(case: Case, arguments: list[str], limit_s: float, statuses: tuple[int, ...] = (0, 3)) -> dict[str, Any] | None:
    """What a command says in JSON, if it ends with status 0; what is wrong with how it ended is kept."""
    command = f"penstock {' '.join(arguments)}"
    try:
        status, out, err = ended([*arguments, "--json"], limit_s)
    except OutOfTime:
        case.wrongs.append(f"{command}: more than {limit_s:g} s")
        return None
    if status not in statuses or "not expected" in err or "Traceback" in err:
        case.wrongs.append(f"{command}: status {status}: {err.strip()[-300:]}")
    if status:
        return None
    try:
        answer: dict[str, Any] = json.loads(out)
    except json.JSONDecodeError as error:
        case.wrongs.append(f"{command}: stdout is no JSON object ({error})")
        return None
    return answer


def tried(case: Case, folder: Path, limit_s: float) -> None:
    """Runs a case, all of its commands."""
    plan = folder / "plan.json"
    # A precision that the devices do not have, a batch that does not divide and the like are refused, with a reason.
    answer = asked(case, ["search", *case.arguments, "--out", str(plan)], limit_s, (0, 2, 3))
    if answer is None:
        return
    case.wrongs += [f"search {' '.join(case.arguments)}: {wrong}" for wrong in _wrong_answers(case, answer)]
    if not plan.exists():
        case.wrongs.append("no plan was written")
        return
    asked(case, ["check", str(plan)], limit_s, (0,))
    if (simulated := asked(case, ["simulate", str(plan)], limit_s, (0,))) is not None:
        said, seen = answer["plans"][0]["time_s"], simulated["time_s"]
        if abs(said - seen) > 1e-6 * said:
            case.wrongs.append(f"search {' '.join(case.arguments)}: {said} s by search, {seen} s by simulate")
    asked(case, ["explain", str(plan)], limit_s, (0,))
    for system in (*SYSTEMS[:-1], *LAUNCHERS):
        must = system in case.arguments and "--for" in case.arguments
        asked(case, ["export", str(plan), "--to", f"{system}:{folder / system}"], limit_s, (0,) if must else (0, 2))
    asked(case, ["report", str(plan), "--out", str(folder / "report.html")], limit_s, (0,))


def _wrong_answers(case: Case, answer: dict[str, Any]) -> Iterator[str]:
    if answer["lower_bound_s"] is not None and not answer["gap"] >= -1e-9:
        yield f"the bound {answer['lower_bound_s']} s is above the plan"
    for number, plan in enumerate(answer["plans"], start=1):
        if plan["peak_bytes"] > case.limits.get("memory_bytes", float("inf")) * (1 + 1e-9):
            yield f"plan {number} holds {plan['peak_bytes'] / GB:.2f} GB"
        if not (plan["time_s"] > 0 and 0 < (plan["mfu"] or 0.5) < 1):
            yield f"plan {number} takes {plan['time_s']} s at MFU {plan['mfu']}"
    times = [plan["time_s"] for plan in answer["plans"]]
    if answer["objective"] == "time" and min(times) < answer["fastest_s"] * (1 - 1e-9):
        yield f"the fastest is said to take {answer['fastest_s']} s, but one takes {min(times)} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a command may take")
    parser.add_argument("--show", action="store_true", help="print each case with the time it took")
    given = parser.parse_args()
    cases = [drawn(random.Random(f"{given.seed}/{number}")) for number in range(given.cases)]
    for case in cases:
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            tried(case, Path(folder), given.limit)
        if given.show or case.wrongs:
            print(f"{'wrong' if case.wrongs else 'right'} {time.process_time() - begin:6.1f} s  {' '.join(case.arguments)}", flush=True)
        for wrong in case.wrongs:
            print(f"    {wrong}", flush=True)
    right = sum(not case.wrongs for case in cases)
    print(f"{right} right of {len(cases)} tried")
    return 0 if right == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
