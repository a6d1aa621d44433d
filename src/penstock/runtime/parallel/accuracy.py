"""The last stage in evaluation: the loss, and how many labels the most likely outputs hit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.base import Carry
from penstock.models.modules.batch import Batch
from penstock.models.modules.parallel import TensorParallel
from penstock.runtime.parallel.module_chain import ModuleChain
from penstock.runtime.parallel.stage import StageModule

__all__ = ["count_correct", "most_likely"]


def count_correct(stage: StageModule, micro: MicroBatch, batches: Mapping[int, Batch], carry: Carry, counts: torch.Tensor) -> Carry:
    """The stage's forward pass; adds (hits, labels that count) to `counts`, once for each sample."""
    chain = stage.pieces[-1].chain
    if isinstance(chain, ModuleChain):
        result = stage.forward(micro, batches, carry, training=False)
        hits = chain.take_hits()
        if stage.pieces[-1].tp.rank == 0:
            counts += hits
        return result
    loss_op = chain.ops[-1]
    seen: Carry = {}
    hook = loss_op.register_forward_pre_hook(lambda module, given: seen.update(given[0]))
    try:
        result = stage.forward(micro, batches, carry, training=False)
    finally:
        hook.remove()
    batch = batches[stage.pieces[-1].dp]
    if batch.weights is not None:
        labels = batch.targets if batch.labels is None else batch.labels
        divided = any(spec.name == "logits" and spec.split for spec in stage.model.carry_before(stage.model.num_ops - 1))
        tp = stage.pieces[-1].tp if divided else TensorParallel()
        found = most_likely(seen["logits"], tp, tp.shard(stage.model.config["vocab"]).start if divided else 0)
        if stage.pieces[-1].tp.rank == 0:
            live = batch.weights > 0
            counts += torch.stack([((found == labels) & live).sum(), live.sum()])
    return result


def most_likely(logits: torch.Tensor, tp: TensorParallel, first: int) -> torch.Tensor:
    """(rows,) the column with the largest logit, over all parts of the vocabulary, of which this rank's begins at `first`."""
    best, column = logits.float().max(-1)
    if tp.size == 1:
        return column
    bests, columns = ([torch.empty_like(part) for _ in range(tp.size)] for part in (best, column))
    dist.all_gather(bests, best, group=tp.group)
    dist.all_gather(columns, column + first, group=tp.group)
    winner = torch.stack(bests).argmax(0, keepdim=True)
    return torch.stack(columns).gather(0, winner)[0]
