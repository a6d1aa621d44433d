"""The replay block by block against its plain twin, which goes op by op."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.replay import timeline_by_op

from penstock.costs.replay import OpBytes, OpPeaks, Replay, activation_timeline, formula_bytes
from penstock.models import Model, Op, Shape, resolve_model

NAMES = ("bert-tiny", "gpt-1.3b", "gpt-tiny", "llama-tiny", "resnet-tiny", "t5-tiny", "vgg-tiny")
MODELS = {name: resolve_model(name) for name in NAMES}


def peaks(op: Op, shape: Shape, tp: int, algo: int) -> OpBytes | OpPeaks:
    """As a profile answers: measured peaks for some ops, formulas for the others."""
    found = formula_bytes(op, shape, tp, algo)
    return found if len(op.signature) % 2 else OpPeaks(found.kept, 3 * found.kept + 4096, 5 * found.kept + 8192)


@st.composite
def slices(draw: st.DrawFn) -> tuple[Model, int, int, Shape, int, list[int], frozenset[int]]:
    """A slice of a model, a micro-batch, a degree, splits of its ops, and ops to recompute: any, or whole runs of blocks."""
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    start = draw(st.integers(0, model.num_ops - 1))
    stop = draw(st.integers(start + 1, model.num_ops))
    shape = model.usual_shape(draw(st.integers(1, 4)))
    algos = [draw(st.integers(0, len(place.op.splits) - 1)) if draw(st.booleans()) else 0 for place in model.ops[start:stop]]
    first = draw(st.integers(0, stop - start - 1))
    flags = draw(st.one_of(st.frozensets(st.integers(0, stop - start - 1)), st.just(frozenset(range(first, stop - start)))))
    return model, start, stop, shape, draw(st.sampled_from([1, 2, 4])), algos, flags


@settings(max_examples=150, deadline=None)
@given(slices(), st.sampled_from([formula_bytes, peaks]))
def test_every_slice_equals_the_replay_op_by_op(
    case: tuple[Model, int, int, Shape, int, list[int], frozenset[int]], bytes_of: object
) -> None:
    assert activation_timeline(*case, bytes_of) == timeline_by_op(*case, bytes_of)  # type: ignore[arg-type]


def test_one_replay_serves_many_slices() -> None:
    """What was worked out for one slice must not leak into another with other neighbours, flags or splits."""
    for name in ("t5-tiny", "gpt-tiny"):
        model = MODELS[name]
        shape = model.usual_shape(2)
        replay = Replay(model, shape, 2)
        for start in range(0, model.num_ops, 3):
            for stop in range(start + 1, model.num_ops + 1, 5):
                for flags in (frozenset(), frozenset(range(2, stop - start)), frozenset(range(0, stop - start, 2))):
                    assert replay.timeline(start, stop, None, flags) == timeline_by_op(model, start, stop, shape, 2, None, flags)


def test_equal_blocks_are_replayed_once() -> None:
    model = MODELS["gpt-1.3b"]
    asked: list[str] = []

    def counted(op: Op, shape: Shape, tp: int, algo: int) -> OpBytes:
        asked.append(op.signature)
        return formula_bytes(op, shape, tp, algo)

    Replay(model, model.usual_shape(1), 1, counted).timeline(0, model.num_ops)
    assert len(asked) == len(set(asked)) == len(model.distinct_ops)


def test_measured_peaks_less_what_the_replay_counts_itself() -> None:
    """What an op makes and keeps, and the gradients of its input, are on the books already."""
    assert OpPeaks(10.0, 100.0, 50.0).bytes_of(30.0, 20.0) == OpBytes(10.0, 60.0, 30.0)
