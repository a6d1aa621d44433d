"""Batches in ways that are asked for: each is what it says, none is better than the planner, and what does not go together is refused."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.ways import SPLITS, WAYS_SCHEDULES, BatchWays
from penstock.cli.main import run
from penstock.errors import InfeasibleError, InputError
from penstock.systems.dynapipe.rules import dynapipe_costs
from penstock.systems.dynapipe.tables import open_configuration


@cache
def costs_of(folder: Path, name: str) -> PipelineCosts:
    return dynapipe_costs(*open_configuration(folder / name))


def samples_of(has_decoder: bool, count: int = 24) -> list[SampleLengths]:
    numbers = np.random.default_rng(3)
    enc, dec = numbers.integers(20, 900, count), numbers.integers(4, 200, count)
    return [SampleLengths(i, int(n), int(m) if has_decoder else 0) for i, (n, m) in enumerate(zip(enc, dec, strict=True))]


@pytest.mark.parametrize("name", ["gptA", "t5C"])
def test_no_way_beats_the_planner(name: str, small_tables: Path) -> None:
    costs = costs_of(small_tables / "dynapipe", name)
    samples = samples_of(costs.has_decoder)
    best = plan_batch(samples, costs, steps=800, bound=True)
    ways = [BatchWays(split=split) for split in SPLITS] + [BatchWays(order=order) for order in ("hilbert", "sorted", "tour")]
    ways += [*(BatchWays(recompute=mode) for mode in costs.modes), *(BatchWays(schedule=one) for one in ("1f1b", "gpipe", "greedy"))]
    for way in ways:
        found = way.planned(samples, way.limited(costs))
        held = sorted(sample for replica in found.replicas for one in replica.micro_batches for sample in one.samples)
        assert held == sorted(sample.id for sample in samples), way
        assert best.bound_s <= found.predicted_s and found.predicted_s >= 0.999 * best.predicted_s, way
        assert all(replica.order == way.schedule for replica in found.replicas) or not way.schedule


def test_each_way_is_what_it_says(small_tables: Path) -> None:
    costs = costs_of(small_tables / "dynapipe", "gptA")
    samples = samples_of(False)
    uniform = BatchWays(split="uniform").planned(samples, costs)
    (length,) = {one.row_length for replica in uniform.replicas for one in replica.micro_batches}
    assert length >= max(sample.length for sample in samples) - 1
    full = BatchWays(recompute="full")
    again = full.planned(samples, full.limited(costs))
    modes = {mode for replica in again.replicas for one in replica.micro_batches for mode in one.recompute}
    assert modes == {costs.modes.index("full")}
    pairs = costs_of(small_tables / "dynapipe", "t5C")  # along a Hilbert curve lengths rise and fall
    ordered = BatchWays(order="sorted").planned(samples_of(True), pairs)
    spans = [(min(one.lengths), max(one.lengths)) for replica in ordered.replicas for one in replica.micro_batches]
    spans.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), "neighbours by length run together"
    tight = BatchWays(memory_limit_bytes=0.75 * float(costs.limit_bytes.max()))
    assert tight.planned(samples, tight.limited(costs)).peak_bytes <= tight.memory_limit_bytes
    with pytest.raises(InfeasibleError):
        BatchWays(memory_limit_bytes=1e9).planned(samples, BatchWays(memory_limit_bytes=1e9).limited(costs))


@pytest.mark.parametrize(
    ("ways", "message"),
    [({"order": "sort"}, "--order is 'sort'. Did you mean 'sorted'"), ({"split": "fixed"}, "--split is 'fixed'"),
     ({"schedule": "zero-bubble"}, "--schedule is 'zero-bubble'"), ({"order": "tour", "split": "uniform"}, "has its own")],
)  # fmt: skip
def test_what_is_refused(ways: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchWays(**ways)  # type: ignore[arg-type]
    assert "1f1b" in WAYS_SCHEDULES and "zero-bubble" not in WAYS_SCHEDULES


def test_verbs_share_them(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("sample_id,enc_len,dec_len\n" + "".join(f"{one.id},{one.length},0\n" for one in samples_of(False)))
    asked = ["--lengths", str(lengths), "--costs", f"dynapipe:{small_tables / 'dynapipe'}/gptA", "--json"]
    told = {}
    for verb in ("batch", "simulate"):
        assert run([verb, *asked, "--split", "budget", "--recompute", "full", "--memory-limit", "30"]) == 0
        told[verb] = json.loads(capsys.readouterr().out)
    assert told["batch"]["predicted_s"] == pytest.approx(told["simulate"]["predicted_s"], rel=1e-9)
    assert {mode for replica in told["batch"]["batch"]["replicas"] for one in replica["micro_batches"] for mode in one["recompute"]} == {2}
    assert run(["batch", *asked, "--schedule", "gpipe", "--budget-steps", "0"]) == 0
    assert set(json.loads(capsys.readouterr().out)["orders"]) == {"gpipe"}
    lengths.write_text("length\n" + "".join(f"{8 + 5 * i}\n" for i in range(24)))
    own = ["search", "--model", "gpt-tiny", "--cluster", "2xcpu", "--global-batch", "24", "--lengths", str(lengths), "--json", "--top", "1"]
    assert run([*own, "--baselines"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["baselines"]) == {"uniform", "budget", "across", "packed"}
    assert min(time_s for time_s in found["baselines"].values() if time_s) >= 0.99 * found["plans"][0]["bound_s"]
    for verb in (["simulate", *asked[2:], "--batch", "x", "--split", "uniform"], [*own[:7], "--order", "sorted"]):
        assert run(verb) == 2
        assert "say how" in capsys.readouterr().err
