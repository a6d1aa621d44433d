"""What other systems understand of exports, by their own code: `consumers.py FOLDER ASKED`, in a process of its own.

FOLDER has them, and comes first on its path. ASKED is a file with {"torchtitan": [recipe, …], "deepspeed": [[config, dp, pp], …],
"megatron": [[layout, pp], …]}; what each was taken for is written.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any


def torchtitan(recipes: list[str]) -> list[Any]:
    """Fields of its configuration, the modules of its model, and whether its mesh has as many ranks."""
    import torch
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    found = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for number, text in enumerate(recipes):
            Path(folder, f"recipe_{number}.py").write_text(text, encoding="utf-8")
        for number in range(len(recipes)):
            config = ConfigManager().parse_args(["--module", f"recipe_{number}", "--config", "penstock_plan"])
            config._validate_cuda_graphs()
            own = config.parallelism
            degrees = (own.data_parallel_replicate_degree, own.data_parallel_shard_degree, 1, own.tensor_parallel_degree)
            world = degrees[0] * degrees[1] * degrees[3] * own.pipeline_parallel_degree
            ParallelDims(*degrees, own.pipeline_parallel_degree, 1, world)
            with torch.device("meta"):
                modules = [name for name, _ in config.model_spec.model.build().named_modules() if name.count(".") <= 1]
            recomputed = type(config.activation_checkpoint).__qualname__
            ropes = [asdict(layer.attention.rope) for layer in config.model_spec.model.layers]
            found.append({"parallelism": asdict(own), "training": asdict(config.training), "modules": modules, "recomputed": recomputed,
                          "ropes": ropes, "eps": config.model_spec.model.norm.eps})  # fmt: skip
    return found


def deepspeed(configs: list[Any]) -> list[Any]:
    """What its configuration holds, on so many data-parallel ranks, and the optimizer that its engine wraps around the plan's: an engine
    without a model or a process group, which asks for no more than that."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    deepspeed.comm.get_rank = lambda: 0  # its process groups compile an extension first
    # Its own Lamb would be compiled for a GPU; ZeRO knows neither.
    optimizers = {"adamw": torch.optim.AdamW, "lamb": torch.optim.RMSprop, "SGD": torch.optim.SGD}

    def wrapped(read: Any, pp: int) -> Any:
        engine = object.__new__(PipelineEngine if pp > 1 else DeepSpeedEngine)
        torch.nn.Module.__init__(engine)
        engine._config, engine.global_rank, engine.pipeline_parallelism = read, 0, pp > 1
        return engine._do_optimizer_sanity_check(optimizers[read.optimizer_name]([torch.nn.Parameter(torch.zeros(1))]))

    class Grid:
        def __init__(self, dp: int) -> None:
            self.get_data_parallel_world_size = lambda: dp

    found = []
    for config, dp, pp in configs:
        read = DeepSpeedConfig(config, mpu=Grid(dp))
        found.append([
            read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps, read.zero_optimization_stage,
            read.bfloat16_config.enabled, read.grad_accum_dtype, read.optimizer_name, wrapped(read, pp),
        ])  # fmt: skip
    return found


def megatron(layouts: list[Any]) -> list[Any]:
    """Of each virtual stage, in the order of layers, what Megatron-Core puts there."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    found = []
    for text, pp in layouts:
        ranks = PipelineParallelLayerLayout(text, pp).layout
        found.append([[kind.name for kind in rank[chunk]] for chunk in range(len(ranks[0])) for rank in ranks])
    return found


if __name__ == "__main__":
    _, folder, path = sys.argv
    sys.path.insert(0, folder)
    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    with redirect_stdout(sys.stderr):
        answer = {"torchtitan": torchtitan(asked["torchtitan"]), "megatron": megatron(asked["megatron"]),
                  "deepspeed": deepspeed(asked["deepspeed"])}  # fmt: skip
    json.dump(answer, sys.stdout, default=str)
