"""A job for worker processes: train, and count what really lies in memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch
from training_jobs import open_rank

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.worker import Worker

__all__ = ["count_bytes"]


def count_bytes(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings, told: float
) -> tuple[int, int]:
    """Bytes of all tensors of this process between two steps, and the most before any block of the second step. As many as `told` lie there
    as soon as the threads of a transport have let go of what has arrived."""
    gc.collect()
    before = _alive_bytes()
    rank = open_rank(worker, plan, settings)
    if rank is None:
        return 0, 0
    place = rank.world.place
    seen: list[int] = []
    rank.train(programs[0][place])
    at_rest, deadline = _alive_bytes() - before, time.monotonic() + 100
    while at_rest > told and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
        at_rest = _alive_bytes() - before
    for stage in rank.stages.values():
        for piece in stage.pieces:
            piece.chain.register_forward_pre_hook(lambda *_: seen.append(_alive_bytes() - before))
    rank.train(programs[1][place])
    return at_rest, max(seen)


def _alive_bytes() -> int:
    # The type, not the class: lazy objects among them would come alive if asked for the latter.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
