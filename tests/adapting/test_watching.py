"""What is noticed in running jobs: processes on paced devices, whose times are exact however busy the machine is; and figures made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.adapting.asking import ask_for, withdraw
from penstock.adapting.events import EVENTS, RunEvent, read_events
from penstock.adapting.moves import Moves, moves
from penstock.adapting.moving import MoveAbortedError
from penstock.adapting.watching import Watch, watch_run
from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.trainer import PlanTrainer
from penstock.timing.disturbance import Disturbance, DisturbanceChange

SOON = 12
"""Steps within which a change has to be noticed."""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Four stages on devices that keep no rank waiting."""
    (tmp_path / "four.yaml").write_text(
        "devices: [{name: swift, memory_gb: 8, memory_bandwidth_gb_per_s: 900, fp32_tflops: 9}]\nnodes: [{device: swift, gpus: 4}]\n",
        encoding="utf-8",
    )
    return uniform_plan("gpt-tiny", str(tmp_path / "four.yaml"), global_batch=4, micro_batch=1, pp=4, layout="packed", precision="fp32")


def trained(plan: Plan, data: str, out: Path, steps: int, *changes: DisturbanceChange) -> tuple[list[RunEvent], list[str]]:
    """The events of a run, and the notes in its terminal but for those on its pace."""
    notes: list[str] = []

    def told(step: StepReport) -> None:
        notes.extend(note for note in step.notes if "paced devices" not in note)

    request = TrainRequest(
        plan, data, steps, str(out), device="paced", checkpoint_every=0, disturbance=Disturbance(changes), planning=PlanningSettings(1)
    )
    PlanTrainer(request, watch_run).train(told)
    return list(read_events(out)), notes


def test_a_rank_that_is_slow_for_a_while_is_named_and_so_is_its_end(plan: Plan, data: str, tmp_path: Path) -> None:
    """And nothing else is: not before, where nothing happens though samples differ, and not after."""
    events, notes = trained(plan, data, tmp_path / "run", 34, DisturbanceChange((2,), 2.0, "pulse", 12, 10))
    slow, fast = (event for event in events if event.event == "noticed")
    assert events[0] is slow and {event.event for event in events} == {"noticed", "decided"}
    assert (slow.cause, slow.ranks, slow.since) == ("compute", (2,), 12) and slow.factor == pytest.approx(2.0, rel=0.01)
    assert 12 <= slow.step < 22 <= fast.step < 22 + SOON
    assert (fast.cause, fast.ranks, fast.since) == ("compute", (2,), 22) and fast.factor == pytest.approx(1.0, rel=0.05)
    assert notes == ["rank 2 has computed 2x slower than the others since step 12.",
                     "rank 2 has computed as fast as the others again since step 22."]  # fmt: skip
    decisions = [event for event in events if event.event == "decided"]
    assert next(one for one in decisions if one.step == slow.step).alternatives[0].remedy == "nothing"
    best = max(decisions, key=lambda one: one.gain_s or 0.0)
    assert best.gain_s and "expected steps" in best.text and decisions[-1].step >= fast.step and not decisions[-1].moves


def test_a_rank_that_is_slow_from_the_first_step_on(plan: Plan, data: str, tmp_path: Path) -> None:
    events, _ = trained(plan, data, tmp_path / "run", 8, DisturbanceChange((3,), 1.5))
    (slow,) = (event for event in events if event.event == "noticed")
    assert (slow.cause, slow.ranks, slow.since, slow.step) == ("compute", (3,), 0, 4) and slow.factor == pytest.approx(1.5, rel=0.01)


def test_a_link_is_named_and_not_a_rank(plan: Plan, data: str, tmp_path: Path) -> None:
    events, _ = trained(plan, data, tmp_path / "run", 34, DisturbanceChange((2, 1), 400.0, "pulse", 12, 8))
    slow, fast = (event for event in events if event.event == "noticed")
    assert (slow.cause, slow.ranks) == ("link", (1, 2)) and slow.factor == pytest.approx(400.0, rel=0.01)
    assert 12 <= slow.step < 20 and slow.text.startswith("messages between ranks 1 and 2 have been 400x slower than predicted")
    assert (fast.cause, fast.ranks) == ("link", (1, 2)) and 20 <= fast.step < 20 + SOON and fast.factor == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("cores", "ranks", "is_watched"), [(False, 999, True), (True, 999, False), (True, 1, True)])
