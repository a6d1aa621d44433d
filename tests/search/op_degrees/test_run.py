"""A plan with degrees of each op, as the search finds it, trains like one process."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from runtime_cases import Case, largest_difference, make_works, reference
from training_jobs import train_programs

from penstock.programs.check import check_programs
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool
from penstock.search import Request, search


def test_a_found_plan_equals_one_process(tmp_path: Path) -> None:
    fields = {"family": "vgg", "convs": [1, 1], "widths": [8, 16], "classifier_width": 4096, "num_classes": 8, "image_size": 32}
    (tmp_path / "model.yaml").write_text(json.dumps(fields))
    request = Request.of(str(tmp_path / "model.yaml"), "4xt4", 32, "roofline", None, (), math.inf)
    best = search(request, top=1).choices[0]
    assert best.kind == "mixed" and {run.tp for run in best.plan.stages[0].runs} == {4}
    plan = replace(best.plan, cluster="4xcpu")
    case = Case(plan, request.model, tuple(make_works(plan, request.model, random.Random(seed)) for seed in range(3)))
    assert all(check_programs(programs, plan, request.model) == [] for programs in case.programs())
    # Without clipping: the norm of a million gradients in fp32 depends on how they are divided, by more than the tolerance.
    settings = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"), clip_norm=None)
    with WorkerPool(4, timeout_s=250) as pool:
        outcomes = pool.run(train_programs, plan, case.programs(), settings)
    losses, weights = reference(case, settings)
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-5)
    assert largest_difference(case, outcomes, weights)[0] <= 1e-5
