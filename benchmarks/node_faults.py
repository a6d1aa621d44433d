"""What a run on two nodes survives: four paced ranks, a supervisor on each node, started as launch files do.

    python benchmarks/node_faults.py                 the whole story
    python benchmarks/node_faults.py --loopback      without network namespaces

By the story in examples/faults/nodes.yaml a rank is killed, then node 1, which joins again; its link is cut, and it joins once more; it is
asked to leave (SIGTERM), and comes back; by the story the store is lost with node 0, and node 1 leads. The losses must be to the bit those
of a run on one machine that goes through the same plans, from each to the next through a checkpoint. As root, nodes are network namespaces
joined by a veth pair; else they are addresses of the loopback device, and no link is cut.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fault_cases import FaultCase

from penstock.adapting.asking import ask_for
from penstock.adapting.events import RunEvent, read_events
from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import read_plan, write_plan
from penstock.processes.states import is_stopped
from penstock.runtime.recovering.faults import FIRST_RANK, Fault, ask_fault
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_folder import last_step, plans_of_run
from penstock.runtime.telemetry.phases import COMMITTING, MOVING, RECOVERING
from penstock.runtime.telemetry.process_files import read_process
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer

LIMIT_S = 480.0
"""For each part of the story."""
_STORY = Path(__file__).parents[1] / "examples" / "faults" / "nodes.yaml"
_CLI = [sys.executable, "-m", "penstock"]
_SPACES, _ENDS = (f"penstock-{os.getpid()}-0", f"penstock-{os.getpid()}-1"), ("pen-node-0", "pen-node-1")


class Nodes:
    """Two places to start processes in, with an address each."""

    def __init__(self, spaces: bool, cores: Sequence[int]) -> None:
        """A node sees one of the cores: ranks that share a machine with others, or not, then have one thread each, and sums one order."""
        self.spaces, self._cores = spaces, cores
        # No namespace, no port of its own: addresses that no benchmark beside this one has.
        net = "10.231.79" if spaces else f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self.hosts = f"{net}.1", f"{net}.2"

    def start(self, node: int, words: list[str], folder: Path) -> subprocess.Popen[bytes]:
        """One command on a node."""
        inside = ["ip", "netns", "exec", _SPACES[node]] if self.spaces else []
        environment = os.environ | {"PENSTOCK_NODE_ADDRESS": self.hosts[node], "OMP_NUM_THREADS": "1"}
        with (folder / f"node-{node}.log").open("ab") as log:
            process = subprocess.Popen([*inside, *_CLI, *words], env=environment, stdout=log, stderr=log, cwd=folder)
        os.sched_setaffinity(process.pid, {self._cores[node % len(self._cores)]})
        return process

    def link(self, state: str) -> None:
        """Takes the link between both `up` or `down`."""
        subprocess.run(["ip", "-n", _SPACES[1], "link", "set", _ENDS[1], state], check=True)


def may_make_spaces() -> bool:
    """Whether this user may make network namespaces; root in a container may not."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", _SPACES[0]], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", _SPACES[0]], capture_output=True, check=False)
    return made


@contextmanager
def two_nodes(loopback: bool, cores: Sequence[int]) -> Iterator[Nodes]:
    """Namespaces where this user may make them; a core for each node."""
    if loopback or not may_make_spaces():
        yield Nodes(False, cores)
        return
    nodes = Nodes(True, cores)
    try:
        for space in _SPACES:
            subprocess.run(["ip", "netns", "add", space], check=True)
        ends = ["link", "add", _ENDS[0], "netns", _SPACES[0], "type", "veth", "peer", "name", _ENDS[1], "netns", _SPACES[1]]
        subprocess.run(["ip", *ends], check=True)
        for space, end, host in zip(_SPACES, _ENDS, nodes.hosts, strict=True):
            for words in (["address", "add", f"{host}/24", "dev", end], ["link", "set", end, "up"], ["link", "set", "lo", "up"]):
                subprocess.run(["ip", "-n", space, *words], check=True)
        yield nodes
    finally:
        for space in _SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False)


