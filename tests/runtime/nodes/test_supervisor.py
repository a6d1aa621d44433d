"""What a node knows of a run that it leads in place of another: what is in the run's folder."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.plans.build import uniform_plan
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.nodes.supervisor import Supervisor, _NodeJoins
from penstock.runtime.recovering.copies import Copies, CopyPlace
from penstock.runtime.recovering.recovery import RunRecovery
from penstock.runtime.request import GoingOn, TrainRequest
from penstock.runtime.run_folder import put_in_force
from penstock.runtime.workers import WorkerError


def test_steps_from_before_the_run_went_back_are_done_again(tmp_path: Path) -> None:
    """A run of 80 steps went back to the 50th, and did twelve of them again before the node that led was lost."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, pp=2)
    lines = [f'{{"step":{step},"loss":1.0}}\n' for step in (*range(80), *range(50, 62))]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    put_in_force(tmp_path, 50, plan)
    request = TrainRequest(plan, "data", 100, str(tmp_path))
    recovery = RunRecovery(request, 50, None, (0, 1), None)
    nodes: Any = SimpleNamespace(ranks={0: (0,), 1: (1,)}, number=1, gone_ranks=lambda: ())
    taken: Any = SimpleNamespace(node=0, why="it is silent", has_left=False)
    found = Supervisor(request, 50, lambda: None)._taken_over(recovery, nodes, taken)
    assert found == GoingOn(50, False) and recovery.done == 62


def test_what_ended_a_run_is_told_though_its_copies_cannot_be_written(tmp_path: Path) -> None:
    """As on a disk that is full, which may be what ended it."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2)
    request = TrainRequest(plan, "data", 100, str(tmp_path / "run"))
    copies = Copies(1)
    copies.save(0, 5, CopyPlace(0, 0, 1), [TensorPiece("weights/w", (1,), ((0, 1),), torch.ones(1))], {})
    put_in_force(request.out, 0, plan)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    supervisor = Supervisor(request, 0, lambda: None)
    found = supervisor._given_up(WorkerError("rank 0 was killed."), RunRecovery(request, 0, copies, (0,), None))
    assert isinstance(found, WorkerError) and re.fullmatch(
        r"rank 0 was killed\.\nThe copies of the last steps could not be written as a checkpoint: .*cannot hold checkpoints.*\n"
        r"No checkpoint had been written: there is nothing to go on from\. .*", str(found),
    )  # fmt: skip


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
