"""Pipelines over several kinds of devices: messages as the estimate has them, and less to do after the last micro-batch."""

import math
from pathlib import Path

import numpy as np
import pytest

from penstock.plans.plan import Degrees, Plan, Stage
from penstock.search.assemble import assembled, estimated, stage_of
from penstock.search.engine import search
from penstock.search.partition.after_limits import StageAfter
from penstock.search.partition.flags import recompute_flags
from penstock.search.partition.pipelines import _stages, best_pipeline
from penstock.search.partition.programme import crossing
from penstock.search.partition.stage_space import Machine, StageChoice, StageSpace, build_space
from penstock.search.space.families import PlanFamily, families
from penstock.search.space.request import Request

REQUEST = Request.of("gpt-350m", "1xp4d.24xlarge+3xg5.24xlarge", 64, "roofline", None, (), math.inf)
FAMILY = next(family for family in families(REQUEST) if (family.replicas, family.samples) == (1, 4))


def solved(family: PlanFamily, limit_s: float) -> tuple[StageSpace, tuple[StageChoice, ...]]:
    """The programme's best stages that take at most so long after the last micro-batch."""
    found = _stages(family, family.subspaces[0], "1f1b", 1.0, 10.0, limit_s)
    assert found is not None
    return found


def plan_of(family: PlanFamily, space: StageSpace, chosen: tuple[StageChoice, ...]) -> Plan:
    """With the stages of a replica side by side, as the programme takes them to lie."""
    options = [space.costs[stage.option].option for stage in chosen]
    stages = [
        stage_of(stage.first, stage.last, option, family.ranks(option, stage.start, together=False), recompute_flags(space, stage))
        for stage, option in zip(chosen, options, strict=True)
    ]
    return assembled(family.request.frame, stages, family.samples)


@pytest.mark.parametrize("limit_s", [math.inf, 0.05])
def test_stages_take_as_long_as_the_estimate_says(limit_s: float) -> None:
    """Messages between kinds, and between stages of unequal size, included."""
    space, chosen = solved(FAMILY, limit_s)
    found = REQUEST.estimator.estimate(plan_of(FAMILY, space, chosen))
    assert len({space.costs[stage.option].option.pool for stage in chosen}) == 2
    assert [stage.work.total_s for stage in found.stages] == pytest.approx([stage.time for stage in chosen], rel=1e-6)


def test_no_stage_takes_longer_than_the_limit() -> None:
    """And none is left out that takes less."""
    (space, _), after, left_out = solved(FAMILY, math.inf), StageAfter(FAMILY.prices), 0
    limit_s = 0.02
    limited = after.limited(space, limit_s)
    for c, costs in enumerate(space.costs):
        for a, width in enumerate(space.width[c]):
            for b in range(a + 1, a + int(width) + 1):
                at = space.offset[c, a] + b - a - 1
                over = after.of(costs.option, int(space.cuts[a]), int(space.cuts[b])) > limit_s
                assert np.array_equal(limited.times[:, at], np.full_like(space.times[:, at], np.inf) if over else space.times[:, at])
                left_out += over
    assert 0 < left_out < space.times.shape[1]


def test_the_ends_that_share_a_table_go_to_the_fast_network() -> None:
    """The shortest pipeline has its large table at both ends, one of them on slow nodes; what is found has both ends on the fast ones."""
    space, shortest = solved(FAMILY, math.inf)
    fast = [space.costs[stage.option].option.pool == 0 for stage in shortest]
    found = best_pipeline(FAMILY, 10.0)
    assert found is not None
    kinds = [stage.device for stage in found.estimate.stages]
    assert not (fast[0] and fast[-1]) and (kinds[0], kinds[-1]) == ("a100-40gb", "a100-40gb")
    assert found.estimate.time_s < REQUEST.estimator.estimate(plan_of(FAMILY, space, shortest)).time_s


def test_the_other_end_of_a_shared_table_counts() -> None:
    """For a stage that has one end of it, but not for one that has both."""
    after, num_ops = StageAfter(FAMILY.prices), REQUEST.model.num_ops
    option = next(option for option in FAMILY.subspaces[0].options if (option.pool, option.num_devices) == (1, 4))
    alone = FAMILY.prices.updates.side_by_side_s(option)
    shared_s = after.of(option, 0, 5) - float(alone[:5].sum())
    assert shared_s > 0.01 and after.of(option, 5, num_ops) - float(alone[5:].sum()) == pytest.approx(shared_s)
    assert after.of(option, 0, num_ops) == pytest.approx(float(alone.sum()))


def test_messages_between_kinds_cross_nodes_wherever_stages_lie() -> None:
    options = [next(o for o in FAMILY.subspaces[0].options if (o.pool, o.num_devices) == (pool, 2)) for pool in (0, 1)]
    costs, machine = [FAMILY.prices.costs(option) for option in options], Machine(FAMILY.pools, 1.0, 0.0)
    space = build_space(costs, REQUEST.blocks, machine, max_stages=1, cuts=REQUEST.blocks.ends, recompute="never")
    places = [(0, 0), (0, 2), (1, 2), (1, 4), (1, 6)]
    given = [StageChoice(option, at, at + 1, 0, 0.0, start) for at, (option, start) in enumerate(places)]
    assert crossing(space, given) == [False, True, True, False]


def test_equal_devices_divide_what_takes_long_after_the_last_micro_batch(tmp_path: Path) -> None:
    """A plan by hand: large tables at both ends on two devices each, all layers on one; with one micro-batch their update counts."""
    (tmp_path / "wide.yaml").write_text(
        "{family: llama, layers: 2, hidden: 768, heads: 6, kv_heads: 6, ffn: 1538, seq_length: 128, vocab: 50257}"
    )
    (tmp_path / "five.yaml").write_text(
        "nodes: [{name: n, device: box, gpus: 5, intra: {bandwidth_gb_per_s: 0.5, latency_us: 50}}]\n"
        "devices: [{name: box, memory_gb: 3, memory_bandwidth_gb_per_s: 200, fp32_tflops: 40, bf16_tflops: 80}]\n"
    )
    request = Request.of(str(tmp_path / "wide.yaml"), str(tmp_path / "five.yaml"), 1, "roofline", None, (), math.inf)
    parts = (0, 1, ((0, 1),), Degrees(2)), (1, 18, ((2,),), Degrees()), (18, 20, ((3, 4),), Degrees(2))
    stages = [Stage(first, last, devices=devices, degrees=degrees) for first, last, devices, degrees in parts]
    by_hand = estimated(request, assembled(request.frame, stages, 1, "zero-bubble"), "exact").clocked()
    assert by_hand.estimate.fits
    assert search(request, top=1).choices[0].estimate.time_s <= by_hand.estimate.time_s * (1 + 1e-9)
