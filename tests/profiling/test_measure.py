"""Measuring ops in a chain: every distinct op gets times of its own, forward and backward."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from penstock.models import resolve_model
from penstock.models.modules import Chain, OpModule, build_chain
from penstock.models.modules.base import Carry
from penstock.models.modules.batch import Batch
from penstock.models.ops import Model
from penstock.profiling.grid import Lengths, sweep_lengths
from penstock.profiling.marks import CpuTimes
from penstock.profiling.measure import (
    OpMeasure,
    _host_of_whole,
    _medians,
    _run,
    _warm_up,
    _without_marks,
    measure_ops,
    random_carry,
    random_model_batch,
)

CPU = torch.device("cpu")
FAMILIES = ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "resnet-tiny")
SLEEP_S = 0.006


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_batch(model: Model) -> Batch:
    return random_model_batch(model, sweep_lengths(model, 64 if model.seq_length else 2), CPU)


def measure(chain: Chain, model: Model, batch: Batch, repeats: int = 1) -> dict[str, OpMeasure]:
    found = measure_ops(list(chain.ops), model.ops, batch, model.inputs, warmups=1, repeats=repeats)
    assert len(found) == len({m.signature for m in found})
    return {m.signature: m for m in found}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_distinct_op_is_measured(name: str) -> None:
    model = resolve_model(name).shortened(3)
    found = measure(build_chain(model), model, small_batch(model))
    assert set(found) == {op.signature for op in resolve_model(name).distinct_ops}
    for m in found.values():
        assert m.forward_s > 0 and m.backward_s > 0 and m.spread >= 0, m
        assert m.forward_host_s == m.backward_host_s == 0 and m.growth_bytes == m.forward_peak_bytes == 0  # a CPU has none


_now_s = [0.0]


class _Virtual(CpuTimes):
    """A clock that only sleeping ops move, so that what else the machine does is not seen."""

    def mark(self) -> float:
        return _now_s[0]


class _Sleep(torch.autograd.Function):
    """The same tensor, late by the virtual clock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _now_s[0] += SLEEP_S
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _now_s[0] += 2 * SLEEP_S
        return grads[0]


def make_slow(op: OpModule, at: str) -> None:
    """Lets one op sleep on what it makes, or on what it reads, in both passes."""
    usual = type(op).forward
    made = op.config.get("output", op.op.carry[0].name)
    read = op.config.get("source", "hidden")

    def forward(carry: Carry, batch: Batch) -> Carry:
        if at == "input":
            return usual(op, {**carry, read: _Sleep.apply(carry[read])}, batch)
        following = usual(op, carry, batch)
        return {**following, made: _Sleep.apply(following[made])}

    op.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("at", ["output", "input"])
def test_time_belongs_to_the_op_that_takes_it(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.profiling.measure.times_for", lambda device: _Virtual())
    model = resolve_model(name).shortened(1)
    batch = small_batch(model)
    chain = build_chain(model)
    signatures = [place.op.signature for place in model.ops]
    lone = [place.index for place in model.ops if signatures.count(place.op.signature) == 1]
    # What an op hands on as `residual` is also read behind its back, so only ops that do not put their input aside are slowed there.
    fitting = [index for index in lone if at == "output" or (
        index > 0 and chain.ops[index].config.get("source") in {spec.name for spec in model.carry_before(index)}
        and not chain.ops[index].config.get("residual"))]  # fmt: skip
    assert len(fitting) >= 3
    for index in fitting:
        make_slow(chain.ops[index], at)
        found = measure(chain, model, batch)
        slow = found.pop(signatures[index])
        assert (slow.forward_s, slow.backward_s) == pytest.approx((SLEEP_S, 2 * SLEEP_S)), model.ops[index].name
        wrong = {m.signature: m for m in found.values() if m.forward_s or m.backward_s}
        assert not wrong, (model.ops[index].name, wrong)
        del chain.ops[index].forward


def test_a_slice_of_the_chain_starts_from_a_random_carry() -> None:
    model = resolve_model("gpt-tiny").shortened(1)
    attention = next(place for place in model.ops if place.op.kind == "attention")
    start, stop = attention.index - 1, attention.index + 2
    batch = random_model_batch(model, Lengths(4, 32, layout="packed"), CPU)
    carry = random_carry(model.carry_before(start), batch.shape, 1, CPU, torch.float32)
    assert all(tensor.requires_grad and tensor.shape[0] == 128 for tensor in carry.values())
    chain = build_chain(model, start, stop)
    found = measure_ops(list(chain.ops), model.ops[start:stop], batch, model.carry_before(start), warmups=1, repeats=1)
    assert [m.signature for m in found] == [place.op.signature for place in model.ops[start:stop]]


def test_gradients_are_in_place_before_anything_is_timed() -> None:
    model = resolve_model("gpt-tiny").shortened(1)
    chain = build_chain(model, dtype=torch.bfloat16)
    measure(chain, model, small_batch(model))
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in chain.parameters())


class _Issued(_Virtual):
    """A device far behind its host: whatever takes time takes the host's."""

    def host_between(self, first: float, second: float) -> float:
        return second - first


