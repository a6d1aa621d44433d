"""Searches over Aceso's published tables, scored by an independent judge; skipped where the tables are not at hand."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InfeasibleError, InputError
from penstock.systems.aceso.plans import AcesoPlan, searched_text
from penstock.systems.aceso.scoring import score_plan
from penstock.systems.aceso.search import AcesoProblem, search_aceso
from penstock.systems.aceso.tables import AcesoTables
from penstock.systems.tables import validated

SHARED = Path(__file__).resolve().parents[3].parent / "shared"
needs_tables = pytest.mark.skipif(not (SHARED / "data" / "aceso").exists(), reason="Aceso's tables are not here")

CASES = [
    ("miniset", "gpt", "1_3B", 1, 4, 512, (1, 2, 4, 8), 12000, 57.9),
    ("miniset", "t5", "770M", 1, 4, 512, (1, 2, 4, 8), 12000, 33.4),
    ("miniset", "resnet", "1B", 1, 4, 768, (8, 16, 32, 48, 64), 12000, 16.45),
    ("eurosys", "gpt", "1_3B", 1, 4, 1024, (1, 2, 4, 8), 28000, 99.8),
    ("eurosys", "gpt", "6_7B", 2, 8, 1024, (1, 2, 4, 8), 28000, 83.6),
    ("eurosys", "resnet", "2B", 1, 4, 1536, (16, 32, 48, 64), 28000, 49.05),
]


def problem_of(
    folder: str, family: str, size: str, nodes: int, per_node: int, batch: int, sizes: tuple[int, ...], memory: float
) -> AcesoProblem:
    tables = AcesoTables.open(SHARED / "data" / "aceso" / folder)
    return AcesoProblem(tables, tables.model(family, size), nodes, per_node, batch, sizes, memory)


@pytest.fixture(scope="module")
def judge() -> Any:
    spec = importlib.util.spec_from_file_location("aceso_judge", SHARED / "judges" / "aceso_judge.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aceso_judge"] = module
    spec.loader.exec_module(module)
    return module


@needs_tables
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_the_plan_is_good_and_the_judge_agrees(case: tuple[Any, ...], judge: Any) -> None:
    *given, reach = case
    problem = problem_of(*given)
    answer = search_aceso(problem)
    score = judge.evaluate(answer.plan, str(SHARED / "data" / "aceso" / given[0]), given[3], given[4], given[7])
    assert score.ok, score.errors
    assert score.iteration_s == pytest.approx(answer.time_s, rel=1e-6)
    assert score.iteration_s <= reach
    own = score_plan(validated(AcesoPlan, json.loads(searched_text(answer.plan, problem.model)), "plan"), problem.tables, given[4])
    assert own.time_s == pytest.approx(score.iteration_s, rel=1e-9) and own.memory_mb == pytest.approx(score.max_memory_mb, abs=0.1)
    assert answer.bound_s <= answer.time_s <= 1.03 * answer.bound_s


@needs_tables
def test_a_chain_of_thousands_of_ops(judge: Any) -> None:
    tables = AcesoTables.open(SHARED / "data" / "aceso" / "eurosys")
    problem = AcesoProblem(tables, tables.model("gpt", "350M", 256), 1, 8, 1024, (4,), 28000)
    answer = search_aceso(problem)
    score = judge.evaluate(answer.plan, str(SHARED / "data" / "aceso" / "eurosys"), 1, 8, 28000)
    assert score.ok, score.errors
    assert score.iteration_s == pytest.approx(answer.time_s, rel=1e-6)
    assert score.iteration_s <= 250.6 and answer.time_s <= 1.02 * answer.bound_s


TIGHT = [
    ("miniset", "gpt", "1_3B", 1, 4, 128, (2, 4), 8000), ("miniset", "resnet", "1B", 2, 4, 96, (32,), 8000),
    ("eurosys", "gpt", "350M", 3, 2, 8, (1, 16), 4000), ("eurosys", "t5", "770M", 1, 8, 16, (1, 2, 4), 6000),
]  # fmt: skip


@needs_tables
@pytest.mark.parametrize("case", TIGHT, ids=lambda case: f"{case[1]} {case[2]} {case[7]} MB")
def test_little_memory_and_few_micro_batches(case: tuple[Any, ...], judge: Any) -> None:
    """Plans at the edge of what fits are the judge's, and no plan of equal stages is better or below the bound."""
    folder, _, _, nodes, per_node, _, sizes, memory = case
    problem = problem_of(*case)
    answer = search_aceso(problem)
    data = str(SHARED / "data" / "aceso" / folder)
    score = judge.evaluate(answer.plan, data, nodes, per_node, memory)
    assert score.ok, score.errors
    assert score.iteration_s == pytest.approx(answer.time_s, rel=1e-6)
    assert answer.bound_s <= answer.time_s
    for tp, depth, flag in itertools.product((1, 2, 4), range(1, 9), (0, 1)):
        counts = [len(part) for part in np.array_split(np.arange(len(problem.names)), depth)]
        gpus = nodes * per_node // depth
        if gpus in (1, 2, 4, 8) and nodes * per_node == depth * gpus and gpus % tp == 0:
            plan = answer.plan | {
                "num_stages": depth, "num_gpus": [gpus] * depth, "num_ops_in_each_stage": counts, "micro_batch_size": sizes[0],
                "model_parallel_size_of_each_op": [[tp] * n for n in counts], "algo_of_each_op": [[0] * n for n in counts],
                "data_parallel_size_of_each_op": [[gpus // tp] * n for n in counts], "recompute_ops": [[flag] * n for n in counts],
            }  # fmt: skip
            equal = judge.evaluate(plan, data, nodes, per_node, memory)
            assert not equal.ok or equal.iteration_s >= max(answer.time_s, answer.bound_s) * (1 - 1e-9)


@needs_tables
def test_bounds_hold_where_memory_barely_suffices() -> None:
    """With a few MB less there would be no such pipeline: the bound has to know nearly as well what each one holds."""
    for memory in (6863, 7906):
        answer = search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 128, (1, 2), memory))
        assert answer.bound_s <= answer.time_s <= 1.03 * answer.bound_s
    with pytest.raises(InfeasibleError, match="fits 4 GPUs of 6671 MB each: that is proven"):
        search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 128, (1, 2), 6671))
    with pytest.raises(InfeasibleError, match="was found that fits 4 GPUs of 6825 MB each"):
        search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 128, (1, 2), 6825))


@needs_tables
def test_more_memory_is_never_worse() -> None:
    times = [search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 512, (1, 2), memory)).time_s for memory in (10000, 12000, 20000)]
    assert times == sorted(times, reverse=True)


@needs_tables
def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(InfeasibleError, match="3000 MB"):
        search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 512, (1, 2), 3000))
    with pytest.raises(InfeasibleError, match="6000 MB"):
        search_aceso(problem_of("eurosys", "resnet", "2B", 4, 2, 96, (32,), 6000))
    with pytest.raises(InputError, match="7"):
        search_aceso(problem_of("miniset", "gpt", "1_3B", 1, 4, 512, (7,), 12000))
