"""A chain beside its parts: the host at its calmest, the device over shapes of no grid, each round others."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from penstock.costs.profile import HOST_COLUMNS, DeviceProfile
from penstock.costs.profiled import DeviceCosts
from penstock.models import resolve_model
from penstock.models.modules import build_chain
from penstock.profiling.grid import Lengths
from penstock.profiling.measure import hold_gradients, random_model_batch
from penstock.profiling.whole import LASTING_S, ROUNDS, TURNS, WholeChain
from penstock.timing.pass_times import rerun_positions

CPU = torch.device("cpu")
GPT = resolve_model("gpt-tiny")


def chain_of(passes_s: Any, monkeypatch: pytest.MonkeyPatch) -> WholeChain:
    """One whose passes take what is said, and whose parts 2 s on the device and 0.5 s on the host."""
    monkeypatch.setattr(WholeChain, "_passes_s", lambda _, batch, recompute, count=4: passes_s(batch, recompute, count))
    monkeypatch.setattr(WholeChain, "_sum_of_parts", lambda _, shape, names, mark_s=0.0: 0.5 if names is HOST_COLUMNS else 2.0)
    return WholeChain(GPT, build_chain(GPT), DeviceCosts(DeviceProfile({})), CPU, 0.5)


def test_the_calmest_moment_of_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anything recomputed, and with it; in turns, so that both have calm moments."""
    paces = [*[1.4, 1.0, 1.9] * TURNS]
    clock, asked = iter(range(10**6)), list[bool]()
    monkeypatch.setattr("penstock.profiling.whole.time.perf_counter", lambda: next(clock) * LASTING_S)

    def passes_s(batch: Any, recompute: Any, count: int) -> float:
        if count != 4:
            return 2.0
        asked.append(bool(recompute))
        return paces[len(asked) // 2] * (0.75 if recompute else 0.25)

    found = chain_of(passes_s, monkeypatch).factors(Lengths(2, 8), 1)
    rerun = len(rerun_positions(GPT.ops, range(1, GPT.num_ops - 3)))
    assert (found.host, found.recompute_host_s) == pytest.approx((0.25 / 0.5, 0.5 / rerun))
    assert asked == [False, True] * TURNS


def test_each_round_has_shapes_of_its_own_which_run_until_clocks_are_those_of_lasting_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short one pass is; those passes do not count, and as many as they were do."""
    now, shapes = [0.0], list[Any]()
    monkeypatch.setattr("penstock.profiling.whole.time.perf_counter", lambda: now[0])

    def passes_s(batch: Any, recompute: Any, count: int) -> float:
        shapes.append(batch.shape)
        found = len(set(shapes))
        now[0] += 9.0 if shapes.count(batch.shape) == 1 else 0.15 * found
        return 1e9

    chain = chain_of(passes_s, monkeypatch)
    for number in range(1, ROUNDS + 1):
        known = len(set(shapes))
        wanted = [0.15 * (known + found) / 2.0 for found in range(1, 5)]
        assert chain._device_factor(number, 0.0) == pytest.approx(statistics.geometric_mean(wanted))
    runs = [shapes.count(shape) for shape in dict.fromkeys(shapes)]
    assert runs == [1 + 2 * math.ceil(0.5 / (0.15 * found) - 1e-9) for found in range(1, len(runs) + 1)]
    assert len(runs) == 4 * ROUNDS and {shape.layout for shape in shapes} == {"padded", "packed"}


def test_work_that_does_not_fit_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("penstock.profiling.whole.time.perf_counter", lambda: now[0])

    def passes_s(batch: Any, recompute: Any, count: int) -> float:
        if batch.shape.tokens > 8_000:
            raise torch.OutOfMemoryError
        now[0] += 3.0
        return 3.0

    chain = chain_of(passes_s, monkeypatch)
    with pytest.warns(UserWarning, match="not compared"):
        assert [chain._device_factor(number, 0.0) for number in (1, 2, 3)] == pytest.approx([1.5, 1.0, 1.0])


def test_a_mark_takes_what_small_work_lacks_where_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 2 s, played in 1.5 and 1.7 s, of so many forward and backward passes; such work runs the kernels that training plays."""
    made = list[tuple[int, bool]]()

    def lasting_s(self: WholeChain, batch: Any) -> float | None:
        made.append((batch.shape.tokens, batch.at_once))
        return {2: 1.5, 8: 1.7}[batch.shape.samples]

    chain = chain_of(lambda batch, recompute, count: 0.0, monkeypatch)
    monkeypatch.setattr(WholeChain, "_lasting_s", lasting_s)
    monkeypatch.setattr("penstock.profiling.whole.random_model_batch", lambda model, lengths, _: random_model_batch(model, lengths, CPU))
    on_gpu = WholeChain(GPT, chain.chain, chain.costs, torch.device("cuda"), 0.5)
    assert on_gpu._mark_s() == pytest.approx((0.5 + 0.3) / 2 / (2 * GPT.num_ops))
    assert made == [(2 * min(96, GPT.seq_length), True), (8 * min(96, GPT.seq_length), True)]
    monkeypatch.setattr(WholeChain, "_lasting_s", lambda self, batch: None)
    assert on_gpu._mark_s() == 0.0


def test_a_processor_has_no_marks_that_take_time() -> None:
    assert WholeChain(GPT, build_chain(GPT), DeviceCosts(DeviceProfile({})), CPU, 0.5)._mark_s() == 0.0


def test_real_passes_take_time() -> None:
    model = GPT.shortened(1)
    chain = build_chain(model)
    hold_gradients(chain.parameters())
    batch = random_model_batch(model, Lengths(2, 8), CPU)
    assert WholeChain(model, chain, DeviceCosts(DeviceProfile({})), CPU, 0.5)._passes_s(batch, (1, 2), 1) > 0
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in chain.parameters())


def test_the_time_of_a_pass_is_the_mean_of_those_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only passes move: two or four of them take as long each."""
    now = [0.0]

    def passes(batch: Any, recompute: Any) -> dict[str, torch.Tensor]:
        now[0] += 3.0
        return {"loss": torch.zeros((), requires_grad=True)}

    monkeypatch.setattr("penstock.profiling.whole.time.perf_counter", lambda: now[0])
    whole = WholeChain(GPT, passes, DeviceCosts(DeviceProfile({})), CPU, 0.5)  # type: ignore[arg-type]
    assert [whole._passes_s(None, (), count) for count in (1, 2, 4)] == [3.0] * 3  # type: ignore[arg-type]
