"""Units of somebody's module are measured in windows, each kind once, with marks between them."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from module_cases import described

from penstock.clusters import resolve_cluster
from penstock.costs.profiled import Profiled
from penstock.models import Model, Shape
from penstock.profiling.grid import GridLimits, Lengths
from penstock.profiling.measure import random_model_batch
from penstock.profiling.module_parts import run_units, window_chain, windows
from penstock.profiling.run import Profiler
from penstock.runtime.parallel.module_chain import cut_module


@pytest.fixture(scope="module")
def model() -> Model:
    return described("plain_gpt")


class Count:
    """Marks that number themselves."""

    def __init__(self) -> None:
        self.mark = count().__next__


def test_each_kind_is_in_a_window(model: Model) -> None:
    names = [place.name for place in model.ops]
    assert [names[first:last] for first, last in windows(model, 3)] == [names]
    assert [names[first:last] for first, last in windows(model, 2)] == [names[:-3], names[-2:]], "the third block is like the second"


@pytest.mark.parametrize("window", [slice(0, 3), slice(2, None)])
def test_every_unit_has_its_marks_in_the_order_in_which_it_runs(window: slice, model: Model) -> None:
    first, last, _ = window.indices(model.num_ops)
    cut = cut_module(model, torch.device("cpu"), 0)
    assert cut is not None
    chain, batch = window_chain(cut, first, last), random_model_batch(model, Lengths(2, 8), torch.device("cpu"))
    assert sum(not p.is_meta for p in cut.module.parameters()) == len(list(chain.parameters()))

    def carry() -> dict[str, torch.Tensor]:
        return {spec.name: torch.randn(spec.shape(batch.shape), requires_grad=True) for spec in model.carry_before(first)}

    found = run_units(chain, carry(), batch, Count())  # type: ignore[arg-type]
    intervals = found.intervals()
    assert len(intervals) == last - first and all(begin < end for begin, end, _, _ in intervals)
    assert all(one[1] == other[0] for one, other in pairwise(intervals)), "nothing between units is left out"
    assert intervals[0][0] == (1 if first else 0), "code before a later window's first unit is no part of it"
    backward = [(begin, end) for _, _, begin, end in intervals]
    assert all(other[1] == one[0] for other, one in pairwise(reversed(backward))), "the last first"
    assert all(p.grad is not None for p in chain.parameters() if p.requires_grad)
    assert len(run_units(chain, carry(), batch, Count(), whole=True).intervals()) == 1  # type: ignore[arg-type]


def test_a_profile_has_all_that_a_plan_of_the_module_asks_for(tmp_path: Path, model: Model) -> None:
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    profiler.limits = GridLimits(64, 256, 2, 4, 1)
    profiler.run(profiler.units([model], [1, 2]), progress=lambda name: None)
    costs = Profiled.open(tmp_path / "profile.json")
    shapes = [Shape(tokens=100, squares=2000, samples=5, layout=layout) for layout in model.layouts]
    table = costs.table(model, shapes, [1], resolve_cluster("1xcpu"))
    assert costs.notes(model) == () and (table.forward_s > 0).all()
    assert costs.device("cpu").optimizer_s(1000, 2, "fp32") is not None
