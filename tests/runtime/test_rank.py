"""One rank alone, in this process: what it evaluates is what plain torch finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from runtime_cases import Choice, evaluation_programs, make_case, plain_evaluation
from training_jobs import RandomSource, rank_of

from penstock.data.samples import Sample
from penstock.programs.instructions import Backward, Free, Part, ReceiveStart, ReceiveWait, ReduceWait, SendStart, SendWait
from penstock.runtime.executor import ExecutionError
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.process_groups import _Works
from penstock.runtime.transport.world import ProcessGroups

ONE: Choice = {"family": "gpt", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "gpipe", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "vgg"])
def test_loss_and_accuracy_are_those_of_plain_torch(family: str) -> None:
    case = make_case(ONE | {"family": family, "layout": "padded" if family in ("t5", "vgg") else "packed"}, 6, iterations=1)
    (program,) = evaluation_programs(case)
    found = rank_of(case.plan, ProcessGroups(), TrainingSettings()).evaluate(program)
    loss, accuracy = plain_evaluation(case, TrainingSettings())
    assert found.loss == pytest.approx(loss, rel=1e-6) and found.accuracy == pytest.approx(accuracy) and loss > 0


@pytest.mark.parametrize("family", ["gpt", "t5", "vgg"])
def test_tokens_of_both_sides_are_counted_and_images_once(family: str) -> None:
    case = make_case(ONE | {"family": family, "layout": "padded"}, 6, iterations=1)
    program = case.programs()[0][0]
    micros = program.micro_batches
    expected = sum(sum(one.lengths) + sum(one.dec_lengths) for one in micros) or sum(len(one.samples) for one in micros)
    assert rank_of(case.plan, ProcessGroups(), TrainingSettings()).train(program).tokens.item() == expected
    assert bool(micros[0].dec_lengths) == (family == "t5") and bool(micros[0].lengths) == (family != "vgg")


def test_accuracy_is_seen() -> None:
    """All labels are the same, and the outputs all favour it: every one of them is hit."""
    case = make_case(ONE | {"family": "vgg", "layout": "padded"}, 6, iterations=1)
    (program,) = evaluation_programs(case)
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings())
    hits = {}
    for label in range(case.model.config["num_classes"]):
        rank.stages[0].held[-1].parameter.data = torch.eye(case.model.config["num_classes"])[label] * 1e6
        hits[label] = rank.evaluate(program).accuracy
    assert sum(hits.values()) == pytest.approx(1.0) and max(hits.values()) > 0


def test_a_buffer_that_is_never_freed_is_told() -> None:
    case = make_case(ONE, 3, iterations=1)
    program = case.programs()[0][0]
    frees = [at for at, step in enumerate(program.instructions) if isinstance(step, Free)]
    kept = tuple(step for at, step in enumerate(program.instructions) if at != frees[-1])
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings())
    with pytest.raises(ValueError, match=r"ended iteration 0 with buffers \[\d+\]"):
        rank.train(msgspec.structs.replace(program, instructions=kept))


def test_an_abandoned_step_leaves_what_was_before_it() -> None:
    """Forward passes change running statistics, which no training loss tells; micro-batches and buffers are let go."""
    case = make_case(ONE | {"family": "resnet", "layout": "padded"}, 3, iterations=1)
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings())
    before = [buffer.clone() for module in rank.stages[0].modules() for buffer in module.buffers()]
    rank.executor.handlers[Backward] = lambda step: 1 / 0
    with pytest.raises(ExecutionError, match="division by zero"):
        rank.train(case.programs()[0][0])
    changed = [buffer.clone() for module in rank.stages[0].modules() for buffer in module.buffers()]
    assert rank.stages[0].num_running and not all(map(torch.equal, before, changed))
    rank.abandon()
    after = [buffer for module in rank.stages[0].modules() for buffer in module.buffers()]
    assert all(map(torch.equal, before, after)) and not rank.stages[0].num_running and not rank._buffers


def test_what_is_under_way_is_waited_for_where_the_program_says() -> None:
    """And not before: all parts of a message that leaves, one that comes, which is in place only then, and sums of gradients."""
    waited: list[str] = []

    class Work:
        """What torch returns of a transfer."""

        def __init__(self, name: str, arrives: torch.Tensor | None = None) -> None:
            self.name, self.arrives = name, arrives

        def wait(self) -> None:
            """It is done."""
            waited.append(self.name)
            if self.arrives is not None:
                self.arrives.fill_(7.0)

    rank: Any = rank_of(make_case(ONE, 3, iterations=1).plan, ProcessGroups(), TrainingSettings())
    rank.transport = SimpleNamespace(
        send=lambda tensors, peer: _Works([Work(f"sent {index}") for index in range(len(tensors))], tensors),
        receive=lambda tensors, peer: _Works([Work("received", tensor) for tensor in tensors], tensors),
    )
    rank._buffers = {3: {"hidden": torch.ones(2, 4), "residual": torch.ones(2)}}
    parts, key = (Part("hidden", "fp32", (2, 4)), Part("residual", "fp32", (2,))), ("activation", 0, 0, 1)
    rank.send_start(SendStart(*key, 3, parts))
    rank.receive_start(ReceiveStart(*key, 4, (Part("hidden", "fp32", (2, 4), columns=(1, 3)),)))
    rank.gradients[0]._works = [Work("summed 0"), Work("summed 1")]
    assert not waited
    rank.receive_wait(ReceiveWait(*key))
    assert waited == ["received"] and (rank._buffers[4]["hidden"][:, 1:3] == 7.0).all()
    rank.send_wait(SendWait(*key))
    rank.reduce_wait(ReduceWait(0))
    assert waited == ["received", "sent 0", "sent 1", "summed 0", "summed 1"] and not rank._sends and not rank._receives


def test_sums_through_host_memory_come_back() -> None:
    """Of processes that share a GPU."""
    host, back = torch.ones(3), list[torch.Tensor]()
    on_gpu: Any = SimpleNamespace(cpu=lambda: host, copy_=back.append)
    rank: Any = rank_of(make_case(ONE, 3, iterations=1).plan, ProcessGroups(), TrainingSettings())
    own = rank.gradients[0]
    own.world = SimpleNamespace(staged=True, group=lambda ranks: ranks)
    with mock.patch("torch.distributed.all_reduce", lambda tensor, group: tensor.mul_(len(group))):
        own._sum(on_gpu, (0, 1), None).wait()
    assert [one.tolist() for one in back] == [[2.0] * 3]


class CountedSource(RandomSource):
    """Tells which samples were asked for."""

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """Draws the sample."""
        asked.append((iteration, sample))
        return super().sample(iteration, sample, length, dec_length)


asked: list[tuple[int, int]] = []


@pytest.mark.parametrize("other", [False, True])
def test_a_micro_batch_that_is_here_already_is_not_loaded_again(other: bool) -> None:
    """One that was brought for a program that does not come after all is dropped."""
    case = make_case(ONE, 3, iterations=3)
    first, second, third = (programs[0] for programs in case.programs())
    plain = rank_of(case.plan, ProcessGroups(), TrainingSettings())
    expected = [plain.train(program).loss.item() for program in (first, third if other else second)]
    source = CountedSource(case.model)
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings(), source)
    losses = [rank.train(first).loss.item()]
    asked.clear()
    rank.prepare(second, source)
    head = [(1, sample) for sample in second.micro_batches[0].samples]
    assert asked == head and len(second.micro_batches) > 1
    asked.clear()
    losses.append(rank.train(third if other else second).loss.item())
    assert losses == expected
    trained = third if other else second
    whole = [(trained.iteration, sample) for micro in trained.micro_batches for sample in micro.samples]
    assert sorted(asked) == sorted({*whole} if other else {*whole} - {*head}) and rank._prepared is None


def test_an_evaluation_leaves_what_is_here_for_the_next_step() -> None:
    """It has samples of its own, in as many micro-batches."""
    case = make_case(ONE, 3, iterations=2)
    (first,), (second,) = case.programs()
    evaluated = msgspec.structs.replace(evaluation_programs(case)[0], iteration=7)
    plain, rank = (rank_of(case.plan, ProcessGroups(), TrainingSettings()) for _ in range(2))
    plain.train(first)
    rank.train(first)
    expected = plain.evaluate(evaluated), plain.train(second).loss.item()
    rank.prepare(second, rank.source)
    assert (rank.evaluate(evaluated), rank.train(second).loss.item()) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_never_waits_for_the_gpu_inside_a_step() -> None:
    """Whoever reads the loss waits; until then the host is free to hand over the next step."""
    case = make_case(ONE, 3, iterations=3)
    rank = rank_of(case.plan, ProcessGroups("cuda"), TrainingSettings(clip_norm=1.0))
    first, second, third = (programs[0] for programs in case.programs())
    rank.train(first)
    rank.train(second)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = rank.train(third)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.loss)
