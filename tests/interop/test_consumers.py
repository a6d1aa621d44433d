"""Exports as the systems themselves read them: torchtitan's configuration, DeepSpeed's, and Megatron-Core's layout of stages.

Megatron-LM's parser of arguments is no package; `test_megatron.py` holds the other flags to its documentation.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from megatron_flags import megatron_flags
from torchrun_ranks import run_ranks

from penstock.errors import InputError
from penstock.interop.deepspeed import deepspeed_config
from penstock.interop.torchtitan import torchtitan_recipe
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan, Stage

PEERS = Path(sys.prefix) / "peers"
pytestmark = pytest.mark.skipif(not (PEERS / ".installed").exists(), reason="needs the systems that read exports: `make peers`")

LLAMAS = (
    uniform_plan(
        "llama-8b", "16xh100-80gb", pp=4, tp=2, replicas=2, global_batch=64, micro_batch=2, zero=1, recompute="full", sequence_parallel=True
    ),
    uniform_plan("llama-70b", "16xh100-80gb", tp=8, replicas=2, zero=3, global_batch=8, micro_batch=1),
    uniform_plan("llama-1b", "2xh100-80gb", replicas=2, global_batch=8, micro_batch=2),
)
OPTIMIZERS = ("adamw", "lamb", "sgd")
GPT = uniform_plan("gpt-tiny", "8xa100-40gb", pp=2, tp=2, replicas=2, global_batch=64, micro_batch=4, zero=1, recompute="full")


def _uneven() -> Plan:
    """Stages of one, two and one layers."""
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", pp=4, global_batch=16, micro_batch=2)
    bounds = (0, 9, 25, plan.stages[-1].last)
    stages = tuple(Stage(first, last, ((rank,),)) for rank, (first, last) in enumerate(pairwise(bounds)))
    return replace(plan, stages=stages)


def _deepspeeds() -> list[list[Any]]:
    """Of every precision, dtype of gradients, optimizer, ZeRO stage, and one or two of data-parallel and pipeline ranks, what is not
    refused."""
    found: list[list[Any]] = []
    for precision, wide, optimizer, zero, dp, pp in product(("fp32", "bf16", "fp16"), (False, True), OPTIMIZERS, (0, 1), (1, 2), (1, 2)):
        plan = uniform_plan("gpt-tiny", "4xa100-40gb", replicas=dp, pp=pp, zero=zero, global_batch=8, micro_batch=2, precision=precision,
                            gradients="fp32" if wide else "")  # fmt: skip
        with suppress(InputError):
            found.append([deepspeed_config(replace(plan, optimizer=optimizer)), dp, pp])
    return found


@pytest.fixture(scope="module")
def understood(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    flags = megatron_flags(_uneven())
    layout = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    asked = {
        "torchtitan": [torchtitan_recipe(plan) for plan in LLAMAS],
        "deepspeed": [[deepspeed_config(replace(GPT, precision="bf16", gradients="fp32")), 2, 2], *_deepspeeds()],
        "megatron": [[layout, 3]],
    }
    folder = tmp_path_factory.mktemp("consumers")
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    script = Path(__file__).with_name("consumers.py")
    (done,) = run_ranks([str(script), str(PEERS), str(folder / "asked.json")], [{}], folder)  # what they import of torch takes seconds
    assert done.status == 0, done.err[-3000:]
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return found


def test_torchtitan_takes_pipelines(understood: dict[str, Any]) -> None:
    found = understood["torchtitan"][0]
    own, training = found["parallelism"], found["training"]
    assert (own["pipeline_parallel_degree"], own["tensor_parallel_degree"], own["data_parallel_shard_degree"]) == (4, 2, 2)
    assert (training["local_batch_size"], own["pipeline_parallel_microbatch_size"], training["global_batch_size"]) == (32, 2, 64)
    named = [name for part in own["module_fqns_per_model_part"] for name in part]
    assert set(named) | {"layers", ""} == set(found["modules"]) and len(named) == len(set(named)) == 35
    assert found["recomputed"] == "FullAC.Config" and training["seq_len"] == 4096


def test_torchtitan_takes_shards_and_other_sizes(understood: dict[str, Any]) -> None:
    _, large, small = understood["torchtitan"]
    assert large["parallelism"]["fsdp_reshard_after_forward"] == "always" and large["parallelism"]["tensor_parallel_degree"] == 8
    assert sum(name.startswith("layers.") for name in large["modules"]) == 80
    assert sum(name.startswith("layers.") for name in small["modules"]) == 16
    assert small["parallelism"]["data_parallel_replicate_degree"] == 2 and small["recomputed"] == "NoneType"


def test_torchtitan_turns_positions_as_planned(understood: dict[str, Any]) -> None:
    plain, _, small = understood["torchtitan"]
    assert len(plain["ropes"]) == 32 and {rope["scaling"] for rope in plain["ropes"]} == {"none"} and plain["eps"] == 1e-5
    newer = {"theta": 500000, "scaling": "llama", "scaling_factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}  # fmt: skip
    assert len(small["ropes"]) == 16 and all(rope.items() >= newer.items() for rope in small["ropes"])


def test_deepspeed_takes_its_configuration(understood: dict[str, Any]) -> None:
    assert understood["deepspeed"][0] == [64, 4, 8, 1, True, "fp32", "adamw", "bf16"]


def test_deepspeed_starts_with_every_configuration(understood: dict[str, Any]) -> None:
    """Its engine refuses some mixes of dtypes, optimizers and ZeRO, and none of those that are written."""
    asked = _deepspeeds()
    assert len(understood["deepspeed"]) == 1 + len(asked) and len(asked) > 100
    for (config, _, _), found in zip(asked, understood["deepspeed"][1:], strict=True):
        assert found[3] == config["zero_optimization"]["stage"] and (found[-1] is not None or "data_types" not in config)


def test_megatron_cuts_where_the_plan_does(understood: dict[str, Any]) -> None:
    assert understood["megatron"] == [[["embedding", "decoder"], ["decoder", "decoder"], ["decoder", "loss"]]]
