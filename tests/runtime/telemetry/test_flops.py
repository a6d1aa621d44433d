"""Model flops utilisation: padding and recomputation do not count, and it is the estimate's where the time is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.costs.sources import open_costs
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import uniform_plan
from penstock.plans.references import cluster_of, model_of
from penstock.runtime.telemetry.flops import PeakTimes
from penstock.timing.estimate import Estimator


@pytest.mark.parametrize("name", ["gpt-tiny", "t5-tiny", "resnet-tiny", "llama-tiny"])
def test_full_samples_give_the_estimate(name: str) -> None:
    """With samples as long as the plan expects and the time it expects, the share is the plan's own; a window's too."""
    plan = uniform_plan(name, "2xa100-80gb", global_batch=8, micro_batch=2, replicas=2)
    if name == "llama-tiny":
        plan = replace(plan, model={"base": name, "window": 32})
    model, cluster = model_of(plan), cluster_of(plan)
    found = Estimator(model, cluster, open_costs("roofline", cluster)).estimate(plan)
    lengths, dec = (plan.seq_length,) * 2 if plan.seq_length else (), (plan.dec_length,) * 2 if plan.dec_length else ()
    own = [MicroBatch(index, (2 * index, 2 * index + 1), "padded", lengths, dec, plan.seq_length, plan.dec_length) for index in range(2)]
    tokens = 8 * ((plan.seq_length + plan.dec_length) or 1)
    assert PeakTimes(plan, model, cluster).time_s(own, tokens) / found.time_s == pytest.approx(found.mfu)


def test_padding_is_not_counted() -> None:
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=2, micro_batch=2)
    peaks = PeakTimes(plan, model_of(plan), cluster_of(plan))
    padded, packed = (MicroBatch(0, (0, 1), layout, (10, 100), row_length=row) for layout, row in (("padded", 100), ("packed", 0)))
    assert peaks.time_s([padded], 110) == peaks.time_s([packed], 110) < peaks.time_s([MicroBatch(0, (0, 1), "packed", (100, 100))], 200)
