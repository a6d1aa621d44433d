"""Annealed pipelines over several kinds of devices: timed as the estimate times them, and better than the programme's on slow networks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.plans.validity import check_plan
from penstock.search.partition.annealed import AnnealedPipelines, AnnealedStages
from penstock.search.partition.annealing_kernels import pipeline_s
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.space.families import PlanFamily, families
from penstock.search.space.request import Request

REQUEST = Request.of("gpt-350m", "1xp4d.24xlarge+3xp3.16xlarge", 128, "roofline", None, (), math.inf, ("1f1b", "zero-bubble"))


def family_of(replicas: int, samples: int, request: Request = REQUEST) -> PlanFamily:
    return next(family for family in families(request) if (family.replicas, family.samples) == (replicas, samples))


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_pipeline_takes_as_long_as_the_estimate_says(samples: int) -> None:
    """Messages between kinds and nodes, what zero-bubble hides, gradient sync and the shared table included; starting buckets is not."""
    annealing = AnnealedPipelines(family_of(1, samples))
    for pipeline, _ in annealing.looked:
        found = annealing._choice(pipeline)
        assert not check_plan(found.plan, REQUEST.model, REQUEST.cluster)
        assert len({stage.device for stage in found.estimate.stages}) == 2
        assert found.estimate.formula_s == pytest.approx(pipeline.time_s, rel=0.01)


def test_more_than_the_programme_finds_over_a_slow_network() -> None:
    """The programme takes a message to another kind for one inside a node unless a stage ends with its node."""
    family = family_of(1, 2)
    programme, found = best_pipeline(family, math.inf), AnnealedPipelines(family).best(20_000, 2)
    assert programme is not None and found is not None
    assert found.estimate.fits and found.estimate.formula_s < 0.97 * programme.estimate.formula_s


def test_the_same_again() -> None:
    """Annealing draws its numbers by a fixed rule."""
    plans = [found.plan for _ in range(2) if (found := AnnealedPipelines(family_of(1, 2)).best(2_000, 1)) is not None]
    assert len(plans) == 2 and plans[0] == plans[1]


def test_what_does_not_fit_has_no_time() -> None:
    """Neither more devices than there are nor more memory; stages of one kind alone are not looked at."""
    annealing = AnnealedPipelines(family_of(1, 2))
    pipeline = annealing.looked[0][0]
    starts = np.zeros(len(pipeline.options), np.int64)

    def time_s(changed: AnnealedStages, arrays: object = annealing.arrays) -> float:
        return float(pipeline_s(arrays, annealing.family.count, True, changed.number, changed.cuts, changed.options, starts))

    assert time_s(pipeline) == pytest.approx(pipeline.time_s)
    widest = [max(range(len(annealing.options)), key=lambda c: (annealing.options[c].pool == pool, annealing.options[c].num_devices))
              for pool in (0, 1)]  # fmt: skip
    crowded = pipeline.options.copy()
    crowded[: pipeline.number] = widest[1]
    crowded[0] = widest[0]
    assert time_s(pipeline._replace(options=crowded)) == math.inf
    assert time_s(pipeline, annealing.arrays._replace(kept=1e3 * annealing.arrays.kept)) == math.inf
    assert time_s(pipeline._replace(number=1, cuts=np.array([0, pipeline.cuts[pipeline.number]]))) == math.inf
