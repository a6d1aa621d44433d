"""DynaPipe's tables: plans are valid, fit and take what the independent judge says; the figures to reach are reached."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.batching.costs import PipelineCosts
from penstock.batching.lengths import read_lengths
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planner import plan_batch
from penstock.errors import InputError
from penstock.systems.dynapipe.inputs import PlannerConfig
from penstock.systems.dynapipe.rules import dynapipe_costs, dynapipe_plan
from penstock.systems.dynapipe.search import best_layers
from penstock.systems.dynapipe.tables import open_configuration


@cache
def prepared(folder: Path, name: str, **changes: Any) -> tuple[PlannerConfig, PipelineCosts]:
    table, known = open_configuration(folder / name)
    config = dataclasses.replace(known, **changes)
    return config, dynapipe_costs(table, config)


def judged(
    scorer: ModuleType, folder: Path, config: PlannerConfig, costs: PipelineCosts, samples: list[SampleLengths], plan: BatchPlan
) -> Any:
    lengths = {sample.id: (sample.length, sample.dec_length) for sample in samples}
    fields = {name: getattr(config, name) for name in ("model", "layers", "tp", "pp", "dp", "zero", "mem")}
    if config.layers_per_stage:
        fields["layers_per_stage"] = list(config.layers_per_stage)
    return scorer.evaluate(lengths, dynapipe_plan(plan, costs.modes), fields, str(folder))


CASES = [
    ("gpt_tok65536_max2048", "gptA", 2130, 2075, 40_000),
    ("gpt_tok65536_max4096", "gptA", 2680, 2390, 40_000),
    ("gpt_n512_max2048", "gptA", 3610, 3550, 20_000),
    ("gpt_n2048_max2048", "gptA", 13820, 13760, 8_000),
    ("t5_tok65536_max2048", "t5D", 5540, 5490, 2_000),
    ("t5_n2048_max2048", "t5D", 31300, 31100, 1_000),
    ("t5_tok65536_max2048", "t5C", 5550, 5350, 20_000),
]


@pytest.mark.parametrize(("case", "name", "at_once_ms", "found_ms", "steps"), CASES)
def test_known_batches(
    tables: Path, dynapipe_judge: ModuleType, case: str, name: str, at_once_ms: float, found_ms: float, steps: int
) -> None:
    config, costs = prepared(tables, name)
    samples = read_lengths(tables / "inputs" / f"{case}.csv")
    for limit_ms, plan in ((at_once_ms, plan_batch(samples, costs)), (found_ms, plan_batch(samples, costs, steps=steps, bound=True))):
        score = judged(dynapipe_judge, tables, config, costs, samples, plan)
        assert score.ok, score.errors
        assert score.iteration_ms == pytest.approx(plan.predicted_s * 1e3, rel=1e-9)
        assert score.peak_mb == pytest.approx(plan.peak_bytes / 1e6, abs=2)  # the modes' model states differ by noise
        assert score.iteration_ms <= limit_ms
        assert plan.bound_s <= plan.predicted_s


@pytest.mark.parametrize("seed", range(6))
def test_other_batches_and_configurations(tables: Path, dynapipe_judge: ModuleType, seed: int) -> None:
    source = random.Random(seed)
    name = source.choice(["gptA", "gptB", "t5C", "t5D"])
    layers = {"gptA": (9, 8, 8, 7), "gptB": (15, 17), "t5C": (14, 12, 11, 11), "t5D": ()}[name]
    config, costs = prepared(tables, name, mem=source.choice([30000.0, 36000.0, 60000.0]), layers_per_stage=layers)
    longest = source.choice([300, 1000, 1900])
    decoder = name.startswith("t5")
    samples = [
        SampleLengths(
            i, min(longest, 2 + int(source.lognormvariate(4.5, 1.2))), min(400, 1 + int(source.lognormvariate(3, 1))) if decoder else 0
        )
        for i in range(source.choice([3, 40, 150]))
    ]
    plan = plan_batch(samples, costs, steps=1500, seed=seed)
    score = judged(dynapipe_judge, tables, config, costs, samples, plan)
    assert score.ok, score.errors
    assert score.iteration_ms == pytest.approx(plan.predicted_s * 1e3, rel=1e-9)


def test_costs_are_those_of_the_judge_at_every_shape(tables: Path, dynapipe_judge: ModuleType) -> None:
    for name in ("gptA", "t5C", "t5D"):
        config, costs = prepared(tables, name)
        pipe = dynapipe_judge.Pipeline(
            {field: getattr(config, field) for field in ("model", "layers", "tp", "pp", "dp", "zero", "mem")}, str(tables)
        )
        source = random.Random(name)
        for _ in range(60):
            rows, enc = source.randint(1, 300), 8 * source.randint(1, 300)
            dec = 8 * source.randint(1, 100) if costs.has_decoder else 0
            found = costs.layouts["padded"].at(rows, enc, dec)
            for s, (m, mode) in ((s, pair) for s in range(config.pp) for pair in enumerate(costs.modes)):
                twin = np.array(pipe.stage_cost(s, mode, dynapipe_judge.Shape(rows, enc, dec)))
                own = found[costs.stage_class[0, s], m]
                own = np.array([own[0] * 1e3, own[1] * 1e3, own[2] / 1e6, max(own[3:5]) / 1e6])
                assert np.isfinite(own).all() == np.isfinite(twin).all()
                assert not np.isfinite(twin).all() or np.allclose(own, twin, rtol=1e-9)


def test_layers_that_do_not_add_up_are_refused(tables: Path) -> None:
    with pytest.raises(InputError, match="does not place 32 layers on 4 stages"):
        prepared(tables, "gptA", layers_per_stage=(8, 8, 8, 9))


def test_layers_follow_the_lengths(tables: Path, dynapipe_judge: ModuleType) -> None:
    """Decoder sides are short, so that decoder stages take layers from the encoder's."""
    samples = read_lengths(tables / "inputs" / "t5_n128_max2048.csv")
    table, even = open_configuration(tables / "t5C")
    config = best_layers(table, even, samples)
    assert sum(config.layers_per_stage) == 48
    assert config.layers_per_stage[-1] > 12
    costs = dynapipe_costs(table, config)
    plan = plan_batch(samples, costs, steps=1000)
    score = judged(dynapipe_judge, tables, config, costs, samples, plan)
    assert score.ok, score.errors
    assert score.iteration_ms < 0.98e3 * plan_batch(samples, dynapipe_costs(table, even), steps=1000).predicted_s
