"""The bound over FASOP's costs: never above the best of all plans of tiny clusters, and near the plans found on small tables."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fasop import Stage, best_of_size, hop_s, link, node_kinds

from penstock.systems.fasop import bound as fasop_bound
from penstock.systems.fasop.bound import lower_bound_s
from penstock.systems.fasop.forms import relax
from penstock.systems.fasop.inputs import FasopModel, NodeKind
from penstock.systems.fasop.rules import FasopProblem, Option, build_case, micro_batches_of, options_of
from penstock.systems.fasop.search import search_fasop
from penstock.systems.fasop.tables import FasopTables


def random_problem(rng: random.Random) -> FasopProblem:
    """A few GPUs on nodes of one or two kinds, two to five layers, batches of any small size, links that may matter or not."""
    shapes = [((1, 1), (2, 2)), ((2,), (2,)), ((1, 3), (1, 1)), ((1,), (4,)), ((2, 1), (1, 2)), ((3,), (1,)), ((4,), (1,)), ((2,), (3,))]
    counts, sizes = rng.choice(shapes)
    depth, batch = rng.choice((2, 3, 3, 4, 5)), rng.choice((4, 6, 8, 12, 16))
    layers = ("embedding_layer", *["block"] * (depth - 2), "post_process" if rng.random() < 0.7 else "embedding_layer")
    model = FasopModel(64, 32, 500, 4, batch, layers)
    slow_links = rng.choice((1e7, 1e8, 1e9))
    kinds = {
        name: NodeKind(
            name, f"G{name}", size, slow_links * rng.choice((0.5, 4, 16)), slow_links * rng.choice((1, 3)),
            rng.choice((1.0, 1.0, 0.0012)), 1.0,
        )
        for name, size in zip("XY", sizes, strict=False)
    }  # fmt: skip
    times = {}
    for kind in kinds.values():
        speed, even = rng.uniform(0.5, 2), rng.random() < 0.5
        for tp, mbs in ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2)):
            if (tp, mbs) == (1, 1) or rng.random() < 0.5:
                slow = speed * mbs ** rng.uniform(0.4, 1) / tp ** rng.uniform(0.2, 0.9)
                times[kind.gpu, tp, mbs] = np.array([slow * (0.005 if even else rng.uniform(0.001, 0.01)) for _ in layers])
    return FasopProblem(model, kinds, counts, times, max(sizes))


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    for samples in rng.sample(sizes := micro_batches_of(problem), min(2, len(sizes))):
        options = options_of(problem, samples)
        best = best_of_size(problem, samples)
        for known in (1.05 * best, 10 * best) if best < np.inf else (1e3,):
            least = lower_bound_s(problem, [(options, build_case(problem, samples, options))], known)
            assert 0 < least <= min(best, known) * (1 + 1e-9)


def test_the_bound_meets_the_best_plan_where_nothing_is_relaxed() -> None:
    gaps = []
    for seed in range(60):
        problem = random_problem(random.Random(seed))
        samples = micro_batches_of(problem)[0]
        best, options = best_of_size(problem, samples), options_of(problem, samples)
        if best < np.inf:
            gaps.append(best / lower_bound_s(problem, [(options, build_case(problem, samples, options))], 1.2 * best) - 1)
    assert np.median(gaps) < 0.002 and np.mean(gaps) < 0.03


def test_less_work_leaves_a_lower_bound_and_a_valid_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(random.Random(4))
    sizes = [(options_of(problem, size), build_case(problem, size, options_of(problem, size))) for size in micro_batches_of(problem)]
    whole = lower_bound_s(problem, sizes, 9.0)
    monkeypatch.setattr(fasop_bound, "MOST_WORK", 0)
    assert 0 < lower_bound_s(problem, sizes, 9.0) <= whole


@given(st.integers(0, 400))
@settings(max_examples=40)
def test_hops_of_random_placements_are_never_below_those_of_their_forms(seed: int) -> None:
    """Places two neighbours at random and compares their hop and rings with what the relaxation allows."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    samples = rng.choice(micro_batches_of(problem))
    options = options_of(problem, samples)
    case = build_case(problem, samples, options)
    units = np.zeros((len(options), 1), np.int64)
    relaxed = relax(problem, options, case, units, np.array([1]))
    free, placed = list(case.node_size), []
    for chosen in (rng.randrange(len(options)), rng.randrange(len(options))):
        places = []
        for _ in range(options[chosen].dp):
            roomy = [n for n in range(len(free)) if case.members[case.pool[chosen], n] and free[n] >= options[chosen].tp]
            if not roomy:
                return
            places.append(rng.choice(roomy))
            free[places[-1]] -= options[chosen].tp
        placed.append((1, options[chosen], tuple(places)))
    stages = [_stage_of(relaxed.steps.option, options, stage) for stage in placed]
    steps, took_s = relaxed.steps, hop_s(problem, samples, placed[0], placed[1])
    joined = [steps.hop[e] for e in range(steps.begin[stages[1]], steps.begin[stages[1] + 1]) if steps.base[steps.target[e]] == stages[0]]
    assert 2 * took_s >= min([steps.far[stages[1], stages[0]], *joined]) * (1 - 1e-9)
    nodes = node_kinds(problem)
    for stage, (_, option, places) in zip(stages, placed, strict=True):
        ring = min(link(nodes, places[r], places[(r + 1) % option.dp]) for r in range(option.dp))
        assert option.dp == 1 or ring <= steps.ring[stage] * (1 + 1e-9)


def _stage_of(option_of: np.ndarray, options: list[Option], stage: Stage) -> int:
    """The form of a placed stage: the first of its option is inside one node where that is possible, the last is spread."""
    _, option, places = stage
    same = [x for x, c in enumerate(option_of) if options[c] == option]
    return same[0] if len(set(places)) == 1 else same[-1]


@pytest.mark.parametrize("setting", ["gpt2XL-homo", "bert-het", "T5-het"])
def test_the_bound_is_sharp(setting: str, small_tables: Path) -> None:
    answer = search_fasop(FasopTables.open(small_tables / "fasop"), setting)
    assert answer.bound_s is not None and answer.bound_s <= answer.time_s <= 1.06 * answer.bound_s
