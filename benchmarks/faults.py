"""What a run survives, and what it costs: the matrix of `fault_cases.py`, struck one after the other in runs whose losses must stay to the
bit those of a run without any fault; those of nodes in a run each (`node_faults.py`).

    python benchmarks/faults.py                      the whole matrix
    python benchmarks/faults.py --pairs              a covering set: every kind, phase and victim with every other
    python benchmarks/faults.py --kinds kill --phases backward update --victims "rank 0"
    python benchmarks/faults.py --part 2/7           one part of several, which may run at the same time
    python benchmarks/faults.py --soak --faults 1000 drawn at random over a long paced training; memory and descriptors must stay flat

Prints faults survived of all, those that make no sense and why, seconds from a death to the next step beside those of a cold `--resume`,
and the cost of copies.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from fault_cases import NODES, PIPELINE, TENSOR, VICTIMS, FaultCase, cases, covering, part_of
from node_faults import may_make_spaces, strike_nodes

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
from penstock.runtime.recovering.faults import KINDS, PHASES, Fault, ask_fault, forget_faults
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import WARM_UP, StepReport, TrainRequest, TrainResult
from penstock.runtime.run import Run, train_rank
from penstock.runtime.run_folder import plan_of_run
from penstock.runtime.telemetry.phases import COMMITTING, MOVING, RECOVERING
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.worker import Worker

_EVERY, _COPIES = 4, 2
"""Steps between checkpoints and between copies of a run with faults, so that every phase comes soon."""
_LEAD = 2
"""Steps after the one that was told: the first that no rank has begun."""
_MOST_STEPS = 40
"""After which a fault that was asked for must have been met."""


def scene_plans(scene: str) -> tuple[Plan, Plan]:
    """One that is trained, and one with another cut, to which moves are exact."""
    shape = {"pp": 3, "dp": 2, "zero": 1} if scene == PIPELINE else {"pp": 2, "tp": 2}
    plan = uniform_plan("gpt-tiny", "6xcpu" if scene == PIPELINE else "4xcpu", global_batch=8, micro_batch=2, layout="packed", **shape)
    first, second, *others = plan.stages
    cut = first.last - 4
    shorter = replace(first, last=cut, recompute=()), replace(second, first=cut, recompute=()), *others
    return plan, replace(plan, stages=shorter, predicted=None)


class Striker:
    """Asks for one fault after the other while a run goes on."""

    def __init__(self, out: Path, plans: tuple[Plan, Plan], left: Iterator[FaultCase]) -> None:
        self.out, self.plans, self.left = out, plans, left
        self.now: FaultCase | None = None
        self.done: list[FaultCase] = []
        self.wrong: list[str] = []
        self._after, self._until = 3, 0

    def hear(self, told: StepReport) -> None:
        """A new step was done: the last fault is over if a few followed it."""
        if told.step < self._after:
            return
        if self.now is not None:
            if not self._is_over(told.step):
                self._move(told.step + _LEAD)
                return
            self.done.append(self.now)
        self.now = next(self.left, None)
        if self.now is None:
            os.kill(os.getpid(), signal.SIGTERM)  # as somebody would who has seen enough
            self._after = 1 << 60
            return
        first = told.step + _LEAD
        self._strike(self.now, first)
        begun = read_steps(self.out / "steps.jsonl")[-1].step + 1  # by now: on a busy machine more were done than were told of
        self._after, self._until = begun + 2 * _LEAD, begun + _MOST_STEPS  # all have seen the fault by then

    def _move(self, step: int) -> None:
        """Asks for the move in which a fault is to be met, and again where one victim ended it before the others had met theirs."""
        assert self.now is not None
        if self.now.phase in (MOVING, COMMITTING) and not (self.out / "replan.json").exists():
            ask_for(self.out, next(plan for plan in self.plans if plan != plan_of_run(self.out)), step)
            self._after = step

    def _is_over(self, step: int) -> bool:
        """Whether all that was asked for has happened: whoever meets a fault, or makes a move, removes its file."""
        assert self.now is not None
        if not [*(self.out / "faults").glob("*.json"), *self.out.glob("replan.json")]:
            return True
        if step < self._until:
            return False
        self.wrong.append(f"{self.now.name}: was never met")
        forget_faults(self.out)
        return True

    def _strike(self, case: FaultCase, first: int) -> None:
        if not case.victim.ranks:
            for pid in planners():
                os.kill(pid, signal.SIGKILL if case.kind == "kill" else signal.SIGSTOP)
        for number, rank in enumerate(case.victim.ranks):
            phase, step = case.phase, first
            if phase == RECOVERING and number + 1 < len(case.victim.ranks):
                phase = "backward"  # the first of two dies, the other while somebody takes its place
            elif phase == RECOVERING:
                step = 0
                if number == 0:
                    ask_fault(self.out, Fault("kill", self.plans[0].ranks[rank - 1], "backward", first))
            ask_fault(self.out, Fault(case.kind, rank, phase, step))  # type: ignore[arg-type]


def planners() -> list[int]:
    """Processes that plan for a run of this process, which are children of its fork server's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith("planner") and os.getpgid(int(path.parent.name)) == os.getpgid(0):
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def _in_time(wanted: Sequence[FaultCase], end_s: float, struck: list[FaultCase]) -> Iterator[FaultCase]:
    """One after the other while there is time; `struck` has those that were taken. Tells how long each took."""
    for case in wanted:
        if (begun_s := time.monotonic()) > end_s:
            return
        struck.append(case)
        yield case
        print(f"  {case.name}: {time.monotonic() - begun_s:.1f} s", flush=True)


