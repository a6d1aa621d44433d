"""Transfers between processes that share a GPU: where messages lie, and that ranks agree, with a stand-in for the GPU itself.

On a GPU, `benchmarks/shared_gpu.py` trains through them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import Choice, make_case, with_count
from standins import one_gpu
from training_jobs import train_programs

from penstock.programs.instructions import Part, Program, ReceiveStart, SendStart
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.transport import same_gpu
from penstock.runtime.transport.same_gpu import _Mailbox, _size
from penstock.runtime.workers import WorkerPool

CAPACITY = 8 * 512
EMPTY = Program(0, 0, 0, 1, 2, 1, 1, (), (), ())


def mailbox() -> _Mailbox:
    return _Mailbox(torch.zeros(CAPACITY, dtype=torch.uint8), [None] * 32, [None] * 32)


@given(st.lists(st.integers(0, 2).map(lambda blocks: 512 * blocks), max_size=200))
def test_no_message_is_laid_over_one_that_may_not_have_been_taken(sizes):
    box, lying = mailbox(), {}
    for number, size in enumerate(sizes):
        first, over = box.place(number, size)
        for earlier in over:
            del lying[earlier]
        assert first >= 0
        assert first + size <= CAPACITY
        assert not any(first < end and start < first + size for start, end in lying.values())
        lying[number] = first, first + size
        assert len({number % 32 for number in lying}) == len(lying), "two messages would share their events"


def test_a_message_waits_for_no_more_than_it_covers():
    box = mailbox()
    assert [box.place(number, 1024) for number in range(4)] == [(0, []), (1024, []), (2048, []), (3072, [])]
    assert box.place(4, 512) == (0, [0])
    assert box.place(5, 1024) == (512, [1]), "512 to 1536 covers what is left of message 0 and part of 1"


@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=40))
def test_both_ends_of_a_program_agree_on_a_mailbox_that_holds_it(rows):
    parts = [(Part("x", "bf16", (number, 4)), Part("y", "fp32", (number, 8), columns=(2, 3))) for number in rows]
    sends = [SendStart("activation", 0, number, 1, 0, own) for number, own in enumerate(parts)]
    receives = [ReceiveStart("activation", 0, number, 0, 0, own) for number, own in enumerate(parts)]
    sent = same_gpu._rooms(msgspec.structs.replace(EMPTY, instructions=tuple(sends)), SendStart)[1]
    assert sent == same_gpu._rooms(msgspec.structs.replace(EMPTY, instructions=tuple(receives)), ReceiveStart)[0]
    sizes = [_size([torch.empty(number, 4, dtype=torch.bfloat16, device="meta"), torch.empty(number, 1, device="meta")]) for number in rows]
    assert sent >= min(sum(sizes), same_gpu._ROOM * max(sizes))
    box = _Mailbox(torch.empty(sent, dtype=torch.uint8, device="meta"), [None] * 64, [None] * 64)
    waited = [box.place(number, size)[1] for number, size in enumerate(sizes)]
    if sum(sizes) <= same_gpu._ROOM * max(sizes):
        assert not any(waited), "a program that fits never waits"


@pytest.mark.parametrize("shapes", [[(3,)], [(5, 7), (1,)], [(512,), (0,), (2, 2)]])
def test_views_lie_side_by_side_and_hold_what_is_copied(shapes):
    box = mailbox()
    tensors = [torch.rand(shape) for shape in shapes]
    first, _ = box.place(0, _size(tensors))
    for view, tensor in zip(box.views(first, tensors), tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(box.views(first, tensors), tensors, strict=True):
        assert torch.equal(view, tensor)


SGD = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"))
PLAIN: Choice = {"family": "gpt", "pp": 4, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
                 "cuts": "uneven", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[WorkerPool, WorkerPool]]:
    with WorkerPool(4, timeout_s=250) as plain, WorkerPool(4, timeout_s=250) as sharing:
        yield plain, sharing


@pytest.mark.parametrize(
    ("more", "count"),
    [
        pytest.param({}, 20, id="tied weights, mailboxes filled over and over"),
        pytest.param({"schedule": "gpipe"}, 20, id="far ahead"),
        pytest.param({"schedule": "interleaved", "pp": 2, "layout": "padded"}, 6, id="both ways at once"),
        pytest.param({"schedule": "zero-bubble", "family": "llama"}, 9, id="split backward passes"),
        pytest.param({"pp": 2, "tp": 2, "degrees": "per op", "family": "llama"}, 5, id="resharding"),
    ],
)
def test_ranks_on_one_gpu_train_as_with_any_other_transport(pools, more, count):
    plain, sharing = pools
    case = with_count(make_case(PLAIN | more, seed=5), count)
    expected = plain.run(train_programs, case.plan, case.programs(), SGD)
    found = sharing.run(one_gpu.train, case.plan, case.programs(), SGD)
    for own, other in zip(found, expected, strict=True):
        assert own.losses == other.losses
        assert all(torch.equal(a.values, b.values) for a, b in zip(own.weights, other.weights, strict=True))