def test_ranks_that_share_cores_are_not_watched(plan: Plan, tmp_path: Path, cores: bool, ranks: int, is_watched: bool) -> None:
    request = TrainRequest(plan, "", 1, str(tmp_path / "run"))
    rank = SimpleNamespace(plan=plan)
    run = SimpleNamespace(
        computes_on_cores=cores, members=range(ranks), request=request, step=0, is_first=True, is_new=True, goes_on=False, rank=rank
    )
    with closing(watch_run(run)) as watcher:  # type: ignore[arg-type]
        assert watcher.measures == is_watched == (tmp_path / "run" / EVENTS).exists()


def watched(plan: Plan, out: Path, steps: Mapping[int, Mapping[int, RankFigures]]) -> list[RunEvent]:
    watch = Watch(plan, out)
    for step, ranks in steps.items():
        watch.after(step, ranks)
    watch.close()
    return list(read_events(out))


def test_all_ranks_slow_alike_means_that_the_costs_are_off(plan: Plan, tmp_path: Path) -> None:
    ranks = {rank: RankFigures(1.4, 1.0, step_s=5.0) for rank in range(4)}
    (event,) = watched(plan, tmp_path, dict.fromkeys(range(60), ranks))
    assert (event.cause, event.ranks) == ("costs", ()) and event.factor == pytest.approx(1.4)
    assert event.text == "all ranks have computed 1.4x slower than the costs say since step 0; no plan would help"


@pytest.mark.parametrize(("cause", "who"), [("data", [(0,), (1,), (2,), (3,)]), ("planning", [()])])
def test_waits_are_told_also_where_all_ranks_wait(plan: Plan, tmp_path: Path, cause: str, who: list[tuple[int, ...]]) -> None:
    def figures(wait_s: float) -> RankFigures:
        return RankFigures(1.0, 1.0, step_s=5.0 + wait_s, **{f"{cause}_wait_s": wait_s})

    steps = {step: {rank: figures(2.5 if step >= 20 else 0.0) for rank in range(4)} for step in range(40)}
    events = watched(plan, tmp_path, steps)
    assert sorted(event.ranks for event in events) == who and {event.cause for event in events} == {cause}
    assert all(event.since == 20 and event.step < 20 + SOON and event.factor == pytest.approx(1.5) for event in events)


def test_a_host_that_issues_work_late_is_named_in_place_of_its_device(plan: Plan, tmp_path: Path) -> None:
    """Rank 2 takes twice as long: from step 20 on for what its host does, from step 60 on for what its device does."""
    def figures(rank: int, step: int) -> RankFigures:
        slow, by_host = rank == 2 and step % 40 >= 20, step < 40
        return RankFigures(2.0 if slow else 1.0, 1.0, step_s=9.0, host_s=(1.95 if slow and by_host else 0.8 if rank else 0.99))

    events = watched(plan, tmp_path, {step: {rank: figures(rank, step) for rank in range(4)} for step in range(95)})
    told = [(event.cause, event.ranks, event.since) for event in events if event.event == "noticed"]
    assert told == [("host", (2,), 20), ("host", (2,), 40), ("compute", (2,), 60), ("compute", (2,), 80)]
    assert "rank 2's host has been 2x slower than the others since step 20" in {event.text for event in events}
    decision = next(event for event in events if event.event == "decided")
    assert len(decision.alternatives) > 1 and decision.alternatives[0].remedy == "nothing"  # it can be relieved of ops all the same


def test_a_rank_is_judged_by_steps_after_costs_were_opened(plan: Plan, tmp_path: Path) -> None:
    """One noisy step is no level: five are needed, and those before did not count."""
    unknown, calm = RankFigures(1.0, step_s=9.0), RankFigures(1.0, 1.0, step_s=9.0)
    steps = {step: {rank: calm if step >= 4 else unknown for rank in range(4)} for step in range(20)}
    assert watched(plan, tmp_path, steps | {4: dict.fromkeys(range(3), calm) | {3: RankFigures(3.0, 1.0, step_s=9.0)}}) == []


def test_ranks_without_a_prediction_raise_no_alarm(plan: Plan, tmp_path: Path) -> None:
    ranks = {rank: RankFigures(1.0 + rank, step_s=9.0) for rank in range(4)}
    assert watched(plan, tmp_path, dict.fromkeys(range(60), ranks)) == []


