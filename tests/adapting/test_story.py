"""Jobs that move while they train: by their own decision when a device is slow for a while, and because somebody asks. Processes on paced
devices, whose times are exact however busy the machine is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from asking_jobs import ask_and_obey

from penstock.adapting.events import RunEvent, read_events
from penstock.adapting.watching import move_run
from penstock.cli.main import run as main
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.schema import read_plan
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest, TrainResult
from penstock.runtime.run import Watching
from penstock.runtime.run_folder import plan_of_run, plans_of_run
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.steps import StepRecord, read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.timing.disturbance import Disturbance, DisturbanceChange
from penstock.timing.disturbance_file import read_disturbance

EXAMPLE = Path(__file__).parents[2] / "examples" / "adapting"


def trained(request: TrainRequest, watching: Watching | None = None, told: Callable[[StepReport], None] | None = None) -> list[StepRecord]:
    """The steps of a run."""
    PlanTrainer(request, watching).train(told)
    return read_steps(Path(request.out) / "steps.jsonl")


def test_a_slow_device_is_moved_away_from_and_back_to(data: str, tmp_path: Path) -> None:
    """Losses and samples are to the bit those of a run on fewer devices that nothing slows and that never moves."""
    plan, (pulse,) = read_plan(EXAMPLE / "plan.json"), read_disturbance(EXAMPLE / "story.yaml").changes
    story = Disturbance((replace(pulse, steps=12),))  # half as long as the example's
    fewer, out = plan_of(pp=2, global_batch=8), str(tmp_path / "calm")
    calm = TrainRequest(fewer, data, 45, out, device="cpu", checkpoint_every=0, planning=PlanningSettings(0))
    run = replace(calm, plan=plan, out=str(tmp_path / "run"), device="paced", disturbance=story, planning=PlanningSettings(1))
    wanted, found = trained(calm), trained(run, move_run)
    assert [(one.step, one.loss, one.samples) for one in found] == [(one.step, one.loss, one.samples) for one in wanted]
    events = list(read_events(run.out))
    moves = [event for event in events if event.event == "moved"]
    assert [event.event for event in events if event.event != "decided"] == ["noticed", "moved", "noticed", "moved"]
    assert [event.remedy for event in moves] == ["cuts", "cuts"] and all(event.moved_bytes and event.pause_s for event in moves)
    first, last = (event.step for event in moves)
    assert 10 < first < 22 < last
    assert list(plans_of_run(run.out)) == [0, first, last] and plan_of_run(run.out) != plan
    assert [one.plan for one in found] == [0] * first + [1] * (last - first) + [2] * (45 - last)
    usual_s = [median(one.time_s or 0.0 for one in found[a:b]) for a, b in pairwise((0, 10, first, 22, last, 45))]
    calm_s, slow_s, moved_s, between_s, back_s = usual_s
    assert slow_s > 1.3 * moved_s and between_s > 1.03 * back_s and calm_s > 0.97 * back_s
    decisions = [event for event in events if event.event == "decided" and event.moves]
    assert len(decisions) == 2 and all(event.text.startswith("moves to another plan (cuts): ") for event in decisions)
    assert all(len(event.alternatives) > 2 and event.cost_s for event in decisions)


SLOW_SINCE = 12


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cluster of two devices that are busy with arithmetic even with a small model."""
    path = tmp_path_factory.mktemp("cluster") / "two.yaml"
    device = "{name: brook, memory_gb: 8, memory_bandwidth_gb_per_s: 900, fp32_tflops: 0.05}"
    path.write_text(f"devices: [{device}]\nnodes: [{{device: brook, gpus: 2}}]\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def calm_of_two(two: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> TrainRequest:
    """Two replicas with micro-batches that each batch decides, trained while nothing is slow."""
    plan = uniform_plan("gpt-tiny", two, global_batch=16, micro_batch=1, replicas=2, layout="packed", precision="fp32")
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic"))
    out = str(tmp_path_factory.mktemp("calm") / "run")
    request = TrainRequest(plan, data, 26, out, device="paced", checkpoint_every=0, planning=PlanningSettings(0))
    PlanTrainer(request).train()
    return request


@pytest.mark.parametrize("divided_by", ["replicas", "dp"])
def test_a_slow_rank_gets_fewer_tokens_and_no_state_moves(divided_by: str, two: str, calm_of_two: TrainRequest, tmp_path: Path) -> None:
    """Of dynamic micro-batches a slow replica gets fewer, of fixed ones a slow dp rank a smaller part. With one of two ranks at half its
    speed, no split takes less than 4/3 of the time in which both are fast."""
    plan, planners = calm_of_two.plan, 1
    if divided_by == "dp":
        planners, plan = 0, uniform_plan("gpt-tiny", two, global_batch=16, micro_batch=16, dp=2, layout="packed", precision="fp32")
    story = Disturbance((DisturbanceChange((1,), 2.0, "step", SLOW_SINCE),))
    run = replace(calm_of_two, plan=plan, out=str(tmp_path / "run"), disturbance=story, planning=PlanningSettings(planners))
    wanted, found = read_steps(Path(calm_of_two.out) / "steps.jsonl"), trained(run, move_run)
    assert [one.samples for one in found] == [one.samples for one in wanted]
    assert [one.loss for one in found] == pytest.approx([one.loss for one in wanted], rel=1e-5)
    (moved,) = (event for event in read_events(run.out) if event.event == "moved")
    assert (moved.remedy, moved.moved_bytes) == ("shares", 0) and SLOW_SINCE < moved.step < SLOW_SINCE + 10
    (rank, factors), *others = plan_of_run(run.out).micro_batching.slower
    assert (rank, others) == (1, []) and factors == pytest.approx((2.0,) * 3, rel=0.05)
    best_s, taken_s = (sum(one.time_s or 0.0 for one in steps[moved.step :]) for steps in (wanted, found))
    assert 0.9 < 4 / 3 * best_s / taken_s < 1.02
    assert 0.25 < share_of_last(replace(run, plan=plan_of_run(run.out))) < 0.42 < share_of_last(run) < 0.55


def share_of_last(request: TrainRequest) -> float:
    """What part of all tokens the last rank has in the steps of a run under a plan."""
    source, planner = run_inputs(request)
    opened, batches = source.open()
    tokens = [0, 0]
    for step in range(request.steps):
        for program in planner.programs(opened, batches[step]):
            for micro in program.micro_batches:
                first, last = micro.share(program.places[0].entry_dp, program.places[0].entry_share)
                tokens[program.rank] += sum(micro.lengths[first:last])
    return tokens[1] / sum(tokens)


def asked_to(request: TrainRequest, plans: Mapping[int, Plan]) -> tuple[TrainResult, list[StepRecord], list[RunEvent]]:
    """A run that is asked for each plan a few steps before it is to have it; the first as soon as it can."""
    result = PlanTrainer(request, partial(ask_and_obey, plans=plans)).train()
    return result, read_steps(Path(request.out) / "steps.jsonl"), list(read_events(request.out))


def plan_of(*devices: int, **choice: int) -> Plan:
    """A plan of one device for each stage on these; or the usual one."""
    sizes = {"global_batch": 4, "micro_batch": 1} | choice
    given = uniform_plan("gpt-tiny", "4xcpu", layout="packed", precision="fp32", **sizes)  # type: ignore[arg-type]
    if not devices:
        return given
    return replace(given, stages=tuple(replace(stage, devices=((own,),)) for stage, own in zip(given.stages, devices, strict=True)))


def test_a_job_moves_where_it_is_asked_to(data: str, tmp_path: Path) -> None:
    """To two devices of four, the first process not among them, while a step runs; to tensor parallelism on all, and to replicas; what
    cannot be is refused, and nothing is trained twice or left out."""
    calm = TrainRequest(plan_of(), data, 22, str(tmp_path / "calm"), device="cpu", checkpoint_every=0, planning=PlanningSettings(0))
    run = replace(calm, plan=plan_of(pp=4), out=str(tmp_path / "run"), planning=PlanningSettings(1), checkpoint_every=7)
    run = replace(run, eval_every=11, eval_batches=1)
    wanted = trained(calm)
    plans = {5: plan_of(3, 2, pp=2), 10: plan_of(pp=2, tp=2), 15: plan_of(pp=2, global_batch=8), 20: plan_of(pp=2, replicas=2)}
    result, found, events = asked_to(run, plans)
    assert [one.samples for one in found] == [one.samples for one in wanted]
    assert [one.loss for one in found] == pytest.approx([one.loss for one in wanted], rel=1e-5)
    assert [event.event for event in events if event.event != "asked"] == ["moved", "moved", "aborted", "moved"]
    first, *others = (event.step for event in events if event.event == "moved")
    assert 3 <= first <= 8 and others == [10, 20]
    (asked, *_) = (event for event in events if event.event == "asked")
    assert first == asked.step + 1  # the state travelled while step `asked.step` ran
    refused = next(event for event in events if event.event == "aborted")
    assert refused.status == 2 and "global_batch is 8 in the new plan, but 4 in the old one" in refused.text
    assert (result.plan, result.plan_since, result.num_steps) == (plans[20], 20, 22)
    assert [one.step for one in result.evaluated] == [11, 22] and len(result.losses) == 22
    assert list(plans_of_run(run.out)) == [0, first, 10, 20] and set(result.ranks) == {0, 1, 2, 3}
    assert main(["trace", run.out, "--steps", "8-11", "--out", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"iteration 9, plan 1", "iteration 10, plan 2"} <= {event["name"] for event in trace}
    predicted = {event["pid"] // 2 for event in trace if event.get("cat") == "predicted compute" and event["ts"] >= 0}
    assert predicted == {0, 1, 2, 3}
    again = replace(run, plan=plan_of_run(run.out), steps=24, resume=run.out)
    assert PlanTrainer(again).train().first_step == 22 and list(plans_of_run(run.out)) == [0, first, 10, 20, 22]
