"""Adding up a run of ops: recomputation, collectives, and a device that waits for its host."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.host_queue import waiting_s as simulated_waiting_s
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.clusters import resolve_cluster
from penstock.costs.memory import OpBytes, OpPeaks, activation_timeline, formula_bytes
from penstock.costs.roofline import Roofline
from penstock.errors import ProfileMissingError
from penstock.models import Model, Shape, resolve_model
from penstock.models.kept import walk
from penstock.models.modules import Chain, build_chain
from penstock.models.ops import Op
from penstock.models.segments import segments
from penstock.profiling.grid import sweep_lengths
from penstock.profiling.measure import random_model_batch
from penstock.timing.pass_times import OpSlice, pass_grid_s, rerun, rerun_positions, stage_passes, waited_s

GPT = resolve_model("gpt-1.3b")
CLUSTER = resolve_cluster("8xh200")
SHAPE = Shape.padded(4, 512)
TABLE = Roofline().table(GPT, [SHAPE], [1, 8], CLUSTER)
DEVICE = "h200-141gb"


def names(model: Model, start: int, stop: int) -> list[str]:
    return [place.name for place in model.ops[start:stop]]


def test_a_whole_layer_but_its_last_op_runs_again() -> None:
    layer = GPT.ops[1:9]
    assert [place.op.name for place in layer] == ["norm1", "qkv", "attention", "out", "norm2", "up", "act", "down"]
    assert rerun(layer, [0] * 8) == 7  # `down` saves only its input, which is back once `act` has run
    assert rerun(layer[:3], [0] * 3) == 3  # attention saves what it makes
    assert rerun(layer[:1], [0]) == 1 and rerun(layer[1:2], [0]) == 0
    assert rerun(layer[-1:], [1]) == 1  # split the other way it keeps a gathered input of its own
    assert rerun([], []) == 0


class Kernels(TorchDispatchMode):
    """Counts in how many passes over each op of a chain at least one kernel ran; views are none."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.passes = [0] * len(chain.ops)
        self._inside: int | None = None
        self._ran = False
        for index, op in enumerate(chain.ops):
            op.forward = partial(self._forward, index, op.forward)  # type: ignore[method-assign]

    def _forward(self, index: int, usual: Any, *args: Any) -> Any:
        self._inside, self._ran = index, False
        try:
            return usual(*args)
        finally:  # Recomputation leaves an op in the middle, by an exception, once all saved tensors are back.
            self.passes[index] += self._ran
            self._inside = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        self._ran = self._ran or (self._inside is not None and not view)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "resnet-tiny"])
def test_torch_runs_again_what_is_predicted(name: str) -> None:
    model, source = resolve_model(name), random.Random(name)
    batch = random_model_batch(model, sweep_lengths(model, 64 if model.seq_length else 2), torch.device("cpu"))
    chain = build_chain(model)
    kernels = Kernels(chain)
    for _ in range(6):
        # Not the embedding, whose lookups run again as they save indices, which belong to the micro-batch.
        flags = frozenset(index for index in range(1, model.num_ops - 1) if source.random() < 0.7)
        before = list(kernels.passes)
        with kernels:
            chain(batch, recompute=flags)["loss"].backward()
        again = [index for index in range(model.num_ops) if kernels.passes[index] - before[index] > 1]
        predicted = rerun_positions(model.ops, flags)
        assert again == predicted, [model.ops[index].name for index in sorted(set(again) ^ set(predicted))]


