"""The roofline beside published runs: is what it promises of well-known settings more than anybody ever reached?

    python benchmarks/plausible.py              all settings, a row each, and a verdict; status 1 if one is beyond what is plausible
    python benchmarks/plausible.py --short      a few of them, in seconds, as the tests do

Each plan is the published one: the same devices, degrees, micro-batches and recomputation, and an equal model or the catalogue's nearest.
MFU is the model's own arithmetic over the devices' peak. A prediction is plausible up to a point above the best that was published for
such a model on such devices, and from half of it. Sources are listed at the end of the table, and in docs/costs.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.costs.sources import open_costs
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.timing.estimate import estimate
from penstock.timing.planned import clocked

__all__ = ["SETTINGS", "SHORT", "SOURCES", "Setting", "predicted_mfu", "verdict"]

SOURCES = {
    "foundry": "MosaicML LLM Foundry, scripts/train/benchmarking/README.md, 2023: MPT with FSDP",
    "megatron-2021": "Narayanan et al. 2021 (arXiv:2104.04473), table 1: 145.6B, 47 %, a quarter of it recomputation",
    "megatron-2022": "Korthikanti et al. 2022 (arXiv:2205.05198), table 5: 175B, selective recomputation, sequence parallelism",
    "megascale": "Jiang et al. 2024 (arXiv:2402.15627): 175B, 55.2 % on 12,288 GPUs",
    "megatron-core": "Megatron-LM, README.md, 2025: 2B to 462B on H100, up to 47 %",
}
TOLERANCE = 0.01
LEAST = 0.5


@dataclass(frozen=True)
class Setting:
    """A published run: the plan it had, the share of peak it reached, and who says so."""

    name: str
    model: str
    cluster: str
    published: float
    source: str
    plan: Mapping[str, Any]
    unfused: bool = False
    """Attention as it was before fused kernels, with dropout."""
    selective: bool = False
    """Attention is recomputed, nothing else."""

    def planned(self) -> Plan:
        """The plan of the run."""
        if not self.unfused:
            plan = uniform_plan(self.model, self.cluster, **self.plan)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.yaml"
                sizes = {"base": self.model, "fused_attention": False, "dropout": 0.1, "attention_dropout": 0.1}
                path.write_text(json.dumps(sizes), encoding="utf-8")
                plan = uniform_plan(str(path), self.cluster, **self.plan)
        plan = replace(plan, gradients="fp32")
        return _with_attention_again(plan) if self.selective else plan


def _with_attention_again(plan: Plan) -> Plan:
    ops, stages = model_of(plan).ops, []
    for stage in plan.stages:
        pattern = tuple((place.index, place.index + 1) for place in ops[stage.first : stage.last] if place.op.kind == "attention")
        stages.append(replace(stage, recompute=(pattern,)))
    return replace(plan, stages=tuple(stages))


_SHARDED = {"zero": 3, "seq_length": 2048}
_PIPELINE = {"tp": 8, "pp": 8, "micro_batch": 1}
_WOVEN = {**_PIPELINE, "chunks": 3, "schedule": "interleaved", "global_batch": 64, "sequence_parallel": True}
_LARGE = {**_SHARDED, "replicas": 64, "global_batch": 2048, "micro_batch": 8, "recompute": "full"}

SETTINGS = (
    Setting("GPT 7B", "gpt-6.7b", "8xa100-80gb", 0.642, "foundry", {**_SHARDED, "replicas": 8, "global_batch": 96, "micro_batch": 6}),
    Setting("GPT 7B", "gpt-6.7b", "8xh100", 0.464, "foundry", {**_SHARDED, "replicas": 8, "global_batch": 48, "micro_batch": 6}),
    Setting("Llama 8B", "llama-8b", "8xa100-80gb", 0.642, "foundry", {**_SHARDED, "replicas": 8, "global_batch": 64, "micro_batch": 4}),
    Setting("Llama 8B, 8192 tokens", "llama-8b", "8xh100", 0.47, "megatron-core",
            {"zero": 3, "seq_length": 8192, "replicas": 8, "global_batch": 16, "micro_batch": 1}),
    Setting("GPT 13B", "gpt-13b", "8xa100-80gb", 0.596, "foundry", {**_SHARDED, "replicas": 8, "global_batch": 48, "micro_batch": 2}),
    Setting("GPT 13B", "gpt-13b", "8xh100", 0.398, "foundry", {**_SHARDED, "replicas": 8, "global_batch": 16, "micro_batch": 2}),
    Setting("Llama 70B", "llama-70b", "64xa100-80gb", 0.533, "foundry", _LARGE),
    Setting("Llama 70B", "llama-70b", "64xh100", 0.426, "foundry", _LARGE),
    Setting("GPT 175B, 2021", "gpt-175b", "1536xa100-80gb", 0.353, "megatron-2021",
            {**_PIPELINE, "replicas": 24, "global_batch": 2304, "recompute": "full"}, unfused=True),
    Setting("GPT 175B, 2022", "gpt-175b", "64xa100-80gb", 0.514, "megatron-2022", _WOVEN, unfused=True, selective=True),
    Setting("GPT 175B, 2024", "gpt-175b", "1024xa100-80gb", 0.552, "megascale",
            {**_WOVEN, "chunks": 6, "replicas": 16, "global_batch": 768, "zero": 1}),
    Setting("GPT 175B", "gpt-175b", "64xh100", 0.47, "megatron-core", _WOVEN),
)  # fmt: skip
SHORT = (SETTINGS[0], SETTINGS[1], SETTINGS[5], SETTINGS[7])
"""One pass of each is soon estimated: no pipelines."""


def predicted_mfu(setting: Setting) -> float:
    """What the roofline promises of the run."""
    plan = setting.planned()
    cluster = cluster_of(plan)
    return clocked(plan, estimate(plan, model_of(plan), cluster, open_costs("roofline", cluster))).mfu


def verdict(setting: Setting, mfu: float) -> str:
    """`plausible`, or on which side it is not."""
    if mfu > setting.published + TOLERANCE:
        return "too fast"
    return "plausible" if mfu >= LEAST * setting.published else "too slow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a prediction is not plausible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few settings")
    settings = SHORT if parser.parse_args(arguments).short else SETTINGS
    print(f"{'setting':24} {'devices':16} {'predicted':>9} {'published':>9}  verdict     source")
    wrong = 0
    for setting in settings:
        mfu = predicted_mfu(setting)
        told = verdict(setting, mfu)
        wrong += told != "plausible"
        print(f"{setting.name:24} {setting.cluster:16} {mfu:9.1%} {setting.published:9.1%}  {told:10}  {setting.source}", flush=True)
    print(*("", *(f"{name}: {text}" for name, text in SOURCES.items())), sep="\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
