"""Profiling as a whole: what is measured, going on after a stop, memory that does not suffice, and the command."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from command_lines import with_last_values

from penstock.cli.main import run
from penstock.costs.profile import DeviceProfile, Profile, WholeFactors, read_profile, series_key
from penstock.costs.profiled import Profiled
from penstock.errors import InputError
from penstock.models import Shape, resolve_model
from penstock.profiling import run as profiling
from penstock.profiling.grid import GridLimits, Lengths
from penstock.profiling.measure import OpMeasure, random_model_batch
from penstock.profiling.run import AGAIN_S, RESTED_S, WARMUP_S, Profiler
from penstock.profiling.units import Unit
from penstock.profiling.whole import ROUNDS, WholeChain

GPT = resolve_model("gpt-tiny")
TINY = GridLimits(64, 256, 2, 4, 1)


def quick(monkeypatch: pytest.MonkeyPatch, max_tokens: float = float("inf"), host_s: float = 0.0) -> list[Shape]:
    """Puts made-up times in place of measurements; shapes that were asked for are listed, those too large run out of memory."""
    asked: list[Shape] = []

    def measure_ops(ops: Any, places: Any, batch: Any, inputs: Any, **more: Any) -> list[OpMeasure]:
        asked.append(batch.shape)
        if batch.shape.tokens > max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        for op in ops:
            for parameter in op.parameters():
                parameter.grad = torch.zeros_like(parameter)
        distinct = dict.fromkeys(place.op.signature for place in places)
        times = 1e-6 * batch.shape.tokens, 2e-6 * batch.shape.tokens, 0.01, host_s, host_s
        return [OpMeasure(signature, *times) for signature in distinct]

    monkeypatch.setattr(profiling, "measure_ops", measure_ops)
    return asked


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    path = tmp_path / "profile.json"
    wanted = [unit.name for unit in Profiler.open(path, "cpu").units([GPT], [1, 2])]
    assert len(wanted) == len(set(wanted)) >= 6
    started: list[str] = []

    class Stop:
        def __init__(self, after: int) -> None:
            self.left = after

        def __call__(self, name: str) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            started.append(name)
            if path.exists():  # Saved after every unit, and always whole.
                assert read_profile(path).devices["cpu"].done == started[:-1]

    for after in (1, 2, 1):
        profiler = Profiler.open(path, "cpu")
        with pytest.raises(KeyboardInterrupt):
            profiler.run(profiler.units([GPT], [1, 2]), progress=Stop(after))
    profiler = Profiler.open(path, "cpu")
    left = profiler.units([GPT], [1, 2])
    assert profiler.run(left, progress=Stop(100)) == len(left) == len(wanted) - 4
    assert started == wanted
    assert Profiler.open(path, "cpu").units([GPT], [1, 2]) == []
    sizes = read_profile(path).devices["cpu"].series[series_key(GPT.ops[1].op, "fp32", 1, 0, "padded")].columns["size"]
    assert len(sizes) == len(set(sizes))
    more = Profiler.open(path, "cpu").units([GPT, resolve_model("llama-tiny")], [1])
    assert more and all(unit.model.name == "llama-tiny" for unit in more)


def test_a_stop_inside_a_unit_loses_only_that_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = quick(monkeypatch)
    path = tmp_path / "profile.json.gz"
    profiler = Profiler.open(path, "cpu")
    units = profiler.units([GPT], [1])
    profiler.run(units[:1], progress=lambda name: None)
    count = len(asked)

    def interrupt(*args: Any, **more: Any) -> list[OpMeasure]:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "measure_ops", interrupt)
    with pytest.raises(KeyboardInterrupt):
        profiler.run(units[1:], progress=lambda name: None)
    assert read_profile(path).devices["cpu"].done == [units[0].name]
    asked = quick(monkeypatch)
    again = Profiler.open(path, "cpu")
    assert again.units([GPT], [1]) == units[1:]
    again.run(again.units([GPT], [1]), progress=lambda name: None)
    assert count and asked and again.units([GPT], [1]) == []


def test_a_spent_budget_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    units = profiler.units([GPT], [1])
    assert profiler.run(units, time_budget_s=-1.0, progress=lambda name: None) == 0
    assert len(profiler.units([GPT], [1])) == len(units)


def test_memory_that_does_not_suffice_is_recorded_and_larger_sizes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = quick(monkeypatch, max_tokens=300)
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    sizes, lengths = profiler.units([GPT], [1])[:2]
    profiler.run([sizes], progress=lambda name: None)
    assert sorted(shape.tokens for shape in asked)[-2:] == [256, 1024]  # the next size by the coarse grid, and none after it
    told = read_profile(tmp_path / "profile.json").devices["cpu"].out_of_memory
    assert len(told) == 1 and "gpt-tiny" in told[0] and "1024" in told[0]
    asked.clear()
    profiler.run([lengths], progress=lambda name: None)
    assert len([shape for shape in asked if shape.tokens > 300]) == 1 and len(profiler.here.out_of_memory) == 2


def test_an_op_that_tp_does_not_change_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    profiler.limits = TINY
    profiler.run(profiler.units([GPT], [1, 2]), progress=lambda name: None)
    kinds = {(series.kind, key.tp, key.algo) for key, series in profiler.here.series.items()}
    assert {("linear", 1, 0), ("linear", 2, 0), ("linear", 2, 1), ("attention", 2, 0), ("norm", 1, 0)} <= kinds
    assert not {("norm", 2, 0), ("attention", 2, 1), ("norm", 1, 1)} & kinds


@pytest.mark.parametrize("name", ["bert-tiny", "t5-tiny", "resnet-tiny"])
def test_every_family_is_measured_and_found_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    model = resolve_model(name)
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    profiler.limits = TINY
    profiler.run(profiler.units([model], [1]), progress=lambda unit: None)
    costs = Profiled.open(tmp_path / "profile.json").device("cpu")
    shape = model.usual_shape(2)
    for op in model.distinct_ops:
        assert costs.columns(op, model.dtype, [shape], 1, 0, ("forward_s",)) is not None, op.name


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    arguments = ["profile", "--model", "gpt-tiny", "--tp", "1", "--device", "cpu", "--out", str(path), "--json"]
    assert run(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(path) and told["device"] == "cpu" and told["units_left"] == 0
    assert told["series"] >= len(GPT.distinct_ops) and told["points"] > told["series"] and told["held_out_points"] >= 2
    costs = Profiled.open(path)
    found = costs.device("cpu").columns(GPT.ops[2].op, GPT.dtype, [Shape.padded(2, 100)], 1, 0, ("forward_s", "backward_s"))
    assert found is not None and all(column[0] > 0 for column in found.values())
    assert costs.optimizer_s(1e6, "cpu") > 0
    before = path.read_bytes()
    assert run(arguments) == 0  # Nothing is left to do.
    assert json.loads(capsys.readouterr().out)["points"] == told["points"] and path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-tiny", "--tp", "1,x"], "--tp is '1,x'"),
        (["--model", "gpt-tiny", "--tp", "0"], "degrees start at 1"),
        (["--model", "gpt-tiny", "--tp", ""], "--tp is ''"),
        (["--model", "gpt-tiny", "--device", "gpu"], "--device is 'gpu'"),
        (["--model", "gpt-teeny"], "unknown model 'gpt-teeny'"),
        (["--model", "gpt-tiny", "--tp", "3"], "--tp is '3', which divides no op of gpt-tiny"),
        (["--model", "gpt-tiny", "--time-budget", "-5"], "--time-budget is -5.0"),
        (["--model", "gpt-tiny", "--time-budget", "nan"], "--time-budget is nan"),
        (["--model", "gpt-tiny", "--out", "/dev/full"], "--out is '/dev/full', which is not a file"),
        ([], "nothing to measure: give --model"),
        (["--merge", "no-such-profile.json"], "no-such-profile.json' does not exist"),
    ],
)
def test_wrong_input_is_told(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_last_values(["profile", "--out", str(tmp_path / "profile.json"), *arguments])) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_foreign_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "penstock-plan"}')
    with pytest.raises(InputError, match="not a profile"):
        Profiler.open(path, "cpu")
    assert run(["profile", "--model", "gpt-tiny", "--out", str(path)]) == 2
    assert path.read_text() == '{"format": "penstock-plan"}' and "not a profile" in capsys.readouterr().err


def test_profiles_of_other_machines_are_taken_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    other = Profiler.open(tmp_path / "other.json", "cpu")
    other.run(other.units([GPT], [1])[:1], progress=lambda name: None)
    for _ in range(2):
        assert run(["profile", "--out", str(tmp_path / "mine.json"), "--merge", str(tmp_path / "other.json")]) == 0
        mine = read_profile(tmp_path / "mine.json").devices["cpu"]
        theirs = read_profile(tmp_path / "other.json").devices["cpu"]
        assert mine.series == theirs.series and mine.done == theirs.done and mine.optimizer == theirs.optimizer


class _Loads:
    """Burners that burn nothing: how many, how busy, and whether they are there now."""

    asked: ClassVar[list[tuple[int, float]]] = []
    here: ClassVar[bool] = False

    def __init__(self, count: int, device: str, victim: int, share: float) -> None:
        assert (device, victim) == ("cpu", os.getpid())
        self.asked.append((count, share))

    def await_ready(self) -> None:
        _Loads.here = True

    def __enter__(self) -> _Loads:
        return self

    def __exit__(self, *_: object) -> None:
        _Loads.here = False


def slower_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes three times as long beside a load, everything else twice."""

    def measure_ops(ops: Any, places: Any, batch: Any, inputs: Any, **more: Any) -> list[OpMeasure]:
        kinds = {place.op.signature: place.op.kind for place in places}
        factor = {kind: (3.0 if kind == "attention" else 2.0) if _Loads.here else 1.0 for kind in kinds.values()}
        return [OpMeasure(signature, 1e-3 * factor[kind], 2e-3 * factor[kind], 0.01) for signature, kind in kinds.items()]

    monkeypatch.setattr(profiling, "measure_ops", measure_ops)
    monkeypatch.setattr(profiling, "Burners", _Loads)
    _Loads.asked.clear()