def matrix(folder: Path, scene: str, wanted: Iterator[FaultCase]) -> tuple[int, list[float], list[str]]:
    """How many of a scene were survived, the pauses, and what went wrong."""
    plans, survived, pauses, wrong = scene_plans(scene), 0, list[float](), list[str]()
    for number in itertools.count():
        out = folder / f"{scene[:5].strip()}-{number}"
        striker, begun_s = Striker(out, plans, wanted), time.monotonic()
        request = replace(_request(folder, plans[0], out), on_death="recover", copies=_COPIES, checkpoint_every=_EVERY)
        try:
            PlanTrainer(request, obey_run, RunWitness(out)).train(striker.hear)
        except PenstockError as error:
            wrong.append(f"{striker.now.name if striker.now else 'nothing'}: {str(error).partition(chr(10))[0]}")
        shrunk = [f"shrunk: {event.text}" for event in read_events(out) if event.event == "shrunk"]
        found = [*striker.wrong, *shrunk, *_differences(request)]
        wrong += found
        survived += len(striker.done) - len(found)
        pauses += [event.pause_s for event in read_events(out) if event.event == "replaced" and event.pause_s]
        print(f"  {scene}: {len(striker.done)} struck in {time.monotonic() - begun_s:.0f} s, {len(found)} wrong", flush=True)
        if striker.now is None:
            return survived, pauses, wrong


def _differences(run: TrainRequest) -> list[str]:
    """What differs from a run without faults, which is trained as far as this one came."""
    found = read_steps(Path(run.out) / "steps.jsonl")
    calm = replace(run, out=f"{run.out}-calm", on_death="end", checkpoint_every=0, device="cpu", steps=len(found))
    PlanTrainer(calm).train()
    pairs = zip(found, read_steps(Path(calm.out) / "steps.jsonl"), strict=True)
    wrong = [one.step for one, other in pairs if (one.step, one.loss, one.samples) != (other.step, other.loss, other.samples)]
    return [f"{run.out}: {len(wrong)} of {len(found)} steps differ, the first is {wrong[0]}"] if wrong else []


def _request(folder: Path, plan: Plan, out: Path, steps: int = 1 << 20) -> TrainRequest:
    return TrainRequest(plan, str(folder / "data"), steps, str(out), checkpoint_every=0)


def cold_s(folder: Path) -> float:
    """Seconds from the death of a run to the first step of one that a person starts again at once."""
    out, plan = folder / f"cold-{time.time_ns()}", folder / "plan.json"
    write_plan(plan, scene_plans(PIPELINE)[0])
    command = [sys.executable, "-m", "penstock", "train", str(plan), "--data", str(folder / "data"), "--out", str(out), "--json"]
    subprocess.run([*command, "--steps", "4"], check=True, stdout=subprocess.DEVNULL)
    lines, begun = (out / "steps.jsonl").read_bytes().count(b"\n"), time.perf_counter()
    with subprocess.Popen([*command, "--steps", "6", "--resume", str(out)], stdout=subprocess.DEVNULL) as process:
        while (out / "steps.jsonl").read_bytes().count(b"\n") <= lines and process.poll() is None:
            time.sleep(0.01)
        return time.perf_counter() - begun


def copy_cost(folder: Path, steps: int) -> float:
    """Share of its main thread's processor time that copies every ten steps take of a rank: the worst of them."""
    request = replace(_request(folder, scene_plans(PIPELINE)[0], folder / "cost", steps), on_death="recover", copies=10)
    with mock.patch("penstock.runtime.trainer.train_rank", train_counting):
        PlanTrainer(request).train()
    return max(float(path.read_text()) for path in Path(request.out).glob("copying-*"))


