"""Where a run goes on from after a death, and when it gives up; without a process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.runtime.checkpoints.folder import step_of, whole_checkpoints
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.recovering import recovery
from penstock.runtime.recovering.copies import Copies, CopyPlace
from penstock.runtime.recovering.recovery import RunRecovery, require_room_for_copies
from penstock.runtime.request import EvalRecord, GoingOn, StepReport, TrainRequest, TrainResult
from penstock.runtime.run_folder import own_folder, plan_of_run, plans_of_run, put_in_force, safe_step

PLAN = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, pp=2)
SMALLER = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2)


class Witness:
    """Knows one smaller plan, or none."""

    def __init__(self, smaller: Plan | None = None) -> None:
        self.smaller, self.told, self.pauses_s = smaller, list[tuple[str | int, ...]](), list[float]()

    def tell(self, event: str, step: int, text: str, *, ranks: Sequence[int] = (), pause_s: float | None = None) -> None:
        self.told.append((event, step, *ranks))
        self.pauses_s += [] if pause_s is None else [pause_s]

    def smaller_plan(self, plan: Plan, lost: Sequence[int], devices: Sequence[int]) -> Plan:
        if self.smaller is None:
            raise InfeasibleError("none")
        return self.smaller


def followed(tmp_path: Path, witness: Witness | None = None, first_step: int = 0) -> tuple[RunRecovery, Copies]:
    copies, request = Copies(2), TrainRequest(PLAN, "data", 100, str(tmp_path))
    put_in_force(tmp_path, first_step, PLAN)
    return RunRecovery(request, first_step, copies, (0, 1), witness), copies


def copy(copies: Copies, step: int, processes: range = range(2)) -> None:
    for own in processes:
        piece = TensorPiece("weights/w", (2,), ((own, own + 1),), torch.tensor([float(step)]))
        copies.save(own, step, CopyPlace(0, own, 2), [piece], {"optimizer": "adamw"})


def save(tmp_path: Path, step: int) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(step, [TensorPiece("weights/w", (2,), ((0, 2),), torch.zeros(2))], {})
    writer.wait()


def test_the_newest_of_copies_and_checkpoints_counts(tmp_path: Path) -> None:
    run, copies = followed(tmp_path, first_step=2)
    assert run.go_on([0], "dead") == GoingOn(2, False) and not run.request.resume
    run.hear(StepReport(2, 1.0, 1.0))
    save(tmp_path, 10)
    assert run.go_on([0], "dead") == GoingOn(10, False) and run.request.resume.endswith("step-10")
    copy(copies, 20)
    copy(copies, 30, range(1))
    run.hear(StepReport(20, 1.0, 1.0))
    assert run.go_on([0], "dead") == GoingOn(20, True)
    copy(copies, 100)  # the last step, after which there is nothing left to tell
    run.hear(StepReport(21, 1.0, 1.0))
    assert run.go_on([0], "dead") == GoingOn(20, True)


def test_a_death_after_the_last_checkpoint_goes_back_to_the_one_before_it(tmp_path: Path) -> None:
    """The last one has nothing left to train, and what the run came to is still to be told."""
    run, _ = followed(tmp_path)
    save(tmp_path, 90)
    save(tmp_path, 100)
    run.hear(StepReport(99, 1.0, 1.0))
    assert run.go_on([0], "dead") == GoingOn(90, False) and run.request.resume.endswith("step-90")


def test_what_was_left_for_an_earlier_checkpoint_is_not_gone_back_to(tmp_path: Path) -> None:
    """Neither by the launcher that began nor by one that leads in its place: that checkpoints were left is in the folder."""
    save(tmp_path, 50)
    save(tmp_path, 80)
    begun = tmp_path / "checkpoints" / "save-000001-step-50"
    request = TrainRequest(PLAN, "data", 100, str(tmp_path), resume=str(begun))
    with own_folder(request, 50):
        pass
    copies = Copies(2)
    for _ in range(2):
        run = RunRecovery(request, 50, copies, (0, 1), None)
        assert run.go_on([1], "dead") == GoingOn(50, False) and run.request.resume == str(begun)
    copy(copies, 60)
    assert run.go_on([0], "dead") == GoingOn(60, True)
    assert "Step 50 is safe" in safe_step(request, 50)
    run.save_copies()
    assert "Step 60 is safe" in safe_step(request, 50) and Checkpoint(tmp_path).step == 60


def test_steps_of_the_runs_before_are_not_taken_over(tmp_path: Path) -> None:
    run, _ = followed(tmp_path, first_step=2)
    run.take_over((StepReport(step, float(step), 1.0) for step in range(4)), PLAN)
    assert run.done == 4 and run.whole(TrainResult(0, 0, (), (), 0.0, 0.0, {}, None)).losses == (2.0, 3.0)


def test_a_rank_that_dies_twice_before_one_step_is_left_out(tmp_path: Path) -> None:
    witness = Witness(SMALLER)
    run, copies = followed(tmp_path, witness)
    for step in range(5):
        run.hear(StepReport(step, 1.0, 1.0))
    copy(copies, 4)
    assert run.go_on([1], "dead") == GoingOn(4, True) and run.members == (0, 1)
    assert run.hear(StepReport(4, 1.0, 1.0)) is None  # it is told already
    assert run.go_on([1], "dead") == GoingOn(4, True) and run.members == (0,) and run.request.plan == SMALLER
    assert plan_of_run(tmp_path) == SMALLER and list(plans_of_run(tmp_path)) == [0, 4]
    new = run.hear(StepReport(5, 1.0, 1.0, notes=("besides",)))
    assert new is not None and [note[:26] for note in new.notes] == ["rank 1 has another process", "rank 1 is left out, a plan", "besides"]
    assert witness.told == [("lost", 5, 1), ("replaced", 4, 1), ("lost", 5, 1), ("shrunk", 5, 1)]


@pytest.mark.parametrize("lost_peer", [False, True])
def test_a_rank_that_lost_a_peer_is_not_broken(tmp_path: Path, lost_peer: bool) -> None:
    """Neither one that also died nor one that did so twice: its neighbours may have been cut off, one after the other."""
    run, copies = followed(tmp_path, Witness(SMALLER))
    for step in range(5):
        run.hear(StepReport(step, 1.0, 1.0))
    copy(copies, 4)
    assert run.go_on([1], "first", lost_peer=lost_peer) and run.go_on([1], "Connection reset by peer", lost_peer=True)
    assert run.members == (0, 1)


def test_it_gives_up_after_three_and_counts_anew_after_a_new_step(tmp_path: Path) -> None:
    run, copies = followed(tmp_path, Witness())
    run.hear(StepReport(0, 1.0, 1.0))
    assert run.go_on([0], "dead") and run.go_on([1], "dead")
    assert run.hear(StepReport(1, 1.0, 1.0)) is not None and run.hear(StepReport(1, 1.0, 1.0)) is None
    assert run.go_on([0], "dead") and run.go_on([0], "dead") and run.members == (0, 1)
    assert run.go_on([0], "dead") is None and run.gave_up.startswith("3 deaths came before step 2 was done")
    copy(copies, 1)
    save(tmp_path, 0)
    run.save_copies()
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("save-*"))] == ["save-000001-step-0", "save-000002-step-1"]


def test_it_goes_on_without_machines_that_are_lost_one_after_the_other_while_there_is_a_plan(tmp_path: Path) -> None:
    """As with a switch: what is gone cannot die again. Where there is no plan for what is left, it says so."""
    witness = Witness(SMALLER)
    run, _ = followed(tmp_path, witness)
    run.members = tuple(range(6))
    for rank in (5, 4, 3, 2):
        assert run.go_on([rank], "lost", gone=range(rank, 6)) == GoingOn(0, False)
    assert run.members == (0, 1)
    witness.smaller = None
    run.request = replace(run.request, plan=PLAN)
    assert run.go_on([1], "lost", gone=range(1, 6)) is None and run.gave_up == "none"


def test_a_machine_that_is_lost_is_left_out_at_once_and_comes_back_with_the_first_plan(tmp_path: Path) -> None:
    """If all devices of that are there again: one of another machine does not do."""
    witness = Witness(SMALLER)
    run, copies = followed(tmp_path, witness)
    for step in range(5):
        run.hear(StepReport(step, 1.0, 1.0))
    copy(copies, 4)
    assert run.go_on([1], "dead", gone=[1]) == GoingOn(4, True) and (run.members, run.request.plan) == ((0,), SMALLER)
    run.hear(StepReport(5, 1.0, 1.0))
    assert run.join([2]) == GoingOn(4, True) and (run.members, run.request.plan) == ((0, 2), SMALLER)
    assert run.join([1]) == GoingOn(4, True) and (run.members, run.request.plan) == ((0, 1, 2), PLAN)
    new = run.hear(StepReport(6, 1.0, 1.0))
    assert new is not None and "ranks 1-2 are there, a plan of ranks 0-1 is in force. Training went on from step 4" in new.notes[0]
    run.part_with([2], "it left.")
    assert run.members == (0, 1) and witness.told[-2:] == [("joined", 6, 1, 2), ("left", 7, 2)]
    assert followed(tmp_path, Witness())[0].go_on([1], "dead", gone=[1]) is None  # no plan does without it


def test_a_pause_begins_with_the_first_of_several_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    witness = Witness()
    run, _ = followed(tmp_path, witness)
    assert run.go_on([0], "dead") and run.go_on([1], "dead")
    run.hear(StepReport(0, 1.0, 1.0))
    assert witness.told == [("lost", 0, 0), ("lost", 0, 1), ("replaced", 0, 0, 1)] and witness.pauses_s == [30.0]


def test_evaluations_of_processes_that_died_are_part_of_the_result_and_as_many_checkpoints_stay_as_asked_for(tmp_path: Path) -> None:
    run, copies = followed(tmp_path)
    evaluated = [EvalRecord(step + 1, 2.0 - step, 0.5) for step in range(2)]
    for step in range(4):
        run.hear(StepReport(step, 1.0, 1.0, evaluated=evaluated[step] if step < 2 else None))
    last = TrainResult(2, 2, (1.0,) * 2, (), 0.0, 0.0, {}, None)
    assert run.whole(last).evaluated == tuple(evaluated) and run.whole(last).num_steps == 4
    save(tmp_path, 1)
    save(tmp_path, 2)
    copy(copies, 4)
    run.request = replace(run.request, keep=3)
    run.save_copies()
    assert [step_of(path) for path in whole_checkpoints(tmp_path / "checkpoints")] == [1, 2, 4]


def test_plans_of_steps_that_are_done_again_are_forgotten(tmp_path: Path) -> None:
    run, copies = followed(tmp_path)
    copy(copies, 4)
    put_in_force(tmp_path, 6, SMALLER)
    run.adopted(SMALLER)
    assert run.go_on([0], "dead") == GoingOn(4, True)
    assert list(plans_of_run(tmp_path)) == [0, 4] and plan_of_run(tmp_path) == SMALLER


def test_copies_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_free_bytes", lambda: 100_000)
    with pytest.raises(InputError, match=r"have learned take 0\.0\d+ GB, but this machine has 0\.0001 GB of memory left. Use --copies 0"):
        require_room_for_copies(TrainRequest(PLAN, "data", 1, "run"), model_of(PLAN))
    needed = 2 * 3 * 4 * model_of(PLAN).num_parameters  # two copies of weights and both moments in fp32
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(recovery, "_free_bytes", lambda free=free: free)
        with nullcontext() if fits else pytest.raises(InputError, match="Use --copies 0"):
            require_room_for_copies(TrainRequest(PLAN, "data", 1, "run"), model_of(PLAN))
    monkeypatch.undo()
    require_room_for_copies(TrainRequest(PLAN, "data", 1, "run"), model_of(PLAN))


def test_memory_that_is_left_is_what_may_still_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others hold is none, nor is what a container may not take of its machine's."""
    monkeypatch.setattr(recovery, "Path", lambda name: tmp_path / name.rpartition("/")[2])
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\n")
    assert recovery._free_bytes() == 500 * 1024
    for limit, used, free in (("300000", "100000", 200_000), ("9000000", "100000", 500 * 1024), ("max", "100000", 500 * 1024)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
        assert recovery._free_bytes() == free