def await_(what: str, is_so: Callable[[], bool]) -> None:
    """Returns when it is so."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain for {LIMIT_S:.0f} s: {what}")
        time.sleep(0.05)


def told(out: Path, event: str) -> list[RunEvent]:
    """Events of a kind so far."""
    return [one for one in read_events(out) if one.event == event]


def story(nodes: Nodes, folder: Path, steps: int) -> Path:
    """Goes through it; the folder of the run. The store is struck when all else has been, whatever step that takes here."""
    out, disturb = folder / "run", folder / "story.yaml"
    lines = _STORY.read_text().splitlines(keepends=True)
    disturb.write_text("".join(line for line in lines if "kill: store" not in line))
    words = ["train", "plan.json", "--data", "data", "--steps", str(steps), "--out", str(out), "--device", "paced", "--adapt", "off",
             "--on-death", "recover", "--copies", "5", "--checkpoint-every", "0", "--disturb", str(disturb),
             "--master", f"{nodes.hosts[0]}:29733"]  # fmt: skip
    running = [nodes.start(node, [*words, "--node-rank", str(node)], folder) for node in (0, 1)]

    def further(count: int = 7) -> None:
        """Some steps are done."""
        begun = last_step(out)
        await_("steps", lambda: last_step(out) >= begun + count)

    def smaller() -> int:
        """How often a plan without node 1 was put in force: after it was lost, or before it left."""
        return len(told(out, "shrunk")) + len(told(out, "moved"))

    def without(number: int) -> None:
        await_("a plan without node 1", lambda: smaller() == number)
        running[-1].wait(LIMIT_S)

    def join() -> None:
        number = smaller()
        running.append(nodes.start(1, ["join", str(out), "--node-rank", "1"], folder))
        await_("a node that joins", lambda: len(told(out, "joined")) == number)
        further()

    try:
        await_("the first steps", lambda: out.is_dir() and last_step(out) > 7)
        without(1)
        join()
        if nodes.spaces:
            cut_s = time.time()
            nodes.link("down")
            await_("a plan without node 1", lambda: smaller() == 2)
            print(f"a link that was cut was noticed after {told(out, 'lost')[-1].time_s - cut_s:.2f} s")
            nodes.link("up")
            running[-1].wait()
            join()
        running[-1].terminate()  # SIGTERM to one of several: it leaves
        without(len(told(out, "joined")) + 1)
        join()
        ask_fault(out, Fault("kill", FIRST_RANK, "update", last_step(out) + 5, of_node=True))
        await_("node 1 to lead", lambda: any("leads now" in one.text for one in told(out, "lost")))
        further()
        running[-1].terminate()  # SIGTERM to the last: ends after the step that runs, with a checkpoint
        running[-1].wait(LIMIT_S)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return out


def strike_nodes(folder: Path, wanted: Iterable[FaultCase], *, loopback: bool) -> tuple[int, list[float], list[str]]:
    """Cases of nodes, each in a run of its own: how many were survived, the pauses, and what went wrong."""
    cores, survived, pauses, wrong = os.sched_getaffinity(0), 0, list[float](), list[str]()
    os.sched_setaffinity(0, {min(cores)})
    (folder / "two.yaml").write_text("nodes: [{device: cpu, gpus: 1, count: 2, inter: {bandwidth_gb_per_s: 1}}]\n")
    plan = uniform_plan("gpt-tiny", str(folder / "two.yaml"), global_batch=4, micro_batch=2, pp=2, layout="packed")
    write_plan(folder / "plan.json", plan)
    try:
        with two_nodes(loopback, sorted(cores)) as nodes:
            for number, case in enumerate(wanted):
                out = folder / f"nodes-{number}"
                try:
                    _strike_case(nodes, folder, out, case, plan)
                    found = [f"{case.name}: step {step} differs" for step in differences(folder, out)[:1]]
                except SystemExit as error:
                    found = [f"{case.name}: {error}", *(f"  {event.event} {event.text}" for event in read_events(out))]
                    found += [path.read_text()[-800:] for path in sorted(folder.glob("node-*.log"))]
                for path in folder.glob("node-*.log"):
                    path.unlink()
                print(f"  two nodes: {case.name}: {'; '.join(found) or 'survived'}", flush=True)
                survived += not found
                wrong += found
                pauses += [event.pause_s for event in read_events(out) if event.pause_s]
    finally:
        os.sched_setaffinity(0, cores)
    return survived, pauses, wrong


def _strike_case(nodes: Nodes, folder: Path, out: Path, case: FaultCase, plan: Plan) -> None:
    """One run on two nodes, each with one rank of its own number, that goes on after the fault."""
    words = ["train", "plan.json", "--data", "data", "--steps", "100000", "--out", str(out), "--device", "paced", "--adapt", "off",
             "--on-death", "recover", "--copies", "3", "--checkpoint-every", "4", "--master", f"{nodes.hosts[0]}:29733"]  # fmt: skip
    running = [nodes.start(node, [*words, "--node-rank", str(node)], folder) for node in (0, 1)]
    try:
        await_("the first steps", lambda: out.is_dir() and last_step(out) > 4)
        first = last_step(out) + 2
        _ask(out, case, first)
        if case.phase in (MOVING, COMMITTING):
            one, other = plan.stages
            stages = replace(one, last=one.last - 4, recompute=()), replace(other, first=one.last - 4, recompute=())
            ask_for(out, replace(plan, stages=stages, predicted=None), first + 3)  # all have seen the fault by then
        if case.kind == "cut":
            _cut_when_stopped(nodes, out, case.victim.nodes[0])
        await_("a plan for what is left", lambda: bool(told(out, "shrunk")))
        since = last_step(out)
        await_("steps under it", lambda: last_step(out) > since + 4)
        if case.kind == "cut":
            nodes.link("up")
        elif case.kind == "freeze":  # it goes on, and finds that it is not needed any more
            running[case.victim.nodes[0]].send_signal(signal.SIGCONT)
            await_("the end of one that stood still", lambda: running[case.victim.nodes[0]].poll() is not None)
            begun = last_step(out)
            await_("steps beside it", lambda: last_step(out) > begun + 4)
        left = running[1 - case.victim.nodes[0]]
        left.terminate()
        left.wait(LIMIT_S)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _ask(out: Path, case: FaultCase, first: int) -> None:
    """Leaves the faults of a case; a rank of the node itself stops where a link is to be cut."""
    node, phase = case.victim.nodes[0], case.phase
    for rank in case.victim.ranks or ((1 - node,) if phase == RECOVERING else ()):
        kind = case.kind if case.victim.ranks else "kill"
        ask_fault(out, Fault(kind, rank, "backward" if phase == RECOVERING else phase, first))  # type: ignore[arg-type]
    step = 0 if phase == RECOVERING else first
    if case.kind == "cut":
        ask_fault(out, Fault("freeze", node, phase, step))
    else:
        ask_fault(out, Fault(case.kind, node, phase, step, of_node=True))  # type: ignore[arg-type]


def _cut_when_stopped(nodes: Nodes, out: Path, rank: int) -> None:
    """Takes the link down while a rank stands still, and lets it go on before anybody minds."""
    found = []

    def is_there() -> bool:
        process = read_process(out, rank)
        if process is not None and is_stopped(process.pid):
            nodes.link("down")
            os.kill(process.pid, signal.SIGCONT)
            found.append(process)
        return bool(found)

    await_("a rank that stands still", is_there)


def differences(folder: Path, out: Path) -> list[int]:
    """Steps whose loss or samples are others than those of a run on one machine that goes through the same plans."""
    found, plans, calm = read_steps(out / "steps.jsonl"), plans_of_run(out), folder / f"{out.name}-calm"
    for (first, path), end in zip(plans.items(), [*plans, len(found)][1:], strict=True):
        request = TrainRequest(read_plan(path), str(folder / "data"), end, str(calm), checkpoint_every=0)
        PlanTrainer(request if not first else TrainRequest(**{**vars(request), "resume": str(calm)})).train()
    pairs = zip(found, read_steps(calm / "steps.jsonl"), strict=True)
    return [one.step for one, other in pairs if (one.step, one.loss, one.samples) != (other.step, other.loss, other.samples)]


def main() -> None:
    """Tells the story, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loopback", action="store_true")
    given = parser.parse_args()
    os.environ["PENSTOCK_STORE_KEY"] = secrets.token_hex(32)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name, two_nodes(given.loopback, sorted(cores)) as nodes:
        folder = Path(name)
        (folder / "two.yaml").write_text("nodes: [{device: cpu, gpus: 2, count: 2, inter: {bandwidth_gb_per_s: 1}}]\n")
        plan = uniform_plan("gpt-tiny", str(folder / "two.yaml"), global_batch=8, micro_batch=2, pp=2, dp=2, zero=1, layout="packed")
        write_plan(folder / "plan.json", plan)
        prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
        os.sched_setaffinity(0, {min(cores)})  # one thread for each rank, as on the nodes
        where = "two network namespaces joined by a veth pair" if nodes.spaces else "two supervisors on the loopback device: no root"
        print(where)
        try:
            out = story(nodes, folder, 100_000)
        except SystemExit:
            for path in sorted(folder.glob("node-*.log")):
                print(path.name, path.read_text()[-3000:])
            raise
        for event in read_events(out):
            print(f"step {event.step:5d}  {event.event:9s} {event.text}")
        wrong = differences(folder, out)
        print(f"{len(wrong)} of {last_step(out) + 1} steps differ from the same plans on one machine")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
