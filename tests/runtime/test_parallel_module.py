"""`penstock.parallelize` in a loop of one's own: what a plain loop of torch gives, saved, gone on with under another plan, exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cases import PLAIN, GivenBatch, described, module_case, own_loop, plain_training, save_values
from module_zoo import LongSkips
from runtime_cases import Case, Choice, make_case
from safetensors.torch import load_file
from torch import nn
from training_jobs import RandomSource

from penstock import DynamicLoader, find_plans
from penstock.errors import InputError
from penstock.models.description import model_to_description
from penstock.models.modules import build_chain
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.cutting.describing import describe, describe_origin
from penstock.models.modules.cutting.origins import made_of
from penstock.models.modules.cutting.packing import has_dropout
from penstock.models.ops import Model
from penstock.models.stored import stored_name
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.runtime.checkpoints.layout import WEIGHTS, stored_shapes
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.optimizing.optimizer import MASTER
from penstock.runtime.optimizing.own_rules import require_divides
from penstock.runtime.parallel_module import Parallel, _OpenRank, parallelize
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.source import load_share
from penstock.runtime.transport.world import ProcessGroups
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


def loop_alone(origin: str, case: Case, **settings: Any) -> tuple[Parallel, Any, list[Any]]:
    """A model on the only rank of a plan, its optimizer and its batches."""
    model = parallelize(origin, case.plan, groups=ProcessGroups())
    batches = [GivenBatch(program, RandomSource(case.model)) for (program,) in case.programs()]
    return model, model.optimizer(torch.optim.SGD, **settings), batches


def masters(model: Parallel) -> torch.Tensor:
    """All weights as the optimizer has them, laid flat one after the other."""
    held = [one.parameter for stage in model.rank.stages.values() for one in stage.held]
    return torch.cat([model.rank.update.optimizer.state(one).get(MASTER, one.detach()).flatten().clone() for one in held])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp16_scale_shows_nowhere(clip: float | None) -> None:
    """Beside the plain loop in fp32: the norm that is told, and what weights move by."""
    case = module_case("llama", precision="fp16")
    model, optimizer, batches = loop_alone(case.model.config["origin"], case, lr=1e-2)
    before = masters(model)
    for batch in batches:
        loss = model.step(batch)
        norm = None if clip is None else model.clip_grad_norm_(clip).item()
        optimizer.step()
        optimizer.zero_grad()
        assert not model.skipped and loss.isfinite() and (norm is None or 0.5 < norm < 10.0)
    settings = TrainingSettings(LearningRate(1e-2), OptimizerSettings("sgd", weight_decay=0.0, momentum=0.0), clip_norm=clip)
    first, last = (plain_training("llama", replace(case, works=works), settings)[1] for works in ((), case.works))
    names = [stored_name(held.place, held.name) for stage in model.rank.stages.values() for held in stage.held]
    wanted = torch.cat([(last[name] - first[name]).flatten() for name in names])
    assert (masters(model) - before - wanted).norm() <= 2e-2 * wanted.norm()


def test_an_overflow_of_fp16_changes_nothing_but_the_scale() -> None:
    case = make_case(PLAIN | {"family": "resnet", "recompute": "none"}, 3, iterations=2, dtype="fp16")
    case = replace(case, plan=replace(case.plan, precision="fp16"))
    model, optimizer, (batch, _) = loop_alone("resnet-tiny", case, lr=1e-2, momentum=0.9)
    scale = model.rank.update.scale
    assert scale is not None
    usual, scale.value = scale.value, 2.0**60
    statistics = [one.clone() for one in model.rank._statistics()]
    before = masters(model)
    for clip in (False, True):
        model.step(batch)
        assert not clip or not model.clip_grad_norm_(1.0).isfinite()
        optimizer.step()
        optimizer.zero_grad()
        assert model.skipped and torch.equal(masters(model), before)
        assert all(torch.equal(now, then) for now, then in zip(model.rank._statistics(), statistics, strict=True))
    assert scale.value == 2.0**58 and model.steps == 2
    scale.value = usual
    model.step(batch)
    optimizer.step()
    assert not model.skipped and not torch.equal(masters(model), before) and masters(model).isfinite().all()
    assert not any(torch.equal(now, then) for now, then in zip(model.rank._statistics(), statistics, strict=True))


@pytest.mark.parametrize(("changes", "message"), [
    ({}, r"schedule 'pipedream' updates each stage by itself after every micro-batch; in a loop of your own optimizer.step\(\) updates"),
    ({"replicas": 2}, r"the plan cannot be run:\n  schedule 'pipedream' updates each stage by itself, but there are 2 replicas."),
])  # fmt: skip
def test_plans_that_a_loop_cannot_run_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = uniform_plan("llama-tiny", "4xcpu", pp=2, global_batch=8, micro_batch=2, schedule="pipedream", **changes)
    with pytest.raises(InputError, match=message):
        parallelize("llama-tiny", plan)


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
    with pytest.raises(InputError, match=r"of another module: in 'embed' its weight 'weight' is 97 × 32, and 97 × 16 in LongSkips"):
        parallelize(LongSkips(width=16), one_rank())
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"the plan has 1 rank, but 3 processes were started"):
        parallelize(origin, one_rank())
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(InputError, match=r"tp_plan names 'layers.\*': no part of LongSkips is called so."):
        parallelize(origin, one_rank(), tp_plan={"layers.*": "colwise"})
    with pytest.raises(InputError, match=r"a Plan was expected, as find_plans .* and NoneType was given"):
        parallelize(origin, None)  # type: ignore[arg-type]
    model = parallelize(origin, one_rank())
    assert isinstance(model, Parallel)
    with pytest.raises(InputError, match=r"a batch was expected, as penstock\.DynamicLoader gives it, and dict was given"):
        model.step({"input_ids": [[1]]})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the optimizer holds weights of another rank: make it with model.optimizer\(…\)."):
        list(model.parameters())


def test_weights_that_nothing_uses_stay_as_they_are() -> None:
    """As under plain torch, which updates no weight without a gradient; an optimizer here would decay it."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.idle = nn.Embedding(20, 8), nn.Linear(8, 20), nn.Linear(3, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))  # type: ignore[no-any-return]

    net, rows = Idle(), [[1, 2, 3, 4]] * 8
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    plan = find_plans(net, "1xcpu", data=rows, tokens_per_batch=16, costs="roofline")[0]
    model = parallelize(net, plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    model.step(next(iter(DynamicLoader(rows, plan)))[1])
    optimizer.step()
    assert {name for name, p in net.named_parameters() if torch.equal(p, before[name])} == {"idle.weight", "idle.bias"}


ONE: Choice = {"family": "llama", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "gpipe", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


def in_own_loop(case: Case) -> tuple[Parallel, list[Any]]:
    """A case as a loop of one's own has it, and its batches."""
    rank = _OpenRank(case.model, ProcessGroups())
    rank.adopt(case.plan)
    return Parallel(rank, case.model), [GivenBatch(program, RandomSource(case.model)) for program, *_ in case.programs()]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_weights_move_as_far_as_their_gradients_say(dtype: str, tolerance: float, clip: float | None) -> None:
    """By plain SGD, with torch's gradients beside it: the norm is theirs, clipping never makes them longer, fp16's scale shows nowhere."""
    model, batches = in_own_loop(make_case(ONE, 3, iterations=2, precision=dtype))
    plain = build_chain(make_case(ONE, 3, iterations=2).model)
    for micro in batches[0].program.micro_batches:
        needs = ("inputs", "labels")
        plain(load_share(batches[0], batches[0].program, micro, (0, len(micro.samples)), needs, torch.device("cpu"), 0))["loss"].backward()
    expected = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters() if one.grad is not None]).item()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    assert {own.dtype for own in model.rank.update.optimizer.parameters} == {TORCH_DTYPES[dtype]}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**step)
    for step, batch in enumerate(batches):
        before = masters(model)
        model.step(batch)
        norm = expected if clip is None else model.clip_grad_norm_(clip).item()
        assert step or norm == pytest.approx(expected, rel=tolerance)
        optimizer.step()
        optimizer.zero_grad()
        moved = (masters(model) - before).double().norm().item()
        if clip is not None or not step:
            assert moved == pytest.approx(0.1 * 2.0**step * min(norm, clip or norm), rel=tolerance)
        schedule.step()
    assert model.steps == 2 and expected > 0.05


