from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime_cases import MODELS
from training_jobs import RandomSource, collected, rank_of

from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.batch import Batch, Sequences
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import model_of
from penstock.programs.instructions import Load, Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.parallel.recordings import _fill, _own_batch, _Recording, _shape_key
from penstock.runtime.parallel.stage import StageModule
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.world import ProcessGroups
from penstock.schedules.actions import FORWARD
from penstock.schedules.rules import schedule_of
from penstock.timing.recorded import FewShapes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _batch(lengths: tuple[int, ...], layout: Any = "padded") -> Batch:
    tokens = 9 * len(lengths) if layout == "padded" else sum(lengths)
    width = 9 if layout == "padded" else max(lengths)
    own = Sequences(torch.arange(tokens) + sum(lengths), lengths, layout, width, torch.arange(len(lengths)))
    return Batch(labels=torch.arange(tokens), weights=torch.ones(tokens) / sum(lengths), own=own)


def test_padded_micro_batches_of_other_lengths_have_the_same_shape() -> None:
    assert _shape_key(_batch((3, 7))) == _shape_key(_batch((9, 1)))
    assert _shape_key(_batch((3, 7))) != _shape_key(_batch((9, 9)))  # no padding: other kernels
    assert _shape_key(_batch((3, 7))) != _shape_key(_batch((3, 7, 2)))


def test_packed_micro_batches_of_as_many_tokens_have_the_same_shape() -> None:
    assert _shape_key(_batch((3, 7), "packed")) == _shape_key(_batch((4, 4, 2), "packed"))
    assert _shape_key(_batch((3, 7), "packed")) != _shape_key(_batch((7, 4), "packed"))


def test_a_micro_batch_is_read_where_another_was() -> None:
    """Row 0 of the second is full: its bounds are fewer, and the rest say that no token is left."""
    first, second = _batch((3, 7)), _batch((9, 4))
    kept = _own_batch(first)
    entering = {"hidden": torch.zeros(4)}
    recording = _Recording(kept, entering, {}, {}, {}, None, None)  # type: ignore[arg-type]
    _fill(recording, second, {"hidden": torch.ones(4)})
    assert kept.own is not None and second.own is not None and first.own is not None
    assert torch.equal(kept.own.ids, second.own.ids) and not torch.equal(first.own.ids, second.own.ids)
    assert all(map(torch.equal, kept.own.pieces(causal=True), second.own.pieces(causal=True)))
    assert torch.equal(kept.own.key_padding(), second.own.key_padding()) and entering["hidden"].all()


def test_packed_samples_are_read_where_others_were() -> None:
    """Where their pieces are, and not how many: what tells samples apart stays as it was."""
    first, second = _batch((3, 7), "packed"), _batch((4, 4, 2), "packed")
    kept = _own_batch(first)
    _fill(_Recording(kept, {}, {}, {}, {}, None, None), second, {})  # type: ignore[arg-type]
    assert kept.own is not None and second.own is not None
    assert all(map(torch.equal, kept.own.pieces(causal=True), second.own.pieces(causal=True)))
    assert torch.equal(kept.own.positions, second.own.positions) and len(kept.own.bounds) == 3


def test_heads_on_samples_find_their_first_tokens_where_others_were() -> None:
    """Of BERT: there are as many samples, with the empty ones that bring their number to one that comes again."""
    first, second = _batch((3, 7, 0, 0), "packed"), _batch((4, 4, 2, 0), "packed")
    for batch in (first, second):
        batch.next_sentence = torch.zeros(4, dtype=torch.int64)
    assert _shape_key(first) == _shape_key(second) != _shape_key(_batch((4, 6), "packed"))
    kept = _own_batch(first)
    _fill(_Recording(kept, {}, {}, {}, {}, None, None), second, {})  # type: ignore[arg-type]
    assert kept.own is not None and kept.own.first_tokens.tolist() == [0, 4, 8, 9]


