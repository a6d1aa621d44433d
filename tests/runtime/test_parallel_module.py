"""`penstock.parallelize` in a loop of one's own: what a plain loop of torch gives, saved, gone on with under another plan, exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cases import described, module_case, own_loop, plain_training, save_values
from safetensors.torch import load_file

from penstock.errors import InputError
from penstock.models.description import model_to_description
from penstock.models.modules.cutting.describing import describe_origin
from penstock.models.ops import Model
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.runtime.checkpoints.layout import WEIGHTS, stored_shapes
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.parallel_module import Parallel, parallelize
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool

TOLERANCE = 1e-5
SETTINGS = TrainingSettings(LearningRate(3e-3), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=250) as workers:
        yield workers


def test_a_loop_of_ones_own_goes_on_under_another_plan(pool: WorkerPool, tmp_path: Path) -> None:
    """Four ranks, then two: weights and moments come out of the checkpoint, and the end is that of one plain run."""
    name, folder = "long_skips", str(tmp_path / "saved")
    first = module_case(name, tp=2, pp=2, iterations=2)
    later = module_case(name, pp=2, iterations=4)
    both = replace(later, works=(*first.works, *later.works[2:]))
    found = [losses for losses in pool.run(own_loop, name, first, SETTINGS, folder, False) if losses]
    more = [losses for losses in pool.run(own_loop, name, replace(later, works=(*later.works,)), SETTINGS, folder, True) if losses]
    losses, weights = plain_training(name, both, SETTINGS)
    assert len(found) == 4 and len(more) == 2 and all(one == more[0] for one in more)
    assert [*found[0], *more[0]] == pytest.approx(losses, rel=TOLERANCE)
    exported = load_file(f"{folder}-exported-4/model.safetensors")
    assert exported.keys() == weights.keys()
    for key, value in weights.items():
        assert (exported[key] - value).abs().max() <= TOLERANCE * value.abs().max().clamp_min(1e-3)


def test_a_save_takes_no_part_of_one_that_was_killed(pool: WorkerPool, tmp_path: Path) -> None:
    """All ranks have written, and rank 0 dies before the checkpoint is whole. Started anew they train on, and save the same step."""
    case, folder = module_case("long_skips", pp=4), tmp_path / "saved"
    pool.run(save_values, case, str(folder), 1.0, True)
    assert len(list(folder.glob(".partial-*/rank-*.json"))) == 4
    pool.run(save_values, case, str(folder), 2.0, False)
    saved = Checkpoint(folder)
    names = [key for key in stored_shapes(case.model) if key.startswith(WEIGHTS)]
    assert len(names) > 10 and all(bool((saved.read(name) == 2.0).all()) for name in names)


def one_rank(name: str = "long_skips", model: Model | None = None, **changes: Any) -> Plan:
    model = model or described(name)
    fields = {"family": "traced", "description": model_to_description(model)}
    return Plan(fields, "1xcpu", 4, (Stage(0, model.num_ops, ((0,),)),), MicroBatching("padded", "fixed", 2), seq_length=16,
                precision="fp32", **changes)  # fmt: skip


def test_what_is_exported_is_loaded_by_transformers(tmp_path: Path) -> None:
    """A model of no family of ours, divided over nothing: the same logits as those of the module that was trained."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        architectures=["GPTNeoXForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(str(tmp_path / "config"))
    origin = f"hf:{tmp_path / 'config'}"
    model = describe_origin(origin)
    parallel = parallelize(origin, one_rank(model=model), seed=5)
    parallel.optimizer(torch.optim.AdamW, lr=0.1)
    parallel.export(tmp_path / "trained")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "trained"))
    ids = torch.arange(1, 13).view(2, 6)
    assert parallel.rank.cut is not None
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, parallel.rank.cut.module(ids).logits, atol=1e-6)


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = described("long_skips").config["origin"]
    with pytest.raises(InputError, match=r"the plan is of another module: it has 'embed' where llama has 'model.embed_tokens'"):
        parallelize(origin.replace(":long_skips", ":llama"), one_rank())
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"the plan has 1 ranks, but 3 processes were started"):
        parallelize(origin, one_rank())
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(InputError, match=r"tp_plan names 'layers.\*': no part of LongSkips is called so."):
        parallelize(origin, one_rank(), tp_plan={"layers.*": "colwise"})
    model = parallelize(origin, one_rank())
    assert isinstance(model, Parallel)
    with pytest.raises(InputError, match=r"the optimizer holds weights of another rank: make it with model.optimizer\(…\)."):
        list(model.parameters())