def test_ops_beside_loads_are_measured_once_and_kept_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower_beside(monkeypatch)
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    units = [unit for unit in profiler.units([GPT], [1], [0.5, 2.0]) if unit.load]
    assert profiler.run(units, progress=lambda name: None) == 2 and _Loads.asked == [(1, 0.5), (2, 1.0)]
    again = Profiler.open(tmp_path / "profile.json", "cpu")
    assert [unit for unit in again.units([GPT], [1], [0.5, 2.0]) if unit.load] == []  # it goes on where it was
    assert not again.here.series  # what is measured beside a load is no time of the device
    factors = {(point.op_class, point.load): point.beside_s / point.alone_s for point in again.here.beside}
    wanted = {(name, load): 3.0 if name == "attention" else 2.0 for name in ("attention", "matmul", "memory") for load in (0.5, 2.0)}
    assert factors == pytest.approx(wanted)


def test_the_command_measures_beside_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(GridLimits, "for_device", classmethod(lambda cls, kind: TINY))
    path = str(tmp_path / "profile.json")
    assert run(["profile", "--model", "gpt-tiny", "--tp", "1", "--beside", "1", "--out", path, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["beside"]["1.0"]) == {"attention", "matmul", "memory"}
    points = next(iter(read_profile(path).devices.values())).beside
    assert len(points) == 3 and all(point.alone_s > 0 and point.beside_s > 0 for point in points)


@pytest.mark.parametrize(("loads", "message"), [("a", "numbers such as 0.5,1,2"), ("0", "loads are above 0"), ("99", "at most 16")])
def test_loads_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], loads: str, message: str) -> None:
    assert run(["profile", "--model", "gpt-tiny", "--beside", loads, "--out", str(tmp_path / "profile.json")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_budget_holds_inside_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement takes ten seconds of a clock of our own: the first unit stays as coarse as it got, a later one is forgotten."""
    asked, now = quick(monkeypatch), [0.0]
    measured = profiling.measure_ops

    def slow(*given: Any, **more: Any) -> list[OpMeasure]:
        now[0] += 10.0
        return measured(*given, **more)

    monkeypatch.setattr(profiling, "measure_ops", slow)
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])
    profiler = Profiler.open(tmp_path / "p.json", "cpu")
    units = profiler.units([GPT], [1])
    assert len(units) > 1 and profiler.run(units, time_budget_s=5.0, progress=lambda name: None) == 1
    assert len(asked) == 1 and [len(series) for series in profiler.here.series.values()] == [1] * len(profiler.here.series)
    again = Profiler.open(tmp_path / "q.json", "cpu")
    assert again.run(units[:1], progress=lambda name: None) == 1
    whole, before_s = len(asked) - 1, now[0]
    third = Profiler.open(tmp_path / "r.json", "cpu")
    assert third.run(units, time_budget_s=10.0 * whole + 5.0, progress=lambda name: None) == 1
    assert now[0] - before_s <= 10.0 * (whole + 1) and third.here.done == [units[0].name]
    assert {key: len(series) for key, series in third.here.series.items()} == {key: len(s) for key, s in again.here.series.items()}


@pytest.mark.parametrize("noisy_sweeps", [0, 1, 2])
def test_a_disturbed_sweep_is_made_again(noisy_sweeps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out points that are off by more than a quarter show it; of two sweeps the better one stays, and no point of the other."""
    asked = quick(monkeypatch)
    measured, sizes = profiling.measure_ops, list[int]()

    def disturbed(ops: Any, places: Any, batch: Any, inputs: Any, **more: Any) -> list[OpMeasure]:
        found = measured(ops, places, batch, inputs, **more)
        sizes.append(batch.shape.tokens)
        sweep = sizes.count(sizes[0]) - 1
        factor = 3.0 - sweep if sweep < noisy_sweeps and batch.shape.tokens not in (sizes[0], max(sizes)) else 1.0
        return [dataclasses.replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor) for one in found]

    monkeypatch.setattr(profiling, "measure_ops", disturbed)
    monkeypatch.setattr(GridLimits, "for_device", classmethod(lambda cls, kind: TINY))
    profiler = Profiler.open(tmp_path / "p.json", "cpu")
    profiler.run([unit for unit in profiler.units([GPT], [1]) if unit.sweep == "sizes"], progress=lambda name: None)
    worst = max(abs(error) for _, error in profiler.here.held_out)
    assert sizes.count(sizes[0]) == (2 if noisy_sweeps else 1) and (worst > 0.25) == (noisy_sweeps == 2) and asked
    if noisy_sweeps == 2:  # the second was the less disturbed one
        assert worst < 1.5
    assert len({len(series.rows()) for series in profiler.here.series.values()}) == 1
    assert len(next(iter(profiler.here.series.values())).rows()) == len(set(sizes))


def test_repeats_and_warm_up_are_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick(monkeypatch)
    measured, given = profiling.measure_ops, list[Any]()

    def noted(*all_: Any, **more: Any) -> list[OpMeasure]:
        given.append((more["repeats"], more["warmups"], more["warmup_s"]))
        return measured(*all_, **more)

    monkeypatch.setattr(profiling, "measure_ops", noted)
    asked = ["profile", "--model", "gpt-tiny", "--tp", "1", "--out", str(tmp_path / "p.json"), "--json"]
    assert run([*asked, "--repeats", "7", "--warm-up", "0.5"]) == 0
    assert set(given) == {(7, 3, 0.5)}


def test_models_are_compared_with_their_parts_in_turns(tmp_path: Path) -> None:
    nothing = Profile({"gpu": DeviceProfile({})})
    profiler = Profiler(tmp_path / "profile.json", torch.device("cuda"), "gpu", GridLimits.for_device("cuda"), nothing)
    units = profiler.units([GPT, resolve_model("bert-tiny")], [1])
    rounds = [unit for unit in units if unit.round]
    assert units[-len(rounds) :] == rounds
    names = [(unit.model.name, unit.round) for unit in rounds]
    assert names == [(name, number) for number in range(1, ROUNDS + 1) for name in ("gpt-tiny", "bert-tiny")]


def test_rounds_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calmest tells of the host, all of them of the device."""
    quick(monkeypatch)
    found = [WholeFactors(1.0, 1.5, 2e-4), WholeFactors(1.1, 0.5, 1e-4), WholeFactors(1.5, 2.0, 3e-4)]
    monkeypatch.setattr(WholeChain, "factors", lambda _, smallest, number: found[number - 1])
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    profiler.limits, profiler.here.about["memory_bytes"] = TINY, 2**40
    profiler.run([Unit(GPT, f"whole {number}", 1) for number in (1, 2, 3)], progress=lambda name: None)
    (factors,) = {profiler.here.whole[op.signature] for op in GPT.distinct_ops}
    assert factors == WholeFactors(pytest.approx(1.2), 0.5, 1e-4)


def test_small_passes_of_our_own_models_are_measured_as_training_plays_them(tmp_path: Path) -> None:
    """On a GPU, and not as shards, which are never recorded."""
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    small, large = (random_model_batch(GPT, Lengths(rows, 64), torch.device("cpu")) for rows in (1, 2))
    busy = resolve_model("gpt-1.3b")
    assert not profiler._is_recorded(Unit(GPT, "sizes", 1), small)
    profiler.device = torch.device("cuda")
    assert profiler._is_recorded(Unit(GPT, "sizes", 1), small) and not profiler._is_recorded(Unit(GPT, "sizes", 2), small)
    assert profiler._is_recorded(Unit(busy, "sizes", 1), large)
    assert not profiler._is_recorded(Unit(busy, "sizes", 1), random_model_batch(GPT, Lengths(80, 64), torch.device("cpu")))


def test_a_gpu_that_worked_until_now_is_loaded_for_less_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.profiling.run.time.monotonic", lambda: now[0])
    profiler = Profiler.open(tmp_path / "profile.json", "cpu")
    assert profiler._loaded_s == 0.0
    profiler.device = torch.device("cuda")
    assert profiler._loaded_s == WARMUP_S
    profiler._busy_until_s = 100.0
    assert profiler._loaded_s == AGAIN_S < WARMUP_S
    now[0] += RESTED_S
    assert profiler._loaded_s == WARMUP_S