def test_a_step_is_clipped_only_where_its_own_norm_was_asked_for() -> None:
    model, (first, second) = in_own_loop(make_case(ONE, 3, iterations=2))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for batch, clip in ((first, 0.05), (second, None)):
        before = masters(model)
        model.step(batch)
        norm = model.rank.update.norm().item() if clip is None else model.clip_grad_norm_(clip).item()
        optimizer.step()
        optimizer.zero_grad()
        assert (masters(model) - before).double().norm().item() == pytest.approx(0.1 * (clip or norm), rel=1e-4) and norm > 0.05


def test_schedulers_turn_more_than_rates() -> None:
    """A cycle's momentum, and decay that somebody changes in the groups, as with torch's own optimizer."""
    model, batches = in_own_loop(make_case(ONE, 3, iterations=3))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3, base_momentum=0.2, max_momentum=0.9)
    plain = nn.ParameterList([masters(model)])
    beside = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    its = torch.optim.lr_scheduler.OneCycleLR(beside, 0.1, total_steps=3, base_momentum=0.2, max_momentum=0.9)
    for batch in batches:
        model.step(batch)
        plain[0].grad = torch.cat([one.parameter.grad.flatten() for s in model.rank.stages.values() for one in s.held])  # type: ignore
        for group in (*optimizer.param_groups, *beside.param_groups):
            group["weight_decay"] += 0.1
        optimizer.step()
        beside.step()
        optimizer.zero_grad()
        torch.testing.assert_close(masters(model), plain[0].detach())
        if batch is not batches[-1]:
            schedule.step()
            its.step()


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
        for p in weights:
            p.grad = p.grad / norm
        super().step()


