"""A stage's passes: what is to be recomputed is, once and only that, and nothing of a micro-batch outlives its passes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from runtime_cases import Choice, evaluation_programs, make_case
from training_jobs import OpenRank, rank_of

from penstock.models.modules import Batch
from penstock.programs.instructions import Forward, Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.world import ProcessGroups

ONE: Choice = {"family": "llama", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "gpipe", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


def opened(seed: int = 3, **changes: Any) -> tuple[OpenRank, Program]:
    """The only rank of a plan, in this process, with its program."""
    case = make_case(ONE | changes, seed, 1)
    return rank_of(case.plan, ProcessGroups(), TrainingSettings()), case.programs()[0][0]


def calls_and_kept_bytes(rank: OpenRank, program: Program) -> tuple[Counter[int], int]:
    """How often each op began, and what autograd kept from the forward passes."""
    calls: Counter[int] = Counter()
    kept: dict[int, int] = {}
    for stage in rank.stages.values():
        for place, module in zip(stage.model.ops, stage.modules(), strict=True):
            module.register_forward_pre_hook(lambda *_, op=place.index: calls.update([op]))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rank.train(program)
    return calls, sum(kept.values())


def test_nothing_is_recomputed_unless_asked_for() -> None:
    rank, program = opened()
    calls, _ = calls_and_kept_bytes(rank, program)
    assert set(calls.values()) == {len(program.micro_batches)} and len(calls) == rank.model.num_ops


@pytest.mark.parametrize("recompute", ["some", "all"])
def test_what_a_pattern_names_runs_twice_and_nothing_else(recompute: str) -> None:
    rank, program = opened(seed=4, recompute=recompute)
    ranges = rank.plan.stages[0].recompute
    wanted: Counter[int] = Counter()
    for step in program.instructions:
        if isinstance(step, Forward):
            wanted.update(range(rank.model.num_ops))
            wanted.update(op for first, last in ranges[step.pattern] for op in range(first, last))
    assert len(set(wanted.values())) == (2 if recompute == "some" else 1)
    assert calls_and_kept_bytes(rank, program)[0] == wanted


def test_recomputation_keeps_less() -> None:
    """The whole stage as one segment keeps only what enters it, here nothing but the tokens."""
    plain, less = (calls_and_kept_bytes(*opened(recompute=recompute))[1] for recompute in ("none", "all"))
    assert less < 0.1 * plain


def test_evaluation_keeps_nothing_for_a_backward_pass() -> None:
    case = make_case(ONE | {"pp": 1}, 3, 1)
    rank, kept = rank_of(case.plan, ProcessGroups(), TrainingSettings()), []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        rank.evaluate(evaluation_programs(case)[0])
    assert not kept and not rank.stages[0].num_running


def test_a_batch_is_let_go_after_its_forward_pass() -> None:
    """Two at most are there at once, that of the pass that runs and the next one's, which is loaded ahead; none is left at the end."""
    rank, program = opened(seed=5)
    assert len(program.micro_batches) > 2
    seen: list[int] = []
    rank.stages[0].pieces[0].chain.register_forward_pre_hook(lambda *_: seen.append(alive()))
    rank.train(program)
    assert max(seen) <= 2 and len(seen) == len(program.micro_batches)
    assert alive() == 0


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), Batch) for found in gc.get_objects())