def test_sums_by_hand() -> None:
    start, stop = 3, 17
    ops = TABLE.chain[start:stop]
    flags = frozenset(range(6, 14))
    times = stage_passes(TABLE, OpSlice(GPT, start, stop, DEVICE, tp=8, recompute=flags), SHAPE)
    again = rerun_positions(GPT.ops[start:stop], flags)
    assert set(again) < flags
    assert times.forward_s == pytest.approx(TABLE.forward_s[ops, 0, 1, 0, 0].sum())
    assert times.backward_s == pytest.approx(TABLE.backward_s[ops, 0, 1, 0, 0].sum())
    assert times.recompute_s == pytest.approx(TABLE.forward_s[ops[again], 0, 1, 0, 0].sum()) and times.recompute_s > 0
    comm = TABLE.forward_comm_s[ops, 0, 1, 0, 0]
    back = TABLE.backward_comm_s[ops, 0, 1, 0, 0]
    assert times.forward_tp_s == pytest.approx(comm.sum()) and comm.sum() > 0
    assert times.backward_tp_s == pytest.approx(back.sum() + comm[again].sum())  # what runs again does so in the backward pass
    assert times.waiting_s == 0
    assert times.forward_pass_s == pytest.approx(times.forward_s + comm.sum())
    assert times.backward_pass_s == pytest.approx(times.backward_s + times.recompute_s + times.backward_tp_s)
    assert times.total_s == pytest.approx(times.forward_pass_s + times.backward_pass_s)
    twice = stage_passes(TABLE, OpSlice(GPT, start, stop, DEVICE, tp=8, recompute=flags), SHAPE, slower=2.0)
    assert twice.tp_s == pytest.approx(2 * times.tp_s) and twice.forward_s == times.forward_s


def test_ops_run_again_by_their_own_split() -> None:
    """Of norm2, up, act and down: `down` runs again only where it is divided the other way, whatever the ops before the segment are."""
    for own in (0, 1):
        algos = [1 - own] * 4 + [0, 0, 0, own]
        times = stage_passes(TABLE, OpSlice(GPT, 1, 9, DEVICE, tp=8, algos=algos, recompute={4, 5, 6, 7}), SHAPE)
        again = [4, 5, 6, 7] if own else [4, 5, 6]
        ops = TABLE.chain[1:9][again]
        assert times.recompute_s == pytest.approx(TABLE.forward_s[ops, 0, 1, [algos[place] for place in again], 0].sum())


def test_half_the_backward_arithmetic_of_trained_ops_is_weight_gradients() -> None:
    qkv = names(GPT, 0, 9).index("layers.0.qkv")
    times = stage_passes(TABLE, OpSlice(GPT, qkv, qkv + 1, DEVICE, tp=8), SHAPE)
    assert times.weight_s == pytest.approx(times.backward_s / 2) and times.backward_tp_s > 0
    attention = stage_passes(TABLE, OpSlice(GPT, qkv + 1, qkv + 2, DEVICE, tp=8), SHAPE)
    assert attention.backward_s > 0 and attention.weight_s == 0


def test_a_grid_of_shapes_has_the_passes_of_each() -> None:
    shapes = [SHAPE, Shape.padded(1, 64), Shape.padded(2, 2048)]
    table = Roofline().table(GPT, shapes, [8], CLUSTER)
    table = replace(table, host_s=np.random.default_rng(0).uniform(0, 1e-4, (len(table.op_names), len(table.shapes), 3, len(table.tps), 1)))
    ops = OpSlice(GPT, 3, 17, DEVICE, tp=8, recompute=frozenset(range(6, 14)))
    for shape, own in zip(shapes, pass_grid_s(table, ops, slower=1.5), strict=True):
        one = stage_passes(table, ops, shape, slower=1.5)
        assert own.tolist() == pytest.approx([one.forward_pass_s, one.backward_pass_s]) and one.waiting_s > 0


def test_the_way_an_op_is_split_counts() -> None:
    qkv = names(GPT, 0, 9).index("layers.0.qkv")
    plain, swapped = (stage_passes(TABLE, OpSlice(GPT, qkv, qkv + 1, DEVICE, 8, [algo]), SHAPE) for algo in (0, 1))
    assert plain.forward_tp_s == 0 and swapped.forward_tp_s > 0


def test_slices_add_up_without_recomputation() -> None:
    whole = stage_passes(TABLE, OpSlice(GPT, 0, GPT.num_ops, DEVICE), SHAPE)
    parts = [stage_passes(TABLE, OpSlice(GPT, a, b, DEVICE), SHAPE) for a, b in ((0, 50), (50, 51), (51, GPT.num_ops))]
    assert sum(part.total_s for part in parts) == pytest.approx(whole.total_s)