def test_rules_that_look_at_whole_weights_are_refused_where_there_are_parts() -> None:
    """Of Adafactor and Muon a part is another thing than the whole; silently, as every shape is right."""
    plan = uniform_plan("llama-tiny", "4xcpu", global_batch=8, micro_batch=2, precision="fp32")
    zero = replace(plan.stages[0], zero=3)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, Together):
        require_divides(kind, {"lr": 0.0}, plan)
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adamax):
        require_divides(kind, {"lr": 1e-5}, replace(plan, precision="bf16"))
    with pytest.raises(InputError, match=r"Adafactor looks at whole weights, and bf16 has fp32 masters laid flat under this plan"):
        require_divides(torch.optim.Adafactor, {"lr": 1e-5}, replace(plan, precision="bf16"))
    with pytest.raises(InputError, match=r"Adafactor looks at whole weights, and ZeRO-3 divides them under this plan"):
        require_divides(torch.optim.Adafactor, {}, replace(plan, stages=(zero,)))
    with pytest.raises(InputError, match=r"Together looks at all weights at once, of which each rank of this plan updates some"):
        require_divides(Together, {"lr": 0.0}, replace(plan, stages=(replace(zero, zero=1),)))


def test_hooks_on_gradients_go_with_their_weights() -> None:
    """In another precision, or where a weight is read to a device, it is another tensor."""
    net = LongSkips()
    net.norm.weight.register_hook(lambda gradient: gradient * 0)
    case = module_case("long_skips")
    model = parallelize(net, case.plan, groups=ProcessGroups())
    assert model.rank.cut is not None
    model.rank.cut._replace(net.norm.weight, net.norm.weight.detach().clone())
    model.rank.cut._replace(net.gate, net.gate.detach().clone())
    (net.norm.weight.sum() + net.gate).backward()
    assert not net.norm.weight.grad.any() and net.gate.grad == 1  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"weight 'norm.weight' of LongSkips has a hook on its gradient, of which each rank"):
        model.rank.cut._replace(net.norm.weight, torch.zeros(16))


def test_a_loop_that_forgets_or_asks_for_too_much_is_told(tmp_path: Path) -> None:
    model, (first, second) = in_own_loop(make_case(ONE, 3, iterations=2))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    model.step(first)
    with pytest.raises(InputError, match=r"still there: call optimizer.zero_grad\(\) after optimizer.step\(\)"):
        model.step(second)
    with pytest.raises(InputError, match="a closure was given"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    optimizer.zero_grad()
    model.save(tmp_path)
    again, batches = in_own_loop(make_case(ONE, 3, iterations=2))
    again.optimizer(torch.optim.AdamW, lr=1e-3)
    with pytest.raises(InputError, match="has the optimizer state of sgd, but adamw is asked for"):
        again.load(tmp_path)
    other = again.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    again.load(tmp_path)
    assert again.steps == 1
    for one, own, batch in ((model, optimizer, second), (again, other, batches[1])):
        one.step(batch)
        own.step()
    assert torch.equal(masters(model), masters(again))
    model.plan = replace(model.plan, num_replicas=2)
    with pytest.raises(InputError, match="a batch is evaluated by plans of one replica"):
        model.evaluate(second)


def test_what_torch_calls_must_be_made_for_is_not_compiled() -> None:
    """Its dropout would be drawn by torch, and not by sample; its attention would see other samples."""
    for net, message in ((Dropping(0.5), "it has dropout"), (Dropping(0.0), "its attention is kept inside samples")):
        assert has_dropout(net) == ("dropout" in message)
        model = describe(made_of(net))
        model = replace(model, layouts=("padded",) if "dropout" in message else ("padded", "packed"))
        with pytest.raises(InputError, match=f"Dropping cannot be compiled: {message}"):
            parallelize(net, one_rank(model=model), compile=True)


class Dropping(nn.Module):
    """A model of two weights, with something between them."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(share), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.drop(self.embed(ids)))  # type: ignore[no-any-return]
