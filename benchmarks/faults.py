"""What a run on one machine survives, and what it costs: faults of every kind in every phase of a step, one after the other in runs of four
ranks (two stages, each of two data-parallel ranks under ZeRO-1), whose losses must stay to the bit those of a run without any.

    python benchmarks/faults.py                      the whole matrix
    python benchmarks/faults.py --kinds kill --phases backward update
    python benchmarks/faults.py --soak 3600          faults drawn at random for an hour; memory and descriptors must stay flat

Prints faults survived of all, seconds from a death to the next step beside those of a cold `--resume`, and the cost of copies.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.adapting.asking import ask_for
from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.adapting.watching import obey_run
from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.errors import PenstockError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import write_plan
from penstock.runtime.recovering.faults import MOVING, PHASES, Fault, ask_fault
from penstock.runtime.request import WARM_UP, StepTold, TrainRequest, TrainResult
from penstock.runtime.run import Run, train_rank
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import Worker

KINDS = ("kill", "fail", "freeze")
ROLES: dict[str, tuple[int, ...]] = {
    "rank 0": (0,), "its ZeRO peer": (1,), "last stage": (3,), "two neighbours": (1, 2), "all": (0, 1, 2, 3),
}  # fmt: skip
PLANNER = "planner"
_EVERY, _COPIES = 4, 2
"""Steps between checkpoints and between copies of a run with faults, so that every phase comes soon."""
_LEAD = 2
"""Steps after the one that was told: the first that no rank has begun."""


@dataclass(frozen=True)
class FaultCase:
    """One entry of the matrix."""

    kind: str
    phase: str
    role: str

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.kind} in {self.phase}, {self.role}"


def cases(kinds: Sequence[str], phases: Sequence[str], roles: Sequence[str]) -> list[FaultCase]:
    """All that are asked for; planners have no phases."""
    found = [FaultCase(*one) for one in itertools.product(kinds, phases, [role for role in roles if role != PLANNER])]
    return found + ([FaultCase(kind, "planning", PLANNER) for kind in kinds if kind != "fail"] if PLANNER in roles else [])


class Striker:
    """Asks for one fault after the other while a run goes on."""

    def __init__(self, out: Path, plans: tuple[Plan, Plan], left: Iterator[FaultCase]) -> None:
        self.out, self.plans, self.left = out, plans, left
        self.now: FaultCase | None = None
        self.done: list[FaultCase] = []
        self.pauses_s: list[float] = []
        self._after = 3
        self._moved = 0

    def hear(self, told: StepTold) -> None:
        """A new step was done: the last fault is over if a few followed it."""
        if told.step < self._after:
            return
        if self.now is not None:
            self.done.append(self.now)
        self.now = next(self.left, None)
        if self.now is None:
            os.kill(os.getpid(), signal.SIGTERM)  # as somebody would who has seen enough
            self._after = 1 << 60
            return
        first = told.step + _LEAD
        if self.now.role == PLANNER:
            for pid in planners():
                os.kill(pid, signal.SIGKILL if self.now.kind == "kill" else signal.SIGSTOP)
        else:
            for rank in ROLES[self.now.role]:
                ask_fault(self.out, Fault(self.now.kind, rank, self.now.phase, first))  # type: ignore[arg-type]
        if self.now.phase == MOVING:
            self._moved += 1
            ask_for(self.out, self.plans[self._moved % 2], first + 1)
        self._after = first + _EVERY + 3


def planners() -> list[int]:
    """Processes that plan for a run of this process, which are children of its fork server's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith(PLANNER) and os.getpgid(int(path.parent.name)) == os.getpgid(0):
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def two_plans() -> tuple[Plan, Plan]:
    """One that is trained, and one with another cut, to which moves are exact."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=2, pp=2, dp=2, zero=1, layout="packed")
    first, last = plan.stages
    cut = first.last - 4
    shorter = replace(first, last=cut, recompute=()), replace(last, first=cut, recompute=())
    return plan, replace(plan, stages=shorter, predicted=None)


def matrix(folder: Path, wanted: list[FaultCase]) -> tuple[int, list[float], list[str]]:
    """How many were survived, the pauses, and what went wrong."""
    plans, left, survived, pauses, wrong = two_plans(), iter(wanted), 0, list[float](), list[str]()
    calm = _request(folder, plans[0], folder / "calm", 60 * max(1, len(wanted) // 6))
    for number in itertools.count():
        out = folder / f"run-{number}"
        striker = Striker(out, plans, left)
        request = replace(calm, out=str(out), on_death="recover", copies=_COPIES, checkpoint_every=_EVERY, steps=1 << 20)
        try:
            PlanTrainer(request, obey_run, RunWitness(out)).train(striker.hear)
        except PenstockError as error:
            wrong.append(f"{striker.now.name if striker.now else 'nothing'}: {str(error).partition(chr(10))[0]}")
        survived += len(striker.done)
        pauses += [event.pause_s for event in read_events(out) if event.event == "replaced" and event.pause_s]
        wrong += [f"shrunk: {event.text}" for event in read_events(out) if event.event == "shrunk"]
        wrong += _differences(calm, out)
        if striker.now is None or not striker.done:
            return survived, pauses, wrong


def _differences(calm: TrainRequest, out: Path) -> list[str]:
    """What differs from a run without faults, which is trained as far as this one came."""
    found = read_steps(out / "steps.jsonl")
    request = replace(calm, out=f"{out}-calm", steps=len(found))
    PlanTrainer(request).train()
    pairs = zip(found, read_steps(Path(request.out) / "steps.jsonl"), strict=True)
    wrong = [one.step for one, other in pairs if (one.step, one.loss, one.samples) != (other.step, other.loss, other.samples)]
    return [f"{out.name}: {len(wrong)} of {len(found)} steps differ, the first is {wrong[0]}"] if wrong else []


def _request(folder: Path, plan: Plan, out: Path, steps: int) -> TrainRequest:
    return TrainRequest(plan, str(folder / "data"), steps, str(out), checkpoint_every=0)


def cold_s(folder: Path) -> float:
    """Seconds from the death of a run to the first step of one that a person starts again at once."""
    out, plan = folder / f"cold-{time.time_ns()}", folder / "plan.json"
    write_plan(plan, two_plans()[0])
    command = [sys.executable, "-m", "penstock.cli.main", "train", str(plan), "--data", str(folder / "data"), "--out", str(out), "--json"]
    subprocess.run([*command, "--steps", "4"], check=True, stdout=subprocess.DEVNULL)
    lines, begun = (out / "steps.jsonl").read_bytes().count(b"\n"), time.perf_counter()
    with subprocess.Popen([*command, "--steps", "6", "--resume", str(out)], stdout=subprocess.DEVNULL) as process:
        while (out / "steps.jsonl").read_bytes().count(b"\n") <= lines and process.poll() is None:
            time.sleep(0.01)
        return time.perf_counter() - begun


def copy_cost(folder: Path, steps: int) -> float:
    """Share of its main thread's processor time that copies every ten steps take of a rank: the worst of them."""
    request = replace(_request(folder, two_plans()[0], folder / "cost", steps), on_death="recover", copies=10)
    with mock.patch("penstock.runtime.trainer.train_rank", train_counting):
        PlanTrainer(request).train()
    return max(float(path.read_text()) for path in Path(request.out).glob("copying-*"))