class _Shapes:
    """Recordings as far as what they bring to few shapes."""

    def __init__(self, stage: StageModule) -> None:
        plan = stage.world.plan
        self.shapes = FewShapes.of(stage.model.ops[stage.stage.first : stage.stage.last], plan, stage.stage)

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("layout", "schedule", "lengths", "row", "recorded", "brought"),
    [
        ("padded", "gpipe", (5, 9, 3), 10, True, 16),
        ("padded", "gpipe", (24, 24, 24), 24, True, 24),
        ("packed", "gpipe", (5, 9, 5), 0, True, 24),
        ("padded", "interleaved", (5, 9, 3), 10, False, 10),
        ("padded", "interleaved", (24, 24, 24), 24, True, 24),
        ("packed", "interleaved", (5, 9, 5), 0, False, 0),
    ],
)
def test_what_is_to_be_recorded(layout: Any, schedule: str, lengths: tuple[int, ...], row: int, recorded: bool, brought: int) -> None:
    """Where a stage is the whole model, brought to a size that comes again; in a pipeline, where all rows are the plan's own."""
    plan = _plan("gpt", layout, schedule, dropout=0.0, heads=2)
    assert plan.seq_length == 24
    rank = rank_of(plan, ProcessGroups("cpu"), TrainingSettings())
    micro = MicroBatch(0, (0, 1, 2), layout, lengths, (), row)
    for stage in rank.stages.values():
        assert not stage.is_recorded(micro) and stage.as_recorded(micro, 1) == micro  # a processor records nothing
        stage.recordings = _Shapes(stage)  # type: ignore[assignment]
        assert stage.is_recorded(micro) is recorded
        assert stage.as_recorded(micro, 1).row_length == brought
    orders = schedule_of(plan.schedule, plan.num_stages, 1, plan.num_chunks)
    forwards = tuple(tuple(action for action in order if action.kind == FORWARD) for order in orders)
    for training in (True, False):
        program = lower(plan, model_of(plan), (ReplicaWork((micro,), orders if training else forwards),), 0, training=training)[0]
        load = next(one for one in program.instructions if isinstance(one, Load))
        (batch,) = rank._loaded(program, load, RandomSource(model_of(plan))).values()
        assert batch.at_once is (recorded and training) and batch.own is not None
        tokens = sum(lengths) if layout == "packed" else 3 * row
        wanted = tokens if not training or not recorded else brought * (1 if layout == "packed" else 3)
        assert batch.own.ids.numel() == wanted


def _plan(family: str, layout: Any, schedule: str, **changes: Any) -> Plan:
    fields = MODELS[family] | changes
    plan = Plan(fields, "1xh200", 9, (), MicroBatching(layout, "fixed", 3), 1, schedule, seq_length=fields.get("seq_length", 0),
                dec_length=fields.get("dec_length", 0), precision="bf16", gradients="fp32")  # fmt: skip
    ops = model_of(plan).num_ops
    cut = ops // 2
    stages = (Stage(0, cut, ((0,),)), Stage(cut, ops, ((0,),), recompute=(((cut, cut + 3),),)))
    return replace(plan, stages=stages if schedule == "interleaved" else (Stage(0, ops, ((0,),), recompute=(((2, 5),),)),))


def _programs(plan: Plan, steps: int, row: int = 8) -> list[Program]:
    """Three micro-batches a step, all between their passes at once, of rows that are padded differently each time."""
    model, made = model_of(plan), []
    for step in range(steps):
        micros = []
        for index in range(3):
            ids = tuple(range(3 * index, 3 * index + 3))
            lengths = tuple(1 + (step * 5 + index * 3 + sample * 2) % 8 for sample in ids) if model.seq_length else ()
            dec_lengths = tuple(1 + (step + sample) % 6 for sample in ids) if model.dec_length else ()
            layout = plan.micro_batching.layout
            rows = (0, 0) if layout == "packed" or not lengths else (row, 8 if dec_lengths else 0)
            micros.append(MicroBatch(index, ids, layout, lengths, dec_lengths, *rows))
        work = ReplicaWork(tuple(micros), schedule_of(plan.schedule, plan.num_stages, 3, plan.num_chunks))
        made.append(lower(plan, model, (work,), step)[0])
    return made