def test_what_the_table_does_not_hold_is_told() -> None:
    with pytest.raises(ProfileMissingError, match="tp=2"):
        stage_passes(TABLE, OpSlice(GPT, 0, 9, DEVICE, tp=2), SHAPE)
    with pytest.raises(ProfileMissingError, match="a100"):
        stage_passes(TABLE, OpSlice(GPT, 0, 9, "a100-40gb"), SHAPE)
    with pytest.raises(ProfileMissingError, match="was not built for"):
        stage_passes(TABLE, OpSlice(GPT, 0, 9, DEVICE), Shape.padded(1, 1))


PIECES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)


@settings(deadline=None)
@given(PIECES)
def test_waiting_is_what_a_queue_says(pieces: list[tuple[float, float]]) -> None:
    device_s, host_s = ([piece[side] for piece in pieces] for side in (0, 1))
    waited = waited_s(np.array(device_s), np.array(host_s))
    assert waited[-1] == pytest.approx(simulated_waiting_s(device_s, host_s), abs=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.sets(st.integers(0, 16)), st.floats(0, 3e-4))
def test_a_stage_waits_for_its_host(flags: set[int], issue_s: float) -> None:
    """Pieces in the order in which torch issues them: forward; then, from the back, each segment again and backward."""
    start, stop = 1, 18
    source = np.random.default_rng(0)
    table = replace(TABLE, host_s=source.uniform(0, issue_s or 1e-12, (len(TABLE.op_names), len(TABLE.shapes), 3, len(TABLE.tps), 1)))
    times = stage_passes(table, OpSlice(GPT, start, stop, DEVICE, recompute=flags), SHAPE)
    again = set(rerun_positions(GPT.ops[start:stop], flags))
    ops = TABLE.chain[start:stop]
    forward, backward = ([float(column[op, 0, 0, 0, 0]) for op in ops] for column in (TABLE.forward_s, TABLE.backward_s))
    host = [[float(table.host_s[op, TABLE.shape_index(SHAPE), side, TABLE.tp_index(1), 0]) for op in ops] for side in range(3)]
    device_s, host_s = list(forward), list(host[0])
    for part in reversed(segments(GPT.ops[start:stop], flags)):
        for index in range(part.start, part.stop):
            if index in again:
                device_s.append(forward[index])
                host_s.append(host[2][index])
        for index in reversed(range(part.start, part.stop)):
            device_s.append(backward[index])
            host_s.append(host[1][index])
    assert times.waiting_s == pytest.approx(simulated_waiting_s(device_s, host_s), abs=1e-12)
    assert times.forward_wait_s == pytest.approx(simulated_waiting_s(forward, host[0]), abs=1e-12)
    assert times.total_s == pytest.approx(sum(device_s) + times.waiting_s)


def test_peaks_are_taken_apart() -> None:
    assert OpPeaks(kept=3, forward_peak=20, backward_peak=50).bytes_of(made=10, input_gradients=5) == OpBytes(3, 7, 45)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny"])
def test_peaks_that_say_the_same_as_formulas_give_the_same_memory(name: str) -> None:
    model = resolve_model(name)
    shape = model.usual_shape(3)
    peaks: dict[str, OpPeaks] = {}
    for index, (op, _, before, after) in enumerate(walk(model, 0, model.num_ops, None)):
        own = formula_bytes(op, shape)
        sizes = {spec.name: spec.size_bytes(model.dtype).at(shape) for spec in op.carry}
        made = sum({tensor: sizes[key] for key, tensor in after.items() if tensor not in before.values()}.values())
        entering = sum(spec.size_bytes(model.dtype).at(shape) for spec in model.carry_before(index)
                       if spec.differentiable and after.get(spec.name) != before[spec.name])  # fmt: skip
        peaks.setdefault(op.signature, OpPeaks(own.kept, own.kept + own.workspace + made, own.backward_workspace + entering))

    def measured(op: Op, shape: Shape, tp: int, algo: int) -> OpPeaks:
        return peaks[op.signature]

    for recompute in (frozenset[int](), frozenset(range(1, model.num_ops - 2, 2)), frozenset(range(1, model.num_ops - 1))):
        plain = activation_timeline(model, 0, model.num_ops, shape, recompute=recompute)
        found = activation_timeline(model, 0, model.num_ops, shape, recompute=recompute, bytes_of=measured)
        assert found.held_bytes == plain.held_bytes and found.kept_bytes == plain.kept_bytes
        assert found.peak_bytes == pytest.approx(plain.peak_bytes)
