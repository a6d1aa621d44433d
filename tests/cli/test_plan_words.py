"""Plans in words: what a sentence says of a plan is what binds it."""

from __future__ import annotations

from dataclasses import replace

from penstock.cli.plan_words import micro_batch_words, plan_name, plan_sentence
from penstock.costs.sources import open_costs
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import cluster_of, model_of
from penstock.timing.estimate import Estimator


def test_the_memory_told_is_that_of_the_device_that_is_fullest() -> None:
    """A small device that is nearly full, beside a large one that holds more."""
    plan = uniform_plan("gpt-1.3b", "1xh200-141gb+1xa10g", pp=2, global_batch=8, micro_batch=1)
    cluster = cluster_of(plan)
    found = Estimator(model_of(plan), cluster, open_costs("roofline", cluster)).estimate(plan)
    large, small = found.stages
    assert small.memory.total_bytes < large.memory.total_bytes
    assert small.memory.total_bytes / small.limit_bytes > large.memory.total_bytes / large.limit_bytes
    assert f"of {small.limit_bytes / 2**30:.1f} GiB" in plan_sentence(plan, found)


def test_unequal_shares_are_told_from_the_largest_down() -> None:
    plan = uniform_plan("gpt-tiny", "3xa100-40gb", replicas=3, global_batch=24, micro_batch=2)
    assert "micro-batches a replica" not in plan_name(plan)
    shared = replace(plan, micro_batching=MicroBatching("padded", "fixed", 2, per_replica=(4, 6, 2)))
    assert plan_name(shared).endswith(", 6 to 2 micro-batches a replica") and micro_batch_words(shared) == "2"