def test_a_pass_without_marks_says_what_its_host_takes() -> None:
    model = resolve_model("gpt-tiny").shortened(1)
    chain, batch = build_chain(model), small_batch(model)
    make_slow(chain.ops[2], "output")
    found = _host_of_whole(lambda marks: _run(list(chain.ops), {}, batch, marks, whole=True), _Issued(), 2)
    assert found == pytest.approx((SLEEP_S, 2 * SLEEP_S))


def test_host_times_of_ops_add_up_to_those_of_the_whole() -> None:
    marked = [(1.0, 1.0, 30.0, 80.0), (1.0, 1.0, 50.0, 60.0), (1.0, 1.0, 40.0, 0.0)]  # marks take 10 of each forward, 20 of each backward
    found = _without_marks(marked, (90.0, 100.0))
    assert [one[2:] for one in found] == [pytest.approx(pair) for pair in ((20.0, 60.0), (40.0, 40.0), (30.0, 0.0))]
    assert [one[:2] for one in found] == [(1.0, 1.0)] * 3
    scarce = _without_marks(marked, (15.0, 200.0))  # an op that took hardly longer than its mark keeps a part; a slower whole counts too
    assert sum(one[2] for one in scarce) == pytest.approx(15.0) and all(one[2] > 0 for one in scarce)
    assert sum(one[3] for one in scarce) == pytest.approx(200.0)


@pytest.mark.parametrize("at_once", [False, True])
def test_passes_that_training_plays_are_timed_with_the_kernels_that_it_plays(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device: its host issues those that run one by one."""
    model, seen = resolve_model("gpt-tiny").shortened(1), list[bool]()
    chain, batch = build_chain(model), small_batch(model)
    plain, gpu = chain.ops[2].forward, _Gpu()

    def forward(carry: Any, batch: Any) -> Any:
        seen.append(batch.at_once)
        gpu.now_s += 100.0 * batch.at_once
        return plain(carry, batch)

    monkeypatch.setattr(chain.ops[2], "forward", forward)
    monkeypatch.setattr("penstock.profiling.measure.times_for", lambda device: gpu)
    monkeypatch.setattr("penstock.profiling.measure.time.perf_counter", lambda: gpu.now_s)
    monkeypatch.setattr("penstock.profiling.measure._books", lambda once: [(0.0, 0.0, 0.0)] * len(chain.ops))
    found = measure_ops(list(chain.ops), model.ops, batch, [], warmups=1, repeats=2, at_once=at_once)
    op = next(one for one in found if one.signature == model.ops[2].op.signature)
    assert set(seen) == {False, at_once} and seen[-1] is False
    assert op.forward_s == 1.0 and op.forward_host_s < 0.5 * sum(one.forward_host_s for one in found)


class _Gpu:
    """A device on which everything takes a second, as setting a mark takes its host."""

    now_s = 0.0

    def mark(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def finish(self) -> None:
        """Nothing is outstanding."""

    def between(self, first: float, second: float) -> float:
        return 1.0

    def host_between(self, first: float, second: float) -> float:
        return second - first

    def get_ahead(self, seconds: float) -> None:
        """Nobody waits for it."""


def test_a_shortened_model_has_the_same_distinct_ops() -> None:
    for name in FAMILIES:
        model = resolve_model(name)
        assert model.shortened(1).distinct_ops == model.distinct_ops
        assert max(copies for _, copies in model.shortened(2).runs) <= 2


def test_medians_leave_the_first_of_many_copies_out() -> None:
    """It pays for what the micro-batch makes once and shares. The spread is half of what lies between the quartiles."""
    model = resolve_model("gpt-tiny")
    places = [place for place in model.ops if place.op.name == "qkv"]
    assert len(places) >= 3
    times = [[(100.0 * (copy == 0) + run + 1, 2.0, 3.0, 4.0) for copy in range(len(places))] for run in range(5)]
    books = [(1000.0 * (copy == 0) + 7.0, 8.0, 9.0) for copy in range(len(places))]
    (found,) = _medians(places, times, books)
    forward = [float(run + 1) for run in range(5) for _ in places[1:]]
    low, _, high = statistics.quantiles([one + 2.0 for one in forward], n=4)
    assert (found.forward_s, found.backward_s, found.forward_host_s, found.backward_host_s) == (3.0, 2.0, 3.0, 4.0)
    assert found.spread == pytest.approx((high - low) / 2 / 5.0) and found.growth_bytes == 7.0


@pytest.mark.parametrize(("took_s", "issued_s", "passes"), [(0.005, 0.001, 102), (0.2, 0.01, 4), (0.005, 0.0045, 2)])
def test_what_keeps_a_device_busy_is_timed_at_the_clocks_of_lasting_load(
    took_s: float, issued_s: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second of passes goes before, of short ones as of long ones; not where the device waits for its host."""
    ran = []
    now = [0.0]
    monkeypatch.setattr("penstock.profiling.measure.time.perf_counter", lambda: now[0])

    class Device(CpuTimes):
        def finish(self) -> None:
            now[0] += took_s - issued_s

    def once() -> None:
        ran.append(now[0])
        now[0] += issued_s

    assert _warm_up(once, Device(), 2, 0.5) == pytest.approx((took_s, issued_s))
    assert len(ran) == passes
