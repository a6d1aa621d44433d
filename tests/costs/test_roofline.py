"""The roofline table against hand computations, and what must hold for any micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from counted_work import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.kept import kept_bytes

from penstock.clusters import resolve_cluster
from penstock.costs.collectives import collective_s, group_of
from penstock.costs.efficiency import load_calibration
from penstock.costs.roofline import Roofline, tp_group
from penstock.costs.source import CostSource
from penstock.costs.table import CostTable
from penstock.errors import InputError
from penstock.models import Shape, resolve_model
from penstock.models.catalog import model_from_mapping

GPT = resolve_model("gpt-1.3b")
H200 = resolve_cluster("8xh200")
ROOFLINE: CostSource = Roofline(in_company=False)
LENGTHS = st.lists(st.integers(1, 2048), min_size=1, max_size=16)


def table(shapes: Sequence[Shape], tps: Sequence[int] = (1,), model: str = "gpt-1.3b", cluster: str = "8xh200") -> CostTable:
    return ROOFLINE.table(resolve_model(model), shapes, tps, resolve_cluster(cluster))


def test_a_linear_op_by_hand() -> None:
    costs = table([Shape.padded(4, 2048)], [1, 4])
    qkv, tokens = costs.op_names.index("qkv"), 8192
    curves = load_calibration().of("h200-141gb").curves("gemm")
    flops = 2 * tokens * 2048 * 6144
    expected_s = (flops / 989e12 + curves.flops.half_s) / curves.flops.e_max + 6e-6
    assert costs.forward_s[qkv, 0, 0, 0, 0] == pytest.approx(expected_s)
    assert costs.forward_s[qkv, 0, 1, 0, 0] == pytest.approx((flops / 4 / 989e12 + curves.flops.half_s) / curves.flops.e_max + 6e-6)
    back = load_calibration().of("h200-141gb").curves("gemm", backward=True)
    assert costs.backward_s[qkv, 0, 0, 0, 0] == pytest.approx((2 * flops / 989e12 + back.flops.half_s) / back.flops.e_max + 12e-6)
    assert costs.parameters[qkv, :, 0].tolist() == [2048 * 6144 + 6144, (2048 * 6144 + 6144) / 4]


def test_frozen_weights_have_half_a_backward_pass() -> None:
    """A product of matrices for the gradient of its input, and none for that of the weight; what multiplies no weight has all of it."""
    (embedding, (block, copies), *rest) = GPT.runs
    frozen = replace(GPT, runs=(embedding, (replace(block, ops=tuple(replace(op, trainable=False) for op in block.ops)), copies), *rest))
    plain, lean = (ROOFLINE.table(model, [Shape.padded(4, 2048)], (1,), H200) for model in (GPT, frozen))
    back = load_calibration().of("h200-141gb").curves("gemm", backward=True).flops
    qkv, flops = lean.op_names.index("qkv"), 2 * 8192 * 2048 * 6144
    assert lean.backward_s[qkv, 0, 0, 0, 0] == pytest.approx((flops / 989e12 + back.half_s) / back.e_max + 12e-6)
    assert lean.forward_s.tolist() == plain.forward_s.tolist()
    for name in ("attention", "act"):
        assert lean.backward_s[lean.op_names.index(name)] == pytest.approx(plain.backward_s[plain.op_names.index(name)])


def test_an_elementwise_op_by_hand() -> None:
    costs = table([Shape.padded(4, 2048)])
    act, moved = costs.op_names.index("act"), 8192 * 2 * 8192 * 2
    curve = load_calibration().of("h200-141gb").curves("elementwise").bytes
    assert costs.forward_s[act, 0, 0, 0, 0] == pytest.approx((moved / 4.8e12 + curve.half_s) / curve.e_max + 6e-6)


def test_fp32_convolutions_run_as_tf32() -> None:
    costs = table([Shape.images(64)], model="resnet-50", cluster="1xa100-40gb")
    conv = costs.op_names.index("conv2")
    flops = 2 * 9 * 64 * 64 * 56 * 56 * 64
    curve = load_calibration().of("a100-40gb").curves("conv").flops
    assert costs.forward_s[conv, 0, 0, 0, 0] == pytest.approx((flops / 156e12 + curve.half_s) / curve.e_max + 6e-6)


def test_tensor_parallel_collectives_by_hand() -> None:
    costs = table([Shape.padded(4, 2048)], [1, 8])
    size = 8192 * 2048 * 2
    out, qkv = costs.op_names.index("out"), costs.op_names.index("qkv")
    assert costs.forward_comm_s[out, 0, 1, 0, 0] == pytest.approx(collective_s("all_reduce", size, H200, range(8)))
    assert costs.backward_comm_s[out, 0, 1, 0, 0] == 0
    assert costs.backward_comm_s[qkv, 0, 1, 0, 0] == pytest.approx(collective_s("all_reduce", size, H200, range(8)))
    assert costs.forward_comm_s[qkv, 0, 1, 1, 0] == pytest.approx(collective_s("reduce_scatter", 3 * size, H200, range(8)))
    assert not costs.forward_comm_s[:, :, 0].any() and not costs.backward_comm_s[:, :, 0].any()


def test_impossible_degrees_and_splits_are_infinite() -> None:
    costs = table([Shape.padded(1, 128)], [1, 8, 16, 64], cluster="2xp4d.24xlarge+1xg5.xlarge")
    qkv, norm, attention = (costs.op_names.index(name) for name in ("qkv", "norm1", "attention"))
    a100, a10g = (costs.device_index(name) for name in ("a100-40gb", "a10g"))
    finite = np.isfinite(costs.forward_s[:, 0])
    assert finite[qkv, :, 0, a100].tolist() == [True, True, True, False]  # 32 heads, and only 16 devices
    assert finite[norm, :, 0, a10g].tolist() == [True, False, False, False]  # one device
    assert finite[attention, 0, :, a100].tolist() == [True, False] and finite[qkv, 0, :, a100].all()
    assert np.array_equal(np.isfinite(costs.backward_s), np.isfinite(costs.forward_s))
    assert np.isfinite(costs.forward_comm_s).all()


def test_a_group_stays_in_a_node_if_one_is_large_enough() -> None:
    cluster = resolve_cluster("1xg5.xlarge+2xp4d.24xlarge+1xg5.24xlarge")
    (a10g, _), (a100, _) = cluster.kinds
    assert tp_group(cluster, a10g, 4) == group_of(cluster, range(17, 21))
    assert tp_group(cluster, a100, 8) == group_of(cluster, range(1, 9))
    assert tp_group(cluster, a10g, 5) == group_of(cluster, [0, 17, 18, 19, 20])
    assert tp_group(cluster, a10g, 6) is None


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 512))
def test_more_tokens_take_longer(lengths: list[int], more: int) -> None:
    costs = table([Shape.packed(lengths), Shape.packed([*lengths, more])], [1, 2])
    for times in (costs.forward_s, costs.backward_s, costs.forward_comm_s, costs.backward_comm_s, costs.kept_bytes):
        assert (times[:, 1] >= times[:, 0]).all()


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 2048))
def test_packing_equal_lengths_is_padding_nothing_but_for_attention(rows: int, length: int) -> None:
    costs = table([Shape.padded(rows, length), Shape.packed([length] * rows)])
    others = [index for index, name in enumerate(costs.op_names) if name != "attention"]
    assert np.array_equal(costs.forward_s[others, 0], costs.forward_s[others, 1])
    assert np.array_equal(costs.backward_s[others, 0], costs.backward_s[others, 1])


@settings(deadline=None)
@given(LENGTHS)
def test_packing_never_costs_more_than_padding_but_in_attention(lengths: list[int]) -> None:
    costs = table([Shape.padded(len(lengths), max(lengths)), Shape.packed(lengths)])
    others = [index for index, name in enumerate(costs.op_names) if name != "attention"]
    assert (costs.forward_s[others, 1] <= costs.forward_s[others, 0]).all()


def test_attention_pays_for_squares_and_the_rest_for_tokens() -> None:
    costs = table([Shape.packed([65536]), Shape.packed([512] * 128)])
    attention = costs.op_names.index("attention")
    others = [index for index in range(len(costs.op_names)) if index != attention]
    assert costs.forward_s[attention, 0].min() > 20 * costs.forward_s[attention, 1, 0, 0, 0]
    assert np.array_equal(costs.forward_s[others, 0], costs.forward_s[others, 1])


def test_tp_halves_the_work_of_large_ops() -> None:
    costs = table([Shape.padded(512, 2048)], [1, 2, 4])
    for name in ("qkv", "attention", "up", "act"):  # not `out` and `down`, whose output and residual every rank reads and writes whole
        forward = costs.forward_s[costs.op_names.index(name), 0, :, 0, 0]
        assert forward[:2] / forward[1:] == pytest.approx([2, 2], rel=0.05), name


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "t5-tiny", "resnet-tiny", "vgg-tiny", "llama-tiny"])
def test_kept_bytes_of_the_chain_add_up(name: str) -> None:
    model = resolve_model(name)
    shape = model.usual_shape(3)
    costs = table([shape], [1, 2], model=name)
    for index, tp in enumerate((1, 2)):
        total = costs.kept_bytes[costs.chain, 0, index, 0].sum()
        assert total == pytest.approx(kept_bytes(model, 0, model.num_ops, shape, tp))


def test_boundaries_are_what_a_cut_sends() -> None:
    shape = Shape.padded(2, 512)
    costs = table([shape], [1, 4])
    for place, number in enumerate(costs.chain):
        for index, tp in enumerate((1, 4)):
            assert costs.input_bytes[number, 0, index, 0] == GPT.boundary_bytes(place).at(shape, tp)
            assert costs.output_bytes[number, 0, index, 0] == GPT.boundary_bytes(place + 1).at(shape, tp)


def test_the_prediction_is_near_what_an_h200_was_measured_to_do() -> None:
    # GPT 1.4B, packed, forward and backward: 62 to 65 thousand tokens a second.
    shape = Shape.packed([400] * 40)
    costs = table([shape])
    total_s = (costs.forward_s + costs.backward_s)[costs.chain, 0, 0, 0, 0].sum()
    assert 50e3 < shape.tokens / total_s < 80e3


def test_the_optimizers_step() -> None:
    curve = load_calibration().of("h200-141gb").curves("optimizer").bytes
    assert ROOFLINE.optimizer_s(1e9, "h200") == pytest.approx(curve.time_s(40e9, 4.8e12))
    assert ROOFLINE.optimizer_s(1e9, "h200", gradients="fp32") == pytest.approx(curve.time_s(45e9, 4.8e12))  # two bytes more, 2.5 times
    assert ROOFLINE.optimizer_s(0, "h200") == 0
    with pytest.raises(InputError, match="unheard"):
        ROOFLINE.optimizer_s(1e9, "unheard")
    with pytest.raises(InputError, match="0 and 1"):
        table([])


def test_a_large_table_is_made_of_arrays() -> None:
    """A million times: ops, degrees and devices are worked through one by one, shapes all at once."""
    model, cluster = resolve_model("resnet-50"), resolve_cluster("2xp4d.24xlarge+2xg5.24xlarge+1xh200")
    shapes = [Shape.images(samples) for samples in range(1, 1001)]
    costs = ROOFLINE.table(model, shapes, [1, 2, 4, 8], cluster)
    few, many = (counted_calls(lambda n=n: ROOFLINE.table(model, shapes[:n], [1, 2, 4, 8], cluster)) for n in (100, 1000))  # type: ignore[misc]
    assert many < 1.1 * few
    assert costs.forward_s.shape[0] >= 40 and costs.forward_s.shape[1:] == (1000, 4, 2, 3)


def test_rates_that_are_guesses_are_told() -> None:
    (note,) = Roofline(cluster=resolve_cluster("2xcpu")).notes(GPT)
    assert "rates of cpu are a guess" in note and "penstock profile" in note
    assert Roofline(cluster=H200).notes(GPT) == ()


@pytest.mark.parametrize("lengths", [[200, 200], [64, 64], [40, 24], [300, 50, 10]])
def test_a_window_takes_what_packed_sequences_see_of_it(lengths: list[int]) -> None:
    """Counted pair by pair; where lengths are unequal it may be a little more, but never as much as without a window."""
    window, rest = 64, {"base": "llama-tiny", "seq_length": 512}
    model, full = (model_from_mapping({**rest, "window": size}, "test", "test") for size in (window, 0))
    [own] = [op for op in model.distinct_ops if op.kind == "attention"]
    packed, padded = Shape.packed(lengths), Shape.padded(len(lengths), max(lengths))
    seen = sum(min(at + 1, window) for length in lengths for at in range(length))
    share, all_pairs = own.seen_share(packed), sum(length * (length + 1) / 2 for length in lengths)
    assert share >= 0.99 * seen / all_pairs
    if len(set(lengths)) == 1:
        assert share == pytest.approx(seen / all_pairs, rel=0.01)
    times = [Roofline().table(each, [packed, padded], [1], resolve_cluster("1xa10g")) for each in (model, full)]
    for name in ("forward_s", "backward_s"):
        of_window, of_full = (getattr(table, name).sum(axis=0).ravel() for table in times)
        assert of_window[0] == of_full[0] if share == 1 else of_window[0] < of_full[0]
        assert of_window[1] == of_full[1], "padded rows work on a mask"