def train_counting(worker: Worker, request: TrainRequest, *given: Any) -> TrainResult:
    """A rank that writes down what its copies took of all that it did, its first steps and its start left out."""
    copying_s, begun_s, copy, train = 0.0, 0.0, RunSaves.copy, Run._train

    def counted_copy(saves: RunSaves, done: int) -> None:
        nonlocal copying_s
        before_s = time.thread_time()
        copy(saves, done)
        copying_s += time.thread_time() - before_s if done > WARM_UP else 0.0

    def counted_train(run: Run, *arguments: Any) -> Any:
        nonlocal begun_s
        begun_s = time.thread_time() if run.step == WARM_UP else begun_s
        return train(run, *arguments)

    with mock.patch.object(RunSaves, "copy", counted_copy), mock.patch.object(Run, "_train", counted_train):
        found = train_rank(worker, request, *given)
    (Path(request.out) / f"copying-{worker.rank}").write_text(str(copying_s / (time.thread_time() - begun_s)))
    return found


def soak(folder: Path, count: int, seed: int) -> None:
    """Random faults over one long paced training; what this process and the server that it forks from hold must not grow."""
    drawn, everything = random.Random(seed), [one for one in cases()[0] if one.victim.scene == PIPELINE]
    striker = Striker(folder / "soak", scene_plans(PIPELINE), (drawn.choice(everything) for _ in range(count)))
    request = replace(
        _request(folder, striker.plans[0], striker.out), device="paced", on_death="recover", copies=_COPIES, checkpoint_every=_EVERY
    )
    begun_s, told_of = time.monotonic(), -1

    def hear(told: StepReport) -> None:
        nonlocal told_of
        striker.hear(told)
        if len(striker.done) % max(1, count // 20) == 0 and len(striker.done) != told_of:
            told_of = len(striker.done)
            print(f"{told_of:5d} faults, step {told.step:6d}, {time.monotonic() - begun_s:6.0f} s: {_held()}", flush=True)

    try:
        PlanTrainer(request, obey_run, RunWitness(striker.out)).train(hear)
    finally:
        events = [event.event for event in read_events(striker.out)]
        print(f"{len(striker.done)} of {count} faults survived, {events.count('lost')} deaths, {events.count('shrunk')} shrunk; {_held()}")
    for line in [*striker.wrong, *_differences(request)] or ["all losses are those of a run without faults"]:
        print(line)


def _held() -> str:
    """Descriptors, threads and memory of this process and of the fork server, and how many processes that has started."""
    children = [int(one) for one in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    server = max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))
    parts = []
    for name, pid in (("launcher", os.getpid()), ("fork server", server)):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        held = len(os.listdir(f"/proc/{pid}/fd")), status["Threads"].strip(), int(status["VmRSS"].split()[0]) // 1024
        parts.append("{} {} descriptors, {} threads, {} MB".format(name, *held))
    forked = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return f"{', '.join(parts)}; {len(forked)} processes"


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no part: 1/4 to 4/4 are those of four")
    return int(number), int(parts)


def main() -> None:
    """Runs what is asked for, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--victims", nargs="+", default=[one.name for one in VICTIMS], choices=[one.name for one in VICTIMS])
    parser.add_argument("--pairs", action="store_true", help="a covering set of all that is asked for")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="of all that is asked for")
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S", help="begin no case after so many seconds")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces: nodes are addresses of the loopback device")
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="of a soak")
    parser.add_argument("--no-cost", action="store_true", help="leave cold starts and the cost of copies out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("PENSTOCK_STORE_KEY", secrets.token_hex(32))
    end_s = time.monotonic() + given.time_budget
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
        if given.soak:
            soak(folder, given.faults, given.seed)
            return
        spaces = may_make_spaces() and not given.loopback
        wanted, refused = cases(given.kinds, given.phases, given.victims, cuts_links=spaces)
        for why, some in refused.items():
            who = sorted({one.victim.name for one in some})
            print(f"{len(some)} make no sense ({', '.join(sorted({one.kind for one in some}))}; {', '.join(who)}): {why}")
        wanted = part_of(covering(wanted) if given.pairs else wanted, *given.part)
        survived, pauses, wrong, struck = 0, list[float](), list[str](), list[FaultCase]()
        for scene in (PIPELINE, TENSOR, NODES):
            of_scene = [one for one in wanted if one.victim.scene == scene]
            if not of_scene or time.monotonic() > end_s:
                continue
            own = _in_time(of_scene, end_s, struck)
            found = strike_nodes(folder, own, loopback=not spaces) if scene == NODES else matrix(folder, scene, own)
            survived, pauses, wrong = survived + found[0], pauses + found[1], wrong + found[2]
        for line in wrong:
            print(line)
        left = len(wanted) - len(struck)
        print(f"survived {survived} of {len(struck)}{f', {left} were not struck for lack of time' if left else ''}")
        usual = statistics.median(pauses) if pauses else 0.0
        print(f"from a death to the next step: median {usual:.2f} s, longest {max(pauses, default=0.0):.2f} s, {len(pauses)} times")
        if not given.no_cost:
            cold = cold_s(folder)
            print(f"a cold --resume: {cold:.2f} s, so that going on takes {usual / cold:.2f} of it")
            print(f"copies every 10 steps cost {copy_cost(folder, 102):.1%} of a rank's processor time")


if __name__ == "__main__":
    main()