class _NeverPlayed(_Shapes):
    """Recordings that are still to come: micro-batches are brought to few shapes, and run one by one."""

    def __contains__(self, micro_batch: int) -> bool:
        return False

    def forward(self, *given: Any, **more: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("family", "layout"),
    [("gpt", "packed"), ("llama", "packed"), ("bert", "packed"), ("gpt", "padded"), ("bert", "padded"), ("t5", "padded")],
)
def test_what_is_brought_to_few_shapes_trains_as_it_would_otherwise(family: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of many lengths, some ops recomputed. In fp32, to see it; on a GPU packed passes are recorded in half precision alone."""
    monkeypatch.setattr("penstock.timing.recorded._sees_only_tokens", lambda model: True)
    changes = {"dropout": 0.0} if family in ("gpt", "t5") else {}
    plan = replace(_plan(family, layout, "gpipe", **changes), precision="fp32", gradients="")
    found = []
    for brought in (False, True):
        rank = rank_of(plan, ProcessGroups("cpu"), TrainingSettings(clip_norm=1.0))
        loaded = list[int]()
        if brought:
            rank.stages[0].recordings = _NeverPlayed(rank.stages[0])  # type: ignore[assignment]
        plain = rank._loaded
        monkeypatch.setattr(rank, "_loaded", lambda *given, plain=plain, loaded=loaded: _counted(plain(*given), loaded))
        losses = [rank.train(program).loss.item() for program in _programs(plan, 4, row=9)]
        found.append((losses, collected(rank)[0], loaded))
    (losses, weights, plain_tokens), (brought_losses, brought_weights, tokens) = found
    assert sum(tokens) > sum(plain_tokens) and all(count % 8 == 0 for count in tokens)
    assert brought_losses == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(one.values, other.values, atol=2e-5) for one, other in zip(weights, brought_weights, strict=True))


def _counted(batches: dict[int, Batch], tokens: list[int]) -> dict[int, Batch]:
    tokens += [batch.own.ids.numel() for batch in batches.values() if batch.own is not None]
    return batches


@needs_gpu
def test_rows_are_padded_on_to_a_length_that_comes_again() -> None:
    """Other padding, other sums: losses are equal to rounding."""
    plan = replace(_plan("gpt", "padded", "gpipe", dropout=0.0, seq_length=48), precision="fp32", gradients="")
    stage = rank_of(plan, ProcessGroups("cuda"), TrainingSettings()).stages[0]
    losses = []
    for recorded in (True, False):
        rank = rank_of(plan, ProcessGroups("cuda"), TrainingSettings())
        if not recorded:
            rank.stages[0].recordings = None
        losses.append([rank.train(program).loss.item() for program in _programs(plan, 6, row=10)])
    micro = _programs(plan, 1, row=10)[0].micro_batches[0]
    assert (micro.row_length, stage.as_recorded(micro, 1).row_length) == (10, 16)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@needs_gpu
@pytest.mark.parametrize(
    ("family", "layout", "schedule"),
    [("gpt", "padded", "gpipe"), ("gpt", "packed", "gpipe"), ("llama", "padded", "interleaved"), ("bert", "padded", "gpipe"),
     ("t5", "padded", "gpipe"), ("resnet", "padded", "gpipe")],
)  # fmt: skip
def test_recorded_passes_train_as_all_others_do(family: str, layout: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels run, whether they are issued at once or one by one."""
    monkeypatch.setattr("penstock.runtime.parallel.recordings._RUNS_BEFORE", 2)
    changes = {"dropout": 0.0} if family in ("gpt", "t5") else {}
    changes |= {"heads": 2} if layout == "packed" else {}
    plan = _plan(family, layout, schedule, **changes)
    found = []
    for recorded in (True, False):
        rank = rank_of(plan, ProcessGroups("cuda"), TrainingSettings(clip_norm=1.0))
        if not recorded:
            for stage in rank.stages.values():
                monkeypatch.setattr(stage.recordings, "forward", lambda *given, **more: None)
        row = plan.seq_length if schedule == "interleaved" else 8
        losses = [rank.train(program).loss.item() for program in _programs(plan, 6, row)]
        if recorded:
            slots = [[] if stage.recordings is None else stage.recordings._slots for stage in rank.stages.values()]
            assert all(slots) and (schedule == "interleaved" or len(slots[0]) == 3)
        found.append((losses, collected(rank)))
    (recorded_losses, (weights, statistics)), (losses, (wanted, wanted_statistics)) = found
    assert recorded_losses == losses and len(set(losses)) == 6
    assert all(torch.equal(one.values, other.values) for one, other in zip(weights, wanted, strict=True))
    assert all(map(torch.equal, statistics, wanted_statistics))
