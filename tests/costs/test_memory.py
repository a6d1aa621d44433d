"""Memory accounting against hand computations, and against the union rule of `models.kept`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.kept import kept_bytes

from penstock.costs.memory import (
    CUDA_CONTEXT_BYTES,
    NCCL_BYTES,
    OPTIMIZER_CHUNK,
    MemoryBreakdown,
    OpBytes,
    activation_timeline,
    formula_bytes,
    rank_parameters,
    stage_memory,
    state_bytes,
)
from penstock.errors import InputError
from penstock.models import Block, Model, Op, Shape, TensorSpec, resolve_model
from penstock.models.ops import Split
from penstock.models.shapes import Form, Quantity

MODELS = {name: resolve_model(name) for name in ("gpt-tiny", "bert-tiny", "t5-tiny", "llama-tiny", "resnet-tiny", "vgg-tiny")}
GPT = MODELS["gpt-tiny"]


def whole(amount: float) -> Quantity:
    return Quantity(whole=Form.of(samples=amount))


def op(name: str, size: int, *, saves: bool = True, own: float = 0, workspace: float = 0, backward: float = 0) -> Op:
    """hidden → hidden of `size` values per sample."""
    split = Split(kept=whole(own), saves_in=("hidden",) if saves else ())
    return Op(name, "test", {"name": name, "source": "hidden", "output": "hidden"}, (TensorSpec("hidden", ("samples", size)),),
              workspace=whole(workspace), backward_workspace=whole(backward), splits=(split,))  # fmt: skip


def chain(*ops: Op) -> Model:
    """A model whose input carry has 100 values per sample, in fp32."""
    return Model("chain", "test", "fp32", ((Block("block", ops), 1),), inputs=(TensorSpec("hidden", ("samples", 100)),))


SMALL = chain(op("a", 200, own=8, workspace=40), op("b", 300, backward=80), op("c", 10))
ONE = Shape(1)


def test_timeline_by_hand() -> None:
    # Tensors: x 400 bytes, a 800, b 1200, c 40. All inputs are saved, and 8 bytes of a's own.
    timeline = activation_timeline(SMALL, 0, 3, ONE)
    assert timeline.kept_bytes == timeline.held_bytes == 400 + 8 + 800 + 1200
    assert timeline.forward_peak_bytes == 2408 + 40
    # Backward of c holds everything and two gradients; of b 1208 + gradients of b and a + its workspace; c is the fullest.
    assert timeline.backward_peak_bytes == 2408 + 40 + 1200
    assert activation_timeline(SMALL, 0, 2, ONE).backward_peak_bytes == 1208 + 1200 + 800 + 80


def test_recomputed_segment_by_hand() -> None:
    timeline = activation_timeline(SMALL, 0, 3, ONE, recompute={0, 1})
    assert timeline.kept_bytes == 400 + 1200
    # Forward, b's input and output are alive at once above x; then c saves b.
    assert timeline.forward_peak_bytes == 400 + 800 + 1200
    # The segment comes back as a whole: once it is filled in, x, a, b and the gradient of b are alive.
    assert timeline.backward_peak_bytes == 1208 + 1200 + 1200


def test_an_input_that_no_op_saves_is_held_but_not_kept() -> None:
    timeline = activation_timeline(chain(op("a", 200, saves=False)), 0, 1, ONE)
    assert (timeline.kept_bytes, timeline.held_bytes, timeline.forward_peak_bytes) == (0, 400, 1200)


def test_a_residual_is_one_tensor() -> None:
    shape, width = Shape.padded(2, 16), 64 * 4
    norm = GPT.ops[1]
    assert norm.name == "layers.0.norm1"
    timeline = activation_timeline(GPT, 1, 2, shape)
    assert timeline.kept_bytes == 32 * (width + 8)
    assert timeline.forward_peak_bytes == 32 * (2 * width + 8)
    # Backward: gradients of hidden, of the residual, and of the input they both come from.
    assert timeline.backward_peak_bytes == 32 * (width + 8) + 3 * 32 * width


@st.composite
def slices(draw: st.DrawFn) -> tuple[Model, int, int, Shape, int, frozenset[int]]:
    """A slice of a model, a micro-batch, a degree, and ops to recompute."""
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    start = draw(st.integers(0, model.num_ops - 1))
    stop = draw(st.integers(start + 1, model.num_ops))
    shape = model.usual_shape(draw(st.integers(1, 4)))
    recompute = draw(st.frozensets(st.integers(0, stop - start - 1)))
    return model, start, stop, shape, draw(st.sampled_from([1, 2])), recompute


@settings(max_examples=200, deadline=None)
@given(slices())
def test_kept_bytes_follow_the_union_rule(case: tuple[Model, int, int, Shape, int, frozenset[int]]) -> None:
    model, start, stop, shape, tp, recompute = case
    timeline = activation_timeline(model, start, stop, shape, tp, recompute=recompute)
    assert timeline.kept_bytes == pytest.approx(kept_bytes(model, start, stop, shape, tp, recompute=recompute))
    assert timeline.kept_bytes <= timeline.held_bytes <= timeline.peak_bytes


@settings(deadline=None)
@given(slices())
def test_memory_grows_with_the_micro_batch(case: tuple[Model, int, int, Shape, int, frozenset[int]]) -> None:
    model, start, stop, _, tp, recompute = case
    small, large = (activation_timeline(model, start, stop, model.usual_shape(n), tp, recompute=recompute) for n in (1, 3))
    assert small.kept_bytes <= large.kept_bytes and small.peak_bytes <= large.peak_bytes


def test_recomputing_whole_layers_saves_most_of_the_memory() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(4, 2048)
    layers = range(1, 193)
    plain, lean = (activation_timeline(model, 0, 193, shape, recompute=flags) for flags in ((), layers))
    hidden, inside = 4 * 2048 * 2048 * 2, plain.kept_bytes / 24
    assert lean.kept_bytes == 24 * hidden
    assert 23 * hidden + inside < lean.peak_bytes < 24 * hidden + 1.5 * inside


def test_measured_bytes_replace_the_formulas() -> None:
    plain = activation_timeline(SMALL, 0, 3, ONE)
    measured = activation_timeline(SMALL, 0, 3, ONE, bytes_of=lambda *op: formula_bytes(*op)._replace(kept=50.0))
    assert measured.kept_bytes == plain.kept_bytes - 8 + 150
    huge = activation_timeline(SMALL, 0, 3, ONE, bytes_of=lambda *op: OpBytes(0, 1e6, 2e6))
    assert (huge.forward_peak_bytes, huge.backward_peak_bytes) == (2400 + 40 + 1e6, 2400 + 1200 + 40 + 2e6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (2, 2, 4, 8)),
        ({"precision": "fp16", "optimizer": "sgd"}, (2, 2, 4, 4)),
        ({"precision": "fp32"}, (4, 4, 0, 8)),
        ({"zero": 1, "dp": 4}, (2, 2, 1, 2)),
        ({"zero": 2, "dp": 4}, (2, 0.5, 1, 2)),
        ({"zero": 3, "dp": 4}, (0.5, 0.5, 1, 2)),
        ({"gradients": "fp32"}, (2, 4, 4, 8)),
        ({"gradients": "fp32", "zero": 2, "dp": 4}, (2, 1, 1, 2)),
        ({"trainable": False}, (2, 0, 0, 0)),
        ({"trainable": False, "zero": 3, "dp": 2}, (1, 0, 0, 0)),
    ],
)
def test_state_bytes_per_parameter(arguments: dict[str, object], expected: tuple[float, ...]) -> None:
    state = state_bytes(1000, **arguments)  # type: ignore[arg-type]
    got = (state.weights_bytes, state.gradients_bytes, state.master_weights_bytes, state.moments_bytes)
    assert got == tuple(1000 * amount for amount in expected)
    assert state.total_bytes == state.state_bytes == sum(got)


def test_stage_memory_by_hand() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(1, 2048)
    timeline = activation_timeline(model, 1, 97, shape)
    memory = stage_memory(model, 1, 97, shape, in_flight=3, dp=2, zero=1, slack=0.1)
    parameters = 12 * (12 * 2048**2 + 13 * 2048)
    boundary = 2048 * 2048 * 2
    assert memory.weights_bytes == memory.gradients_bytes == 2 * parameters
    assert (memory.master_weights_bytes, memory.moments_bytes) == (2 * parameters, 4 * parameters)
    assert memory.activations_bytes == pytest.approx(3 * timeline.kept_bytes)
    assert memory.activations_bytes + memory.workspace_bytes == pytest.approx(2 * timeline.kept_bytes + timeline.peak_bytes)
    assert memory.buffers_bytes == 2 * boundary + 2 * boundary + 25 * 2**20
    assert memory.context_bytes == CUDA_CONTEXT_BYTES + NCCL_BYTES
    assert stage_memory(model, 0, model.num_ops, shape).context_bytes == CUDA_CONTEXT_BYTES  # nobody to talk to
    for start, stop in ((0, 97), (97, model.num_ops)):  # the other stage
        assert stage_memory(model, start, stop, shape).context_bytes == CUDA_CONTEXT_BYTES + NCCL_BYTES
    small, few = Shape.padded(1, 256), activation_timeline(model, 1, 97, Shape.padded(1, 256))
    assert few.peak_bytes - few.kept_bytes < 4 * OPTIMIZER_CHUNK < few.kept_bytes  # which are gone when the optimizer takes its piece
    assert stage_memory(model, 1, 97, small).workspace_bytes == pytest.approx(few.peak_bytes - few.kept_bytes)
    assert memory.slack_bytes == pytest.approx((memory.total_bytes - memory.slack_bytes - memory.context_bytes) * 0.1)


def test_gradients_in_fp32_take_twice_the_bytes_and_room_to_be_made() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(1, 2048)
    for dp, zero in ((1, 0), (2, 1)):
        plain, wide = (stage_memory(model, 1, 97, shape, dp=dp, zero=zero, gradients=dtype) for dtype in ("", "fp32"))
        assert wide.gradients_bytes == 2 * plain.gradients_bytes and wide.weights_bytes == plain.weights_bytes
        assert wide.workspace_bytes == plain.workspace_bytes + 4 * 2 * 2048  # a norm; products add to the sums by themselves
    (last,) = (op.parameters.at(shape) for op in model.distinct_ops if op.kind == "logits")
    plain, wide = (stage_memory(model, 97, model.num_ops, shape, gradients=dtype) for dtype in ("", "fp32"))
    assert wide.workspace_bytes == pytest.approx(plain.workspace_bytes + 4 * last)  # its weight is shared: autograd adds both gradients


def test_the_optimizer_step_may_be_the_fullest_moment() -> None:
    def step(**more: Any) -> float:
        memory = stage_memory(model, 0, 1, Shape.padded(1, 1), bytes_of=lambda *op: OpBytes(0, 0, 0), **more)
        return memory.activations_bytes + memory.workspace_bytes

    model = resolve_model("gpt-1.3b")
    parameters = rank_parameters(model.ops[:1])[0][1]
    assert step() == 4 * OPTIMIZER_CHUNK < 4 * parameters
    assert step(dp=16, zero=1) == 4 * parameters / 16
    assert step(precision="fp32") == 2048 * 2  # gradients are fp32 already: only the op's output is left


def test_shared_weights_count_once_in_a_stage_that_holds_both() -> None:
    model = resolve_model("gpt-1.3b")
    assert sum(count for _, count in rank_parameters(model.ops)) == model.num_parameters
    embedding = 51200 * 2048
    head = model.ops[-3:]
    assert sum(count for _, count in rank_parameters(head)) == pytest.approx(embedding + 2 * 2048)
    assert sum(count for _, count in rank_parameters(model.ops, tp=4)) < model.num_parameters / 3.9
    bert = resolve_model("bert-base")
    assert sum(count for _, count in rank_parameters(bert.ops)) == bert.num_parameters


def test_frozen_ops_have_no_gradient_and_no_state() -> None:
    block = GPT.runs[1][0]
    frozen = replace(GPT, runs=(GPT.runs[0], (replace(block, ops=tuple(replace(o, trainable=False) for o in block.ops)), 4), GPT.runs[2]))
    plain, lean = (stage_memory(model, 1, 33, Shape.padded(1, 64)) for model in (GPT, frozen))
    assert lean.weights_bytes == plain.weights_bytes > 0
    assert lean.gradients_bytes == lean.moments_bytes == lean.master_weights_bytes == 0


def test_cpu_has_no_context_and_zero3_gathers_weights() -> None:
    shape = Shape.padded(1, 64)
    assert stage_memory(GPT, 0, GPT.num_ops, shape, device="cpu").context_bytes == 0
    assert stage_memory(GPT, 0, GPT.num_ops, shape, context_bytes=7.0).context_bytes == 7
    two, three = (stage_memory(GPT, 0, GPT.num_ops, shape, dp=4, zero=zero) for zero in (2, 3))
    blocks = {(place.block, place.copy): 0.0 for place in GPT.ops}
    for place, (_, count) in zip(GPT.ops, rank_parameters(GPT.ops), strict=True):
        blocks[place.block, place.copy] += count
    largest = 4 * max(blocks.values())  # bytes in fp32: gradients as they were made and on their way, weights in use and on their way
    assert (two.buffers_bytes, three.buffers_bytes) == (2 * largest, 4 * largest) and three.total_bytes < two.total_bytes


@settings(deadline=None)
@given(slices(), st.integers(1, 5), st.integers(0, 3), st.sampled_from([1, 2, 8]))
def test_breakdown_sums_and_is_never_negative(
    case: tuple[Model, int, int, Shape, int, frozenset[int]], in_flight: int, zero: int, dp: int
) -> None:
    model, start, stop, shape, tp, recompute = case
    memory = stage_memory(model, start, stop, shape, in_flight=in_flight, tp=tp, recompute=recompute, zero=zero, dp=dp)
    *parts, (name, total, share) = memory.rows()
    assert (name, share) == ("total", 1.0)
    assert all(size >= 0 for _, size, _ in parts)
    assert sum(size for _, size, _ in parts) == pytest.approx(total) == pytest.approx(memory.total_bytes)
    assert sum(part for _, _, part in parts) == pytest.approx(1.0)


def test_breakdowns_add() -> None:
    both = MemoryBreakdown(1, 2, 3, 4, 5, 6, 7, 8, 9) + MemoryBreakdown(weights_bytes=10)
    assert (both.weights_bytes, both.context_bytes, both.total_bytes) == (11, 9, 55)
    assert MemoryBreakdown().rows()[-1] == ("total", 0.0, 1.0)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="adamw"):
        state_bytes(1, optimizer="adam")
    with pytest.raises(InputError, match="bf16"):
        state_bytes(1, precision="bf15")
    with pytest.raises(InputError, match="zero=4"):
        state_bytes(1, zero=4)
    with pytest.raises(InputError, match="in_flight=0"):
        stage_memory(GPT, 0, 1, ONE, in_flight=0)
