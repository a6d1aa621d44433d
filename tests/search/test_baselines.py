"""AMP's choice among uniform plans: by its own estimate, not by ours."""

from __future__ import annotations

import math

import pytest

from penstock.search import Request
from penstock.search.assemble import estimated
from penstock.search.baselines import BASELINES, amp_s
from penstock.search.uniform import plans_of_grid


@pytest.mark.parametrize("cluster", ["2xa10g", "1xp4d.24xlarge+1xg5.24xlarge"])
def test_amp_takes_the_first_of_its_ranking_that_fits(cluster: str) -> None:
    request = Request.of("bert-large", cluster, 48, "roofline", None, [2], math.inf)
    (amp,) = (baseline for baseline in BASELINES if baseline.name == "AMP")
    chosen = amp.find(request)
    assert chosen is not None
    plans = [plan for plan in plans_of_grid(request) if plan.stages[0].zero <= 1 and not any(stage.recompute for stage in plan.stages)]
    fitting = [one for one in (estimated(request, plan, "grid") for plan in plans) if one.estimate.fits]
    assert amp_s(chosen.estimate) == min(amp_s(one.estimate) for one in fitting)
    if "+" in cluster:
        told = next(one.estimate for one in fitting if len({stage.device for stage in one.estimate.stages}) == 2)
        works = [stage.work.forward_pass_s + stage.work.backward_pass_s for stage in told.stages]
        messages_s = sum(stage.work.transfer_in_s + stage.work.transfer_out_s for stage in told.stages)
        rest_s = amp_s(told) - messages_s - max(stage.sync_s for stage in told.stages)
        passes = told.num_micro_batches - 1 + len(works)
        assert rest_s == pytest.approx(passes * sum(works) / len(works)), "a stage on slow devices looks as fast as the average"
