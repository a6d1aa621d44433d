"""What a node knows of a run that it leads in place of another: what is in the run's folder."""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from free_ports import free_port

from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.errors import InputError, PenstockError
from penstock.plans.build import uniform_plan
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.nodes import following, supervisor
from penstock.runtime.nodes.succession import LeaderLostError, LedBy
from penstock.runtime.nodes.supervisor import Supervisor, _NodeJoins
from penstock.runtime.recovering.copies import Copies, CopyPlace
from penstock.runtime.recovering.recovery import RunRecovery
from penstock.runtime.request import EvalRecord, GoingOn, NodePlace, StepReport, TrainRequest, TrainResult
from penstock.runtime.run_folder import put_in_force
from penstock.runtime.run_lock import run_lock
from penstock.runtime.telemetry.process_files import named_process
from penstock.runtime.workers import WorkerError


def test_steps_from_before_the_run_went_back_are_done_again(tmp_path: Path) -> None:
    """A run of 80 steps went back to the 50th, and did twelve of them again before the node that led was lost."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, pp=2)
    told = '"loss":1.0,"held_out_loss":{loss},"held_out_accuracy":0.5'
    lines = [f'{{"step":{step},"loss":1.0}}\n' for step in (*range(80), *range(50, 62))]
    lines[39] = f'{{"step":39,{told.format(loss=2.5)}}}\n'  # of the run that this one goes on with
    lines[59] = f'{{"step":59,{told.format(loss=9.5)}}}\n'  # done again, by other steps before it
    lines[-3] = f'{{"step":59,{told.format(loss=2.0)}}}\n'
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    put_in_force(tmp_path, 50, plan)
    request = TrainRequest(plan, "data", 100, str(tmp_path))
    recovery = RunRecovery(request, 50, None, (0, 1), None)
    nodes: Any = SimpleNamespace(ranks={0: (0,), 1: (1,)}, number=1, gone_ranks=lambda: ())
    taken: Any = SimpleNamespace(node=0, why="it is silent", has_left=False)
    found = Supervisor(request, 50, lambda: None)._taken_over(recovery, nodes, taken)
    assert found == GoingOn(50, False) and recovery.done == 62
    assert recovery.whole(TrainResult(50, 0, (), (), 0.0, 0.0, {}, None)).evaluated == (EvalRecord(60, 2.0, 0.5),)


def test_what_ended_a_run_is_told_though_its_folder_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rank, which its folder names no more, and in the launcher, which tidies the folder up."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with (
        run_lock(tmp_path) as lock, monkeypatch.context() as patched, pytest.raises(WorkerError, match="cannot be written"),
        supervisor._left_tidy(str(tmp_path), lock), named_process(tmp_path, 0, "cpu"),
    ):  # fmt: skip
        patched.setattr(Path, "unlink", refuse)
        raise WorkerError("the checkpoint cannot be written.")


def one_copy(step: int) -> Copies:
    """What the only rank of a run had learned after some steps."""
    copies = Copies(1)
    copies.save(0, step, CopyPlace(0, 0, 1), [TensorPiece("weights/w", (1,), ((0, 1),), torch.ones(1))], {})
    return copies


def test_what_ended_a_run_is_told_though_its_copies_cannot_be_written(tmp_path: Path) -> None:
    """As on a disk that is full, which may be what ended it."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2)
    request = TrainRequest(plan, "data", 100, str(tmp_path / "run"))
    put_in_force(request.out, 0, plan)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    supervisor = Supervisor(request, 0, lambda: None)
    found = supervisor._given_up(WorkerError("rank 0 was killed."), RunRecovery(request, 0, one_copy(5), (0,), None))
    assert isinstance(found, WorkerError) and re.fullmatch(
        r"rank 0 was killed\.\nThe copies of the last steps could not be written as a checkpoint: .*cannot hold checkpoints.*\n"
        r"No checkpoint had been written: there is nothing to go on from\. .*", str(found),
    )  # fmt: skip