def train_counting(worker: Worker, request: TrainRequest, *given: Any) -> TrainResult:
    """A rank that writes down what its copies took of all that it did, its first steps and its start left out."""
    copying_s, begun_s, copy, train = 0.0, 0.0, Run._copy, Run._train

    def counted_copy(run: Run) -> None:
        nonlocal copying_s
        before_s = time.thread_time()
        copy(run)
        copying_s += time.thread_time() - before_s if run.step > WARM_UP else 0.0

    def counted_train(run: Run, *arguments: Any) -> Any:
        nonlocal begun_s
        begun_s = time.thread_time() if run.step == WARM_UP else begun_s
        return train(run, *arguments)

    with mock.patch.object(Run, "_copy", counted_copy), mock.patch.object(Run, "_train", counted_train):
        found = train_rank(worker, request, *given)
    (Path(request.out) / f"copying-{worker.rank}").write_text(str(copying_s / (time.thread_time() - begun_s)))
    return found


def soak(folder: Path, seconds: float, seed: int) -> None:
    """Random faults for so long; what this process holds must not grow."""
    drawn, everything, end = random.Random(seed), cases(KINDS, PHASES, [*ROLES]), time.monotonic() + seconds

    def endless() -> Iterator[FaultCase]:
        while time.monotonic() < end:
            yield drawn.choice(everything)

    striker = Striker(folder / "soak", two_plans(), endless())
    request = replace(_request(folder, two_plans()[0], striker.out, 1 << 20), on_death="recover", copies=_COPIES, checkpoint_every=_EVERY)
    before = _held()
    try:
        PlanTrainer(request, obey_run, RunWitness(striker.out)).train(striker.hear)
    finally:
        print(f"{len(striker.done)} faults survived in {seconds:.0f} s; held before {before}, after {_held()}")


def _held() -> dict[str, int]:
    """Descriptors, threads and memory of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own = len(os.listdir("/proc/self/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) // 1024
    return dict(zip(("descriptors", "threads", "MB"), own, strict=True))


def main() -> None:
    """Runs what is asked for, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--roles", nargs="+", default=[*ROLES, PLANNER], choices=[*ROLES, PLANNER])
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--no-cost", action="store_true", help="leave cold starts and the cost of copies out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
        if given.soak:
            soak(folder, given.soak, given.seed)
            return
        wanted = cases(given.kinds, given.phases, given.roles)
        survived, pauses, wrong = matrix(folder, wanted)
        for line in wrong:
            print(line)
        print(f"survived {survived} of {len(wanted)}")
        usual = statistics.median(pauses) if pauses else 0.0
        print(f"from a death to the next step: median {usual:.2f} s, longest {max(pauses, default=0.0):.2f} s, {len(pauses)} times")
        if not given.no_cost:
            cold = cold_s(folder)
            print(f"a cold --resume: {cold:.2f} s, so that going on takes {usual / cold:.2f} of it")
            print(f"copies every 10 steps cost {copy_cost(folder, 102):.1%} of a rank's processor time")


if __name__ == "__main__":
    main()
