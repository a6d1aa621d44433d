"""Batches of one's own samples for a loop of one's own: every sample once, the same on all ranks, and plain tensors that give the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import DynamicLoader, find_plans
from penstock.errors import InputError
from penstock.jobs.rows import folder_of_rows
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def plan(rows: list[dict[str, Any]]) -> Plan:
    return find_plans("gpt-tiny", "1xcpu", data=rows, tokens_per_batch=600)[0]


def tokens_of(loader: DynamicLoader) -> list[list[list[int]]]:
    """What each step trains on, sample by sample."""
    return [[sample.inputs.tolist() for micro in batch.micro_batches for sample in micro.samples.values()] for _, batch in loader]


def test_every_sample_once_in_an_epoch(rows: list[dict[str, Any]], plan: Plan) -> None:
    whole = replace(plan, global_batch=32)  # three batches of the 96 rows
    loader = DynamicLoader(rows, whole)
    assert len(loader) == 3
    seen = sorted(sample for step in tokens_of(loader) for sample in step)
    assert seen == sorted(row["input_ids"][:-1] for row in rows)
    assert tokens_of(DynamicLoader(rows, whole, seed=1))[0] != tokens_of(DynamicLoader(rows, whole))[0]
    uneven = tokens_of(DynamicLoader(rows, replace(plan, global_batch=40)))  # the last batch goes on into the next epoch
    assert [len(step) for step in uneven] == [40, 40, 40]
    assert {tuple(sample) for step in uneven for sample in step} == {tuple(sample) for sample in seen}


def test_a_folder_and_given_lengths_are_the_same_samples(rows: list[dict[str, Any]], plan: Plan) -> None:
    wanted = tokens_of(DynamicLoader(rows, plan))
    assert tokens_of(DynamicLoader(folder_of_rows(rows), plan)) == wanted
    assert tokens_of(DynamicLoader(rows, plan, lengths=[len(row["input_ids"]) for row in rows])) == wanted


def test_it_goes_on_where_another_was(rows: list[dict[str, Any]], plan: Plan) -> None:
    wanted, first = tokens_of(DynamicLoader(rows, plan)), DynamicLoader(rows, plan)
    steps = iter(first)
    next(steps), next(steps)
    again = DynamicLoader(rows, plan)
    again.load_state_dict(first.state_dict())
    steps.close()  # type: ignore[attr-defined]
    assert tokens_of(again) == wanted[2:]
    with pytest.raises(InputError, match="had seed 0, this one has 5"):
        DynamicLoader(rows, plan, seed=5).load_state_dict(first.state_dict())


def test_plain_tensors_give_the_loss_of_the_global_batch(rows: list[dict[str, Any]], plan: Plan) -> None:
    """Two replicas' micro-batches, packed, through a model of transformers: summed, the mean over all tokens of the batch."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
    )
    model = transformers.LlamaForCausalLM(config)
    found = find_plans("gpt-tiny", "2xcpu", data=rows, tokens_per_batch=600)
    both = next(one for one in found if one.num_stages == 1 and one.stages[0].degrees.tp == 1)
    ranks = [DynamicLoader(rows, both, rank=rank) for rank in (0, 1)]
    (_, first), (_, second) = (next(loader.dicts()) for loader in ranks)
    assert first and second and both.global_batch == plan.global_batch
    with torch.no_grad():
        loss = sum(model(**one).loss for one in (*first, *second))
        total, count = torch.zeros(()), 0
        for _, batch in DynamicLoader(rows, plan):
            for sample in (sample for micro in batch.micro_batches for sample in micro.samples.values()):
                logits, labels = model(torch.from_numpy(sample.inputs)[None]).logits[0], torch.from_numpy(sample.labels)
                total, count = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), count + len(labels)
            break
    assert float(loss) == pytest.approx(float(total) / count, rel=1e-5)


def test_what_no_loader_can_serve(rows: list[dict[str, Any]], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="the data has 8 samples, fewer than the plan's global batch"):
        DynamicLoader(rows[:8], plan)
    divided = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2)
    with pytest.raises(InputError, match="the plan has 2 ranks, but 1 process was started"):
        DynamicLoader(rows, divided)
    with pytest.raises(InputError, match=r"the plan divides the model \(PP 2\)"):
        next(DynamicLoader(rows, divided, rank=1).dicts())
    with pytest.raises(InputError, match="rank is 2, but the plan has 2 ranks, counted from 0"):
        DynamicLoader(rows, divided, rank=2)
    with pytest.raises(InputError, match="epochs is 0; a number above 0 was expected"):
        DynamicLoader(rows, plan, epochs=0)
    with pytest.raises(InputError, match=r"a Plan was expected, as find_plans or Plan\.read\(path\) gives it, and str was given"):
        DynamicLoader(rows, "plan.json")  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="the plan has 2 ranks, but 3 processes were started"):
        DynamicLoader(rows, divided)