def test_the_copies_of_nodes_whose_folder_is_gone_are_put_there_again(tmp_path: Path) -> None:
    """After the step that runs, once all nodes have ended their ranks and told what copies they have."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2)
    request = TrainRequest(plan, "data", 100, str(tmp_path / "run"))
    put_in_force(request.out, 0, plan)
    stopped = list[str]()

    def stop() -> list[WorkerError]:
        stopped.append("all")
        return []

    nodes: Any = SimpleNamespace(order=lambda *_: None, is_asked=False, stop=stop)
    planners: Any = SimpleNamespace(handover=None)

    def run(*_: Any, listen: Any, **__: Any) -> None:
        listen(0, StepReport(4, 1.0, 1.0))
        os.rename(request.out, tmp_path / "elsewhere")
        listen(0, StepReport(5, 1.0, 1.0))

    pool: Any = SimpleNamespace(members=(0,), has_failed=False, revive=lambda *_: None, run=run)
    heard, recovery = list[StepReport](), RunRecovery(request, 0, one_copy(5), (0,), None)
    supervisor = Supervisor(request, 0, lambda: None)
    with run_lock(tmp_path / "run") as lock, pytest.raises(PenstockError, match=r"run', or its lock, was removed.*\nStep 5 is safe"):
        supervisor._run(pool, planners, cast("Any", heard.append), recovery, nodes, None, lock)
    assert [one.step for one in heard] == [4] and stopped == ["all"]
    assert find_checkpoint(request.out).name.endswith("step-5")


def test_a_node_that_takes_the_lead_of_a_folder_that_it_cannot_write_saves_its_copies(tmp_path: Path) -> None:
    """As after any death: here the plans of the run are damaged."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2)
    request = TrainRequest(plan, "data", 100, str(tmp_path / "run"))
    put_in_force(request.out, 0, plan)
    (tmp_path / "run" / "plans" / "00000000.json").write_text("{}")
    nodes: Any = SimpleNamespace(ranks={0: (1,), 1: (0,)}, number=1, gone_ranks=lambda: ())
    taken: Any = SimpleNamespace(node=0, why="it is silent", has_left=False)
    recovery = RunRecovery(request, 0, one_copy(5), (0, 1), None)
    words = r"(?s)^node 0 is lost, with rank 1: it is silent\. Node 1 leads now\.\nTraining cannot go on: .*\nStep 5 is safe"
    with pytest.raises(WorkerError, match=words):
        Supervisor(request, 0, lambda: None)._taken_over(recovery, nodes, taken)


def test_a_node_leads_when_the_one_that_took_the_lead_is_lost_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody has found it, or after it has told nobody yet what to start: what this node did under the first one still counts."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, pp=2)
    place = NodePlace(2, "127.0.0.1", free_port(), "127.0.0.3")
    request = TrainRequest(plan, "data", 100, str(tmp_path), on_death="recover", node=place)
    with pytest.raises(LeaderLostError, match="does not answer"):
        following._called(place, b"k" * 32, 0.0, has_led=True)
    with pytest.raises(InputError, match="does not answer"):
        following._called(place, b"k" * 32, 0.0, has_led=False)
    start: Any = SimpleNamespace(nodes={0: 0, 1: 0, 2: 0}, members=(0, 1, 2))
    called, terms = list[Any](), list[int]()

    class Following(following.FollowingNode):
        """Goes through it: the first leader is lost, the second before it is met, the third before it tells anything."""

        def __init__(self, *given: Any) -> None:
            called.append(given[-1])
            if len(called) == 2:
                raise LeaderLostError("the node that leads does not answer.")
            self._place, self.address, self.started = place, "127.0.0.3", start if len(called) == 1 else given[-1]
            self._channel: Any = SimpleNamespace(who="the node that leads", close=lambda: None)
            self._mirror = self._server = None

        def follow(self, *_: Any) -> int:
            raise LeaderLostError("the node that leads has ended the connection.")

    def succeeded(folder: str, own: int, term: int, why: str) -> Any:
        terms.append(term)
        return (ExitStack(), None) if len(terms) == 3 else LedBy(1, "10.0.0.2", 1, len(terms), (1, 2))

    monkeypatch.setattr(supervisor, "FollowingNode", Following)
    monkeypatch.setattr(supervisor, "succeed", succeeded)
    monkeypatch.setattr(supervisor, "ranks_here", lambda _: (2,))
    monkeypatch.setattr(supervisor, "threads_here", lambda *_: 1)
    monkeypatch.setattr(supervisor, "node_facts", lambda *_: {})
    monkeypatch.setattr(supervisor, "node_key", lambda: b"")
    monkeypatch.setattr(Supervisor, "_pool", lambda *_: nullcontext())
    monkeypatch.setattr(Supervisor, "_lead", lambda self, copies, progress, taken, lock: taken)
    taken: Any = Supervisor(request, 0, lambda: None)._follow(place, None, None)
    assert called == [None, start, start] and terms == [0, 1, 2]
    assert (taken.node, taken.term, taken.members, taken.expected) == (1, 3, (0, 1, 2), ())


@pytest.mark.parametrize("ended", [_NodeJoins(), WorkerError("rank 0: Connection reset by peer", (0,), is_lost=True)])
def test_a_node_that_is_lost_while_ranks_end_is_told_of_and_done_without(ended: Any, tmp_path: Path) -> None:
    """So that another can join, or since they only know that a peer went away: nobody then waits for ranks of a node that is gone."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, pp=2)
    request = TrainRequest(plan, "data", 100, str(tmp_path))
    put_in_force(tmp_path, 0, plan)
    recovery = RunRecovery(request, 0, None, (0, 1, 2), RunWitness(tmp_path))
    lost = WorkerError("node 2 is lost, with rank 2", (2,), is_lost=True)
    nodes: Any = SimpleNamespace(stop=lambda: [lost], gone_ranks=lambda: (2,), admit=lambda: pytest.fail("it joins later"))
    assert Supervisor(request, 0, lambda: None)._after(ended, recovery, nodes) == GoingOn(0, False)
    assert recovery.members == (0, 1) and [one.text for one in read_events(tmp_path)] == ["node 2 is lost, with rank 2"]
