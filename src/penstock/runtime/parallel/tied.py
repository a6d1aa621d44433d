"""Weights that ops of several stages share: each end gets the gradients of all others and adds them in the order of stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.programs.instructions import SyncTied, TiedRows
from penstock.runtime.parallel.stage import StageModule
from penstock.runtime.transport.transport import TIED, Transport

__all__ = ["sync_tied"]


@torch.no_grad()
def sync_tied(step: SyncTied, stages: Mapping[int, StageModule], rank: int, transport: Transport) -> None:
    """Makes the gradient of one shared weight equal on all stages of this rank that hold it, and on their peers."""
    ends = dict.fromkeys(entry.own for entry in (*step.receives, *step.sends))
    gradients = {stage: _gradient(stages[stage], step.op) for stage in ends}
    before = {stage: gradient.clone() for stage, gradient in gradients.items()}
    got: dict[TiedRows, torch.Tensor] = {}
    receives = []
    for source in step.receives:
        if source.peer == rank:
            its = next(target for target in step.sends if (target.own, target.stage, target.peer) == (source.stage, source.own, rank))
            got[source] = _rows(before[source.stage], its)
        else:
            got[source] = torch.empty_like(_rows(before[source.own], source))
            receives.append(source)
    # Both ends order what goes between two ranks by (stage it comes from, stage it goes to).
    sends = sorted((target for target in step.sends if target.peer != rank), key=lambda target: (target.own, target.stage))
    receives.sort(key=lambda source: (source.stage, source.own))
    transport.exchange(
        [(target.peer, [_rows(before[target.own], target).contiguous()]) for target in sends],
        [(source.peer, [got[source]]) for source in receives],
        TIED,
    )
    for stage, gradient in gradients.items():
        gradient.zero_()
        own = [source for source in step.receives if source.own == stage]
        for other in sorted({stage, *(source.stage for source in own)}):
            if other == stage:
                gradient.add_(before[stage])
            for source in own:
                if source.stage == other:
                    _rows(gradient, source).add_(got[source])


def _rows(tensor: torch.Tensor, which: TiedRows) -> torch.Tensor:
    return tensor if which.rows is None else tensor[which.rows[0] : which.rows[1]]


def _gradient(stage: StageModule, op: str) -> torch.Tensor:
    """The gradient of the shared weight on this rank, which the stage holds once."""
    for held in stage.held:
        if held.stored_name in (op, f"{op}.weight"):
            assert held.parameter.grad is not None
            return held.parameter.grad
    raise RuntimeError(f"stage {stage.number} holds no weight of op '{op}'")
