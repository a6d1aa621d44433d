"""Costs from the profile that the package ships: tables, what had to be modelled, the optimizer, and measured bytes."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.clusters import resolve_cluster
from penstock.costs.memory import OpPeaks, formula_bytes, stage_memory
from penstock.costs.profile import DeviceProfile, OptimizerPoint, Profile, coordinates, read_profile, series_key
from penstock.costs.profiled import Profiled
from penstock.costs.roofline import Roofline
from penstock.costs.sources import shipped_profiles
from penstock.errors import ProfileMissingError
from penstock.models import Model, Shape, resolve_model
from penstock.models.kept import walk
from penstock.models.ops import Op

H200 = "h200-141gb"
PROFILE = read_profile(shipped_profiles()[H200])
CLUSTER = resolve_cluster("8xh200")
MODELS = ("gpt-1.3b", "llama-1b", "bert-large", "t5-770m", "wide-resnet-500m")


def shapes_of(model: Model) -> list[Shape]:
    if not model.seq_length:
        return [Shape.images(count) for count in (1, 5, 32, 200)]
    if model.dec_length:
        return [Shape.padded(8, 300, 100), Shape.padded(100, 512, 512), Shape.padded(1, 8, 8)]
    return [Shape.padded(8, 300), Shape.packed([17, 200, 512, 64, 450] * 8), Shape.padded(1, 8), Shape.packed([2048] * 64)]


@pytest.mark.parametrize("name", MODELS)
def test_tables_are_finite_at_every_degree_and_shape(name: str) -> None:
    model, costs = resolve_model(name), Profiled(PROFILE)
    shapes = shapes_of(model)
    table = costs.table(model, shapes, [1, 2, 4, 8], CLUSTER)
    roofline = Roofline().table(model, shapes, [1, 2, 4, 8], CLUSTER)
    possible = np.isfinite(roofline.forward_s)
    for measured in (table.forward_s, table.backward_s):
        assert np.array_equal(np.isfinite(measured), possible)
        assert (measured[possible] >= 0).all() and not np.isnan(measured).any()
    assert (table.forward_s[table.chain, :, :, 0, 0].sum(0) > 0).all()
    assert table.host_s.shape == (len(table.op_names), len(shapes), 3, 4, 1) and (table.host_s >= 0).all() and (table.host_s < 0.02).all()
    assert np.array_equal(table.kept_bytes, roofline.kept_bytes)
    assert not costs.notes(model)


def test_the_table_holds_what_was_measured() -> None:
    model, costs = resolve_model("gpt-1.3b"), Profiled(PROFILE)
    shape = Shape.padded(8, 512)
    table = costs.table(model, [shape], [1, 4], CLUSTER)
    device = PROFILE.devices[H200]
    for o, op in enumerate(model.distinct_ops):
        for t, tp in enumerate((1, 4)):
            series = device.series[series_key(op, "bf16", tp, 0, "padded")]
            size, length = coordinates(op, shape)
            rows = zip(*(series.columns[name] for name in ("size", "length", "forward_s")), strict=True)
            here = [row for row in rows if row[:2] == (size, length)]
            assert here, op.name
            low, high = (device.whole[op.signature].of_device(end(row[2] for row in here)) for end in (min, max))
            assert 0.999 * low <= table.forward_s[o, 0, t, 0, 0] <= 1.001 * high


def test_more_ranks_never_make_a_large_step_slower() -> None:
    model = resolve_model("gpt-1.3b")
    table = Profiled(PROFILE).table(model, [Shape.padded(16, 1024)], [1, 2, 4, 8], CLUSTER)
    total = (table.forward_s + table.backward_s)[table.chain, 0, :, 0, 0].sum(0)
    assert (np.diff(total) < 0).all()


def test_what_was_not_measured_is_modelled_and_said() -> None:
    model = resolve_model("gpt-1.3b")
    device = PROFILE.devices[H200]
    attention = next(op for op in model.distinct_ops if op.kind == "attention")
    kept = {key: series for key, series in device.series.items() if key.op != attention.signature}
    costs = Profiled(Profile({H200: DeviceProfile(device.about, series=kept)}))
    shape = Shape.padded(8, 512)
    table, roofline = costs.table(model, [shape], [1], CLUSTER), Roofline(in_company=False).table(model, [shape], [1], CLUSTER)
    assert costs.notes(model)[0].endswith("modelled by the roofline: attention.")
    where = table.op_names.index("attention")
    assert table.forward_s[where] == pytest.approx(roofline.forward_s[where])
    assert not table.host_s[where].any()
    other = table.op_names.index("qkv")
    assert table.forward_s[other, 0, 0, 0, 0] != roofline.forward_s[other, 0, 0, 0, 0]


def test_another_model_is_modelled_as_a_whole() -> None:
    costs = Profiled(PROFILE)
    model = resolve_model("gpt-2.6b" if "gpt-2.6b" in _names() else "gpt-small")
    table = costs.table(model, [Shape.padded(4, 512)], [1], CLUSTER)
    assert costs.notes(model) and np.isfinite(table.forward_s[:, :, :, 0]).all()


def _names() -> dict[str, str]:
    from penstock.models.catalog import model_names

    return model_names()


def test_an_unknown_device_is_told() -> None:
    costs = Profiled(PROFILE, "mine.json")
    for cluster in ("8xa100-40gb", "8xh200+1xp4d.24xlarge"):
        with pytest.raises(ProfileMissingError, match=r"'mine.json' was measured on h200-141gb, but the cluster has 'a100-40gb'"):
            costs.table(resolve_model("gpt-1.3b"), [Shape.padded(1, 512)], [1], resolve_cluster(cluster))
    with pytest.raises(ProfileMissingError, match="measured on nothing"):
        Profiled(Profile()).device("h200-141gb")


def test_the_optimizer_step_comes_from_measured_steps() -> None:
    costs = Profiled(PROFILE)
    measured_s = costs.optimizer_s(1.3e9, H200, gradients="fp32")
    assert measured_s == pytest.approx(1.3e9 * 1.05e-11, rel=0.1)  # 2.7 ms for 260 million weights
    assert costs.optimizer_s(2.6e9, H200, gradients="fp32") == pytest.approx(2 * measured_s)
    assert costs.optimizer_s(1.3e9, H200) == costs.optimizer_s(1.3e9, H200, gradients="bf16") == pytest.approx(16 / 18 * measured_s)
    assert costs.optimizer_s(1e9, H200, optimizer="sgd") == Roofline(in_company=False).optimizer_s(1e9, H200, optimizer="sgd")
    bare = Profiled(Profile({H200: DeviceProfile({})}))
    assert bare.optimizer_s(1e9, H200) == Roofline().optimizer_s(1e9, H200)
    assert bare.optimizer_s(1e9, H200, gradients="fp32") == Roofline().optimizer_s(1e9, H200, gradients="fp32")


def test_an_optimizer_step_takes_some_time_for_each_weight_and_for_each_tensor() -> None:
    points = [OptimizerPoint("bf16", n, t, n * 1e-11 + t * 1e-6) for n, t in ((1e8, 100.0), (1e8, 300.0), (4e8, 100.0))]
    costs = Profiled(Profile({H200: DeviceProfile({}, optimizer=points)}))
    assert costs.optimizer_s(1e9, H200, num_tensors=10, gradients="fp32") == pytest.approx(1e-2 + 1e-5)
    assert costs.optimizer_s(1e6, H200, num_tensors=400, gradients="bf16") == pytest.approx(16 / 18 * (1e-5 + 4e-4))


def test_what_recomputing_costs_the_host_is_measured_by_itself() -> None:
    model, device = resolve_model("gpt-1.3b"), PROFILE.devices[H200]
    table = Profiled(PROFILE).table(model, [Shape.padded(8, 512)], [1], CLUSTER)
    for o, op in enumerate(model.distinct_ops):
        expected_s = device.whole[op.signature].recompute_host_s or table.host_s[o, 0, 0, 0, 0]
        assert table.host_s[o, 0, 2, 0, 0] == pytest.approx(expected_s)
    assert any(device.whole[op.signature].recompute_host_s for op in model.distinct_ops)


def test_libraries_hold_what_was_measured() -> None:
    assert Profiled(PROFILE).memory_of(H200, "bf16").base_bytes == PROFILE.devices[H200].base_bytes > 0


def test_measured_peaks_give_about_the_memory_that_formulas_give() -> None:
    model, costs = resolve_model("gpt-1.3b"), Profiled(PROFILE)
    shape = Shape.padded(8, 1024)
    source = costs.memory_of(H200, "bf16").bytes_of
    assert isinstance(source(model.ops[2].op, shape, 1, 0), OpPeaks)
    for recompute in (frozenset[int](), frozenset(range(1, model.num_ops - 3))):
        by_formula = stage_memory(model, 0, model.num_ops, shape, recompute=recompute)
        measured = stage_memory(model, 0, model.num_ops, shape, recompute=recompute, bytes_of=source)
        assert measured.activations_bytes == by_formula.activations_bytes and measured.state_bytes == by_formula.state_bytes
        assert measured.total_bytes == pytest.approx(by_formula.total_bytes, rel=0.03)


def test_bytes_of_an_op_that_was_not_measured_come_from_its_formulas() -> None:
    device = PROFILE.devices[H200]
    op = resolve_model("gpt-1.3b").ops[2].op
    bare = Profiled(Profile({H200: DeviceProfile(device.about, base_bytes=1.0)}))
    assert bare.memory_of(H200, "bf16").bytes_of(op, Shape.padded(1, 512), 1, 0) == formula_bytes(op, Shape.padded(1, 512))
    on_cpu = Profiled(Profile({"cpu": DeviceProfile({}, series=device.series)}))  # no bytes are measured there
    assert on_cpu.memory_of("cpu", "bf16").bytes_of(op, Shape.padded(1, 512), 1, 0) == formula_bytes(op, Shape.padded(1, 512))


def _described_growth(model: Model, index: int, shape: Shape) -> float:
    """What the description says an op adds: the carry tensors it makes, and what only it keeps."""
    ((op, split, _, after),) = walk(model, index, index + 1, None)
    sizes = {spec.name: spec.size_bytes(model.dtype).at(shape) for spec in op.carry}
    return sum(sizes[name] for name, tensor in after.items() if tensor == (index, name)) + split.kept.at(shape)


def _shape_at(op: Op, size: float, length: float) -> Shape:
    return Shape(0, tokens=round(size), squares=round(size * length))


@pytest.mark.parametrize("name", ["gpt-1.3b", "llama-1b", "bert-large"])
def test_memory_grew_as_described(name: str) -> None:
    model, device = resolve_model(name), PROFILE.devices[H200]
    errors: list[float] = []
    kinds = set()
    for place in {p.op.signature: p for p in model.ops if p.op.kind in ("linear", "norm", "attention")}.values():
        for layout in ("padded", "packed"):
            series = device.series[series_key(place.op, "bf16", 1, 0, layout)]
            kinds.add(place.op.kind)
            for size, length, growth in zip(*(series.columns[c] for c in ("size", "length", "growth_bytes")), strict=True):
                expected = _described_growth(model, place.index, _shape_at(place.op, size, length))
                # The allocator hands out blocks that may be up to 1 MiB larger than asked for, rather than leave a small rest.
                assert expected * 0.99 <= growth <= expected * 1.01 + 2 * 2**20, (place.name, size, length)
                errors.append(abs(growth / expected - 1))
    assert kinds == {"linear", "norm", "attention"}
    assert float(np.median(errors)) < 0.001 and np.mean(np.array(errors) < 0.01) > 0.9
