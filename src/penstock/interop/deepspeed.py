"""DeepSpeed: its JSON configuration, and the list of layers and parts that its `PipelineModule` is to be cut at.

`partition_method` has no way to name the parts, but one method of a subclass sets them from this file (`penstock.parts`):

    class Planned(PipelineModule):
        def _partition_layers(self, method=None):
            stage = self._topo.get_coord(self.global_rank).pipe
            self.parts = PARTS
            self._set_bounds(self.parts[stage], self.parts[stage + 1])

Of `recomputed_layers` give the class names to its `checkpointable_layers`, so that the ends of the model stay out.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.errors import plural
from penstock.plans.grid import Grid, grid_of, refusal, whole_layers
from penstock.plans.references import cluster_of, model_of
from penstock.schedules.rules import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["deepspeed_config"]

TARGET = "DeepSpeed"


def deepspeed_config(plan: Plan, model: Model | None = None) -> dict[str, Any]:
    """The configuration; under `penstock` stands what `PipelineModule` takes as arguments instead."""
    model, cluster = model or model_of(plan), cluster_of(plan)
    grid = grid_of(plan, TARGET, (DEFAULT_SCHEDULE,), model, cluster)
    if grid.sequence_parallel:
        raise refusal(TARGET, 0, "sequence parallelism, which its pipeline does not have", "Set sequence_parallel to false.")
    layers = whole_layers(grid, TARGET)
    recomputed = [again for stage in layers for again in stage]
    if any(recomputed) and not all(recomputed):
        index = next(index for index, stage in enumerate(layers) if not all(stage))
        what = f"it recomputes {sum(layers[index])} of {plural(len(layers[index]), 'layer')}, where other layers are recomputed"
        raise refusal(TARGET, index, what, "Recompute all layers, or none.")
    zero = _zero(plan, grid)
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": grid.micro_batch,
        "gradient_accumulation_steps": grid.num_micro_batches,
        "optimizer": {"type": {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD"}[plan.optimizer]},
        "zero_optimization": {"stage": zero},
    }
    if zero and plan.optimizer != "adamw":
        config["zero_allow_untested_optimizer"] = True  # it divides the state of others as well, once it is told to
    if plan.precision != "fp32":
        config[plan.precision] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": plan.gradients or plan.precision}
        config["communication_data_type"] = plan.gradients or plan.precision
    config["penstock"] = {
        "model": model.name,
        "topology": {"num_pp": grid.pp, "num_mp": grid.tp, "num_dp": grid.dp},
        "layers": [block.name for part in grid.parts for block in part],
        "parts": [0, *accumulate(len(part) for part in grid.parts)],
        "activation_checkpoint_interval": int(any(recomputed)),
        "recomputed_layers": sorted({block.kind for part in grid.parts for block in part if block.recomputed}),
    }
    return config


def _zero(plan: Plan, grid: Grid) -> int:
    """The ZeRO stage to write. DeepSpeed sums gradients in another dtype than that of weights only under ZeRO; over a single rank stage 1
    divides nothing, so that it is the plan still."""
    mixed = plan.precision != "fp32" and plan.gradients not in ("", plan.precision)
    if grid.zero or not mixed:
        return grid.zero
    if grid.dp > 1:
        what = f"gradients are summed in {plan.gradients} beside weights in {plan.precision}, which it does under ZeRO alone"
        raise refusal(TARGET, 0, what, f"Use zero 1, or gradients in {plan.precision}.")
    return 1