class Job:
    """A job in one process: figures are what a paced job would have, and moves are made up."""

    def __init__(self, plan: Plan, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.plan, self.failure = out, plan, ""
        self.watch, self.moves, self.step = Watch(plan, out, members=range(4), moves=True, num_steps=500), list[int](), 0
        self._left: dict[int, float] = {}
        monkeypatch.setattr("penstock.adapting.watching.move", self._move)

    def _move(self, rank: object, plan: Plan, step: int, prepare: Callable[[], object], members: object) -> Moves:
        if self.failure:
            raise MoveAbortedError(self.failure)
        return moves(self.plan, plan)

    def run(self, steps: int, factors: Mapping[int, float] | None = None) -> None:
        """These steps, with ranks that take so many times as long; one without work tells what a probe takes."""
        slower = dict.fromkeys(range(4), 1.0) | dict(factors or {})
        for _ in range(steps):
            working = set(self.plan.ranks)
            self._left = {rank: self._left.get(rank, slower[rank]) for rank in range(4) if rank not in working}
            figures = {rank: RankFigures(slower[rank], self._left.get(rank, 1.0), step_s=9.0) for rank in range(4)}
            self.step += 1
            order = self.watch.order(self.step)
            self.watch.after(self.step - 1, figures)
            if order is not None and self.watch.move(None, order, self.step, lambda: None):  # type: ignore[arg-type]
                self.plan = order
                self.watch.moved(self.step, order, 0.5)
                self.moves.append(self.step)

    def events(self, *kinds: str) -> list[RunEvent]:
        """Those of some kinds, so far."""
        self.watch.close()
        self.watch._events = None
        return [event for event in read_events(self.out) if event.event in kinds]


def test_a_device_that_was_left_out_comes_back_when_it_is_fast_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no passes that could be measured meanwhile: a probe tells."""
    job = Job(uniform_plan("gpt-tiny", "4xa100-40gb", global_batch=16, micro_batch=1, pp=4), tmp_path, monkeypatch)
    job.run(12)
    job.run(40, {2: 30.0})
    assert len(job.moves) == 1 and 2 not in job.plan.ranks
    assert [event.remedy for event in job.events("moved")] == ["eviction"]
    job.run(80)
    assert set(job.plan.ranks) == {0, 1, 2, 3}
    assert [event.factor for event in job.events("noticed")] == pytest.approx([30.0, 1.0], rel=0.05)
    assert [event.remedy for event in job.events("moved")][:2] == ["eviction", "addition"]


def test_shares_of_a_run_before_are_thought_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was slow then is not any more when the run is resumed; nothing changes in it that could be noticed."""
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", global_batch=64, micro_batch=1, replicas=4)
    job = Job(replace(plan, micro_batching=MicroBatching("padded", "dynamic", slower=((2, (3.0,) * 3),))), tmp_path, monkeypatch)
    job.run(20)
    assert not job.plan.micro_batching.slower and [event.remedy for event in job.events("moved")] == ["shares"]


def test_a_move_that_was_aborted_is_not_tried_again_at_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(plan, tmp_path, monkeypatch)
    job.failure = "process 1 has no disk."
    job.run(12)
    job.run(60, {2: 3.0})
    first = job.events("aborted")
    assert not job.moves and job.plan == plan and 1 <= len(first) <= 4 and {event.status for event in first} == {1}
    assert "the plan stays as it is: process 1 has no disk" in first[0].text
    job.failure = ""
    job.run(60, {2: 6.0})  # something else
    assert len(job.moves) == 1


def test_who_asks_is_answered_and_has_the_last_word(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worse plan stays, though nothing is slow, and so does one that comes later or was withdrawn; one that cannot be is refused."""
    alone = uniform_plan("gpt-tiny", str(tmp_path / "four.yaml"), global_batch=4, micro_batch=1, layout="packed", precision="fp32")
    job = Job(plan, tmp_path, monkeypatch)
    job.run(3)
    now = ask_for(tmp_path, alone)
    with pytest.raises(InputError, match="has been asked for a move that is still to come"):
        ask_for(tmp_path, plan)
    job.run(20)
    assert (job.plan, job.moves) == (alone, [4])
    later = ask_for(tmp_path, plan, 30)
    job.run(4)
    withdraw(tmp_path)
    job.run(10)
    assert job.plan == alone and job.step > 30
    wrong = {
        "--at is 500, but the last step of the run is 499": plan,
        "seq_length is 64 in the new plan, but 128 in the old one": replace(plan, seq_length=64),
        "precision is 'bf16' in the new plan, but 'fp32' in": replace(plan, precision="bf16"),
        "--at is 5, but step": plan,
    }
    for message, other in wrong.items():
        request = ask_for(tmp_path, other, int(message.split()[2][:-1]) if message.startswith("--at") else 0)
        job.run(1)
        told = job.events("aborted")[-1]
        assert message in told.text and (told.status, told.request) == (2, request) and job.plan == alone
    (tmp_path / "replan.json").write_text("{}", encoding="utf-8")
    with monkeypatch.context() as patched:  # who is refused may ask for another at once
        log, left = Watch._log, list[bool]()
        patched.setattr(Watch, "_log", lambda *given: (left.append((tmp_path / "replan.json").exists()), log(*given)))
        job.run(2)
    assert left == [False]
    assert "replan.json" in job.events("aborted")[-1].text and not (tmp_path / "replan.json").exists()
    assert [(event.event, event.request) for event in job.events("asked", "moved")] == [("asked", now), ("moved", now), ("asked", later)]


def test_a_plan_that_cannot_be_run_or_has_no_room_is_not_moved_to(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = uniform_plan("gpt-tiny", str(tmp_path / "four.yaml"), global_batch=4, micro_batch=1, layout="packed", precision="fp32")

    def no_room(*_: object) -> None:
        raise InfeasibleError("it does not fit.")

    job = Job(plan, tmp_path, monkeypatch)
    for name, check, words, status in (
        ("unsupported", lambda plan, model: ["it has wheels"], "the plan cannot be run: it has wheels", 2),
        ("require_memory", no_room, "it does not fit", 3),
    ):
        ask_for(tmp_path, alone)
        with monkeypatch.context() as patched:
            patched.setattr(f"penstock.adapting.watching.{name}", check)
            job.run(2)
        told = job.events("aborted")[-1]
        assert words in told.text and told.status == status and job.plan == plan and not job.moves


def test_that_nobody_knows_what_could_be_done_is_said_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first rank that is slow, and not of the next one again."""

    def unknown(self: Watch) -> None:
        raise InputError("its costs are gone.")

    monkeypatch.setattr(Watch, "_new_adapter", unknown)
    watch, notes = Watch(plan, tmp_path), list[str]()
    for step in range(60):
        slow = {2} if step >= 12 else set()
        slow |= {1} if step >= 36 else set()
        ranks = {rank: RankFigures(3.0 if rank in slow else 1.0, 1.0, step_s=9.0) for rank in range(4)}
        notes += [note for note in watch.after(step, ranks) if "not known" in note]
    watch.close()
    assert notes == ["what could be done about slow ranks is not known: its costs are gone."]
    assert {event.ranks for event in read_events(tmp_path)} == {(1,), (2,)}


def test_what_is_asked_for_stays_when_what_was_slow_is_fast_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run had moved away from a slow rank before, and would have moved back."""
    plan, alone = (uniform_plan("gpt-tiny", "4xa100-40gb", global_batch=8, micro_batch=1, pp=pp) for pp in (4, 1))
    job = Job(plan, tmp_path, monkeypatch)
    job.run(12)
    job.run(30, {2: 3.0})
    assert len(job.moves) == 1
    ask_for(tmp_path, alone)
    job.run(10, {2: 3.0})
    job.run(60)
    assert job.plan == alone and len(job.moves) == 2


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_was_asked_for_before_a_death_is_not_done(plan: Plan, tmp_path: Path, goes_on: bool) -> None:
    """Perhaps the process died of it; who asked is told, unless it was asked of a run that has ended."""
    asked = ask_for(tmp_path, plan, 9)
    watch = Watch(plan, tmp_path, anew=False, notices=False)
    watch.forget_request(4, goes_on=goes_on)
    assert watch.order(9) is None
    watch.close()
    wanted = [("aborted", 4, 1, asked, "the plan stays as it is: processes were lost, or left, before the move. Ask for it again.")]
    assert [(one.event, one.step, one.status, one.request, one.text) for one in read_events(tmp_path)] == (wanted if goes_on else [])
