"""Aceso's plan files: byte-equal round trips, conversion both ways, refusals by name, and scores."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.cli.main import run
from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.models.ops import Model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, OpRun, Plan
from penstock.plans.references import with_precision
from penstock.systems.aceso.files import FAMILY_FIELDS, AcesoPlan, aceso_text, read_aceso_plan, write_aceso_plan
from penstock.systems.aceso.plans import SIZES, OpGroup, from_plan, groups, to_plan
from penstock.systems.aceso.scoring import score_plan
from penstock.systems.aceso.tables import AcesoTables

OWN = {("gpt", "350M"): "gpt-350m", ("t5", "770M"): "t5-770m", ("resnet", "500M"): "wide-resnet-500m"}
GPT = with_precision(resolve_model("gpt-350m"), "fp16")


def plan_for(family: str, size: str, cuts: list[int], num_ops: int, **changes: Any) -> AcesoPlan:
    """One GPU per stage, nothing recomputed."""
    layers, fields = SIZES[family][size]
    counts = tuple(last - first for first, last in zip([0, *cuts], [*cuts, num_ops], strict=True))
    ones, zeros = tuple((1,) * n for n in counts), tuple((0,) * n for n in counts)
    flags = (False,) * len(counts)
    plan = AcesoPlan(family, size, layers, 64, 8, len(counts), (1,) * len(counts), flags, flags, counts, ones, ones, zeros, zeros,
                     **dict(zip(FAMILY_FIELDS[family], fields, strict=True)))  # fmt: skip
    return replace(plan, **changes)


def own_plan(plan: AcesoPlan, cluster: str = "8xv100-32gb") -> Plan:
    return to_plan(plan, GPT, model_ref="gpt-350m", cluster_ref=cluster)


def require_round_trip(path: Path, again: Path, tables: AcesoTables) -> None:
    """A file is written as it was read, and means the same plan over the tables' chain and over our own."""
    found = read_aceso_plan(path)
    write_aceso_plan(again, found)
    assert again.read_bytes() == path.read_bytes()
    model = tables.model(found.model_name, found.model_size)
    own = resolve_model(OWN[found.model_name, found.model_size])
    for chain in (model, with_precision(own, model.dtype)):
        plan = to_plan(found, chain, model_ref=own.name, cluster_ref="1xv100-32gb")
        assert from_plan(plan, chain) == found


@pytest.mark.parametrize(("family", "size"), OWN)
def test_plans_round_trip(small_tables: Path, tmp_path: Path, family: str, size: str) -> None:
    tables = AcesoTables.open(small_tables / "aceso")
    num_ops = tables.model(family, size).num_ops
    whole = plan_for(family, size, [], num_ops, recompute_ops=((1,) * num_ops,), checkpoint_activations=(True,))
    (tmp_path / "theirs.json").write_text(aceso_text(whole))
    require_round_trip(tmp_path / "theirs.json", tmp_path / "again.json", tables)


def test_the_published_plans_round_trip(published: Path, tmp_path: Path) -> None:
    tables = AcesoTables.open(published / "aceso" / "eurosys")
    for path in sorted((published / "aceso" / "single_gpu_configs").glob("*.json")):
        require_round_trip(path, tmp_path / path.name, tables)
        ours, found = tmp_path / "plan.json", read_aceso_plan(path)
        if (model := OWN.get((found.model_name, found.model_size))) is not None:
            assert run(["import", f"aceso:{path}", "--model", model, "--cluster", "1xv100-32gb", "--out", str(ours)]) == 0
            assert run(["check", str(ours)]) == 0
            assert run(["export", str(ours), "--to", f"aceso:{tmp_path / 'again.json'}"]) == 0
            assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def random_plan(tables: AcesoTables, model: Model, data: st.DataObject) -> AcesoPlan:
    """Any cuts, GPUs, degrees, splits and recomputation that the tables have profiles for."""
    family, size = model.config["family"], model.config["size"]
    num_ops = model.num_ops
    num_stages = data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_ops - 1), min_size=num_stages - 1, max_size=num_stages - 1)))
    gpus = data.draw(st.sampled_from([split for split in ([8], [4, 4], [1, 1, 2, 4], [2, 2, 4]) if len(split) == num_stages] or [[8]]))
    plan = plan_for(family, size, cuts[: len(gpus) - 1], num_ops)
    micro = max(tables.micro_batches(model))
    columns: list[list[tuple[int, ...]]] = [[], [], [], []]
    for count, total in zip(plan.num_ops_in_each_stage, gpus, strict=True):
        tps = [tp for tp in (1, 2, 4, 8) if total % tp == 0 and tables.op_rows(model, micro // (total // tp), tp) is not None]
        mixed = family == "resnet"  # resharding is priced between GPT's ops only at sizes that were measured
        draws = [data.draw(st.sampled_from(tps)) for _ in range(count if mixed else 1)] * (1 if mixed else count)
        columns[0].append(tuple(draws))
        columns[1].append(tuple(total // tp for tp in draws))
        columns[2].append(tuple(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))))
        columns[3].append((data.draw(st.integers(0, 1)) if family == "gpt" else 0,) * count)
    shapes = [set(zip(*stage, strict=True)) for stage in zip(columns[0], columns[1], columns[3], strict=True)]
    return replace(
        plan, global_batch_size=micro * 4, micro_batch_size=micro, num_gpus=tuple(gpus), model_parallel_size_of_each_op=tuple(columns[0]),
        data_parallel_size_of_each_op=tuple(columns[1]), recompute_ops=tuple(columns[2]), algo_of_each_op=tuple(columns[3]),
        checkpoint_activations=tuple(any(flags) for flags in columns[2]), resharding_stages=tuple(len(shape) > 1 for shape in shapes),
    )  # fmt: skip


@pytest.mark.parametrize(("family", "size"), OWN)
def test_plans_over_a_table_chain_convert_and_are_scored(small_tables: Path, family: str, size: str) -> None:
    tables = AcesoTables.open(small_tables / "aceso")
    model = tables.model(family, size)

    @settings(max_examples=8, deadline=None, phases=(Phase.generate,))  # a chain of hundreds of ops is not made smaller in a useful time
    @given(st.data())
    def check(data: st.DataObject) -> None:
        aceso = random_plan(tables, model, data)
        plan = to_plan(aceso, model, model_ref=model.name, cluster_ref="8xv100-32gb", costs=tables.name)
        assert from_plan(plan, model) == aceso
        assert score_plan(aceso, tables, 8).time_s > 0

    check()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_plans_over_our_own_chain_convert_both_ways(data: st.DataObject) -> None:
    """Cuts, degrees, splits and recomputation by whole groups survive the way there and back."""
    pieces = groups(GPT)
    ends = [piece.last for piece in pieces[:-1]]
    cut = data.draw(st.sampled_from(ends))
    plan = uniform_plan("gpt-350m", "4xv100-32gb", pp=2, tp=2, global_batch=16, micro_batch=4, precision="fp16")
    first, last = plan.stages
    inside = [piece for piece in pieces if piece.last <= cut]
    chosen = data.draw(st.lists(st.sampled_from(inside), unique=True, max_size=5))
    pattern = tuple((piece.first, piece.last) for piece in sorted(chosen, key=lambda piece: piece.first))
    merged: list[tuple[int, int]] = []
    for begin, end in pattern:
        merged[-1:] = [(merged[-1][0], end)] if merged and merged[-1][1] == begin else [*merged[-1:], (begin, end)]
    runs = (OpRun(inside[0].first, inside[0].last, 1, 2),) if data.draw(st.booleans()) and len(inside) > 2 else ()
    plan = replace(plan, stages=(
        replace(first, last=cut, runs=runs, recompute=(tuple(merged),) if merged else ()), replace(last, first=cut),
    ))  # fmt: skip
    aceso = from_plan(plan)
    assert sum(aceso.num_ops_in_each_stage) == 13 * 24 + 3
    back = to_plan(aceso, GPT, model_ref="gpt-350m", cluster_ref="4xv100-32gb")
    assert back == replace(plan, predicted=None)


def test_layers_correspond_op_by_op() -> None:
    names = [name for piece in groups(GPT) for name in piece.names]
    assert len(names) == 315 and names[0] == "embedding.0.encoder-embedding" and names[-1] == "head.0.gpt-post-process"
    core = tuple(f"layers.0.enc-attention-{part}" for part in ("score", "softmax", "dropout", "context"))
    assert groups(GPT)[3] == OpGroup(3, 4, core)
    t5 = resolve_model("t5-770m")
    assert sum(len(piece.names) for piece in groups(t5)) == 34 * 24 + 5 and groups(t5)[-1].last == t5.num_ops
    wide = resolve_model("wide-resnet-500m")
    assert sum(len(piece.names) for piece in groups(wide)) == 8 * 16 + 6 and groups(wide)[-1].last == wide.num_ops


def test_replicas_become_a_larger_dp() -> None:
    plan = uniform_plan("gpt-350m", "8xv100-32gb", pp=2, tp=2, replicas=2, global_batch=32, micro_batch=4, precision="fp16")
    found = from_plan(plan)
    assert found.num_gpus == (4, 4) and found.micro_batch_size == 8
    assert set(found.data_parallel_size_of_each_op[0]) == {2} and set(found.model_parallel_size_of_each_op[1]) == {2}
    back = own_plan(found)
    assert back.num_micro_batches == plan.num_micro_batches and back.stages[0].degrees == Degrees(2, 2)


def test_a_cut_inside_of_one_op_of_ours_is_made_behind_it() -> None:
    """Between the second layer's score and softmax, and before the dropout that ends its MLP: ops of the first and the last group of it."""
    for cut, op in ((1 + 13 + 3, "attention"), (1 + 13 + 12, "down")):
        plan = own_plan(plan_for("gpt", "350M", [cut], 315))
        assert GPT.ops[plan.stages[1].first - 1].name == f"layers.1.{op}"
        assert plan.notes == (f"Aceso's plan begins a stage inside of what is one op here; it begins behind that: layers.1.{op}.",)


def test_recomputation_of_a_part_is_of_all_or_of_what_is_never_kept() -> None:
    """Scores and probabilities of the first two layers, which fused attention never keeps, and the dense product before a dropout."""
    flags = [0] * 315
    for op in (3, 4, 16, 17, 20):
        flags[op] = 1
    plan = own_plan(plan_for("gpt", "350M", [], 315, recompute_ops=(tuple(flags),), checkpoint_activations=(True,)))
    assert {GPT.ops[op].name for op in plan.stages[0].recomputed()} == {"layers.1.out"}
    kept, whole = plan.notes
    assert kept.endswith("nothing of it runs again: layers.0.attention, layers.1.attention.")
    assert whole.endswith("all of it runs again: layers.1.out.")
    assert own_plan(from_plan(plan)).notes == ()


def test_degrees_that_change_inside_of_one_op_are_refused() -> None:
    tps = (*(1,) * 5, *(2,) * 310)
    degrees = {"model_parallel_size_of_each_op": (tps,), "data_parallel_size_of_each_op": (tuple(2 // tp for tp in tps),)}
    plan = plan_for("gpt", "350M", [], 315, num_gpus=(2,), resharding_stages=(True,), **degrees)
    with pytest.raises(InputError, match=r"split changes at Aceso's op 'layers.0.enc-attention-dropout', inside .*'layers.0.attention'"):
        own_plan(plan)


@pytest.mark.parametrize("tp", [1, 2])
def test_splits_count_where_ops_are_multiplied_and_divided(tp: int) -> None:
    """Aceso measures both splits of every op; of norms, dropout and ops on one GPU they are the same calculation."""
    swapped = tuple(int(op % 3 == 0) for op in range(315))
    degrees = {"model_parallel_size_of_each_op": ((tp,) * 315,), "data_parallel_size_of_each_op": ((2 // tp,) * 315,)}
    aceso = plan_for("gpt", "350M", [], 315, algo_of_each_op=(swapped,), num_gpus=(2,), resharding_stages=(True,), **degrees)
    plan = own_plan(aceso)
    chosen = {op for run in plan.stages[0].runs for op in range(run.first, run.last)}
    first_names = {piece.first: sum(len(before.names) for before in groups(GPT)[:index]) for index, piece in enumerate(groups(GPT))}
    linear = {op for op, at in first_names.items() if GPT.ops[op].op.kind == "linear" and swapped[at]}
    assert chosen == (linear if tp > 1 else set()) and (tp == 1 or len(linear) > 20)
    assert own_plan(from_plan(plan)) == plan


def test_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="is for gpt 1_3B of 24 layers; model 'gpt-350m' is gpt 350M"):
        own_plan(plan_for("gpt", "1_3B", [], 315))
    with pytest.raises(InputError, match="hidden_size of the Aceso plan is 2048, of model 'gpt-350m' 1024"):
        own_plan(plan_for("gpt", "350M", [], 315, hidden_size=2048))
    with pytest.raises(InputError, match="num_ops_in_each_stage: 300 ops, but model 'gpt-350m' has 315"):
        own_plan(plan_for("gpt", "350M", [], 300))
    with pytest.raises(InputError, match="has the sizes of none of Aceso's gpt models"):
        from_plan(uniform_plan("gpt2", "1xv100-32gb", global_batch=8, micro_batch=4, precision="fp16"))
    with pytest.raises(InputError, match="Aceso has no model like 'llama-tiny'"):
        groups(resolve_model("llama-tiny"))


def changed(plan: Plan, **stage: Any) -> Plan:
    return replace(plan, stages=tuple(replace(old, **stage) for old in plan.stages))


BASE = uniform_plan("gpt-350m", "2xv100-32gb", pp=2, global_batch=16, micro_batch=4, precision="fp16")
TWO = uniform_plan("gpt-350m", "2xv100-32gb", replicas=2, global_batch=16, micro_batch=4, precision="fp16")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(BASE, schedule="gpipe"), "schedule 'gpipe'"),
        (replace(BASE, precision="bf16"), "precision bf16; it trains gpt in fp16"),
        (replace(BASE, micro_batching=replace(BASE.micro_batching, layout="packed")), "packed"),
        (replace(BASE, micro_batching=replace(BASE.micro_batching, policy="dynamic")), "differ from batch to batch"),
        (replace(TWO, micro_batching=replace(TWO.micro_batching, per_replica=(3, 1))), "unequal numbers of micro-batches; all have"),
        (uniform_plan("gpt-350m", "2xv100-32gb", replicas=2, zero=1, global_batch=16, micro_batch=4, precision="fp16"),
         "stage 0: ZeRO-1"),
        (uniform_plan("gpt-350m", "2xv100-32gb", tp=2, sequence_parallel=True, global_batch=16, micro_batch=4, precision="fp16"),
         "stage 0: sequence parallelism"),
        (replace(BASE, stages=(replace(BASE.stages[0], recompute=(((1, 9),), ((9, 17),))), BASE.stages[1])), "stage 0: 2 recomputation"),
        (replace(BASE, stages=(replace(BASE.stages[0], devices=((1,),)), replace(BASE.stages[1], devices=((0,),)))), "ranks that do not"),
        (uniform_plan("gpt-350m", "3xv100-32gb", replicas=3, global_batch=12, micro_batch=4, precision="fp16"), "3 GPUs"),
        (uniform_plan("gpt-350m", "2xp3.2xlarge", tp=2, global_batch=16, micro_batch=4, precision="fp16"), "GPUs of several nodes"),
        (replace(BASE, cluster="1xp3.2xlarge+1xg5.xlarge"), "devices of several kinds"),
        (replace(BASE, stages=(replace(BASE.stages[0], last=195), replace(BASE.stages[1], first=195))), "head.logits, head.loss are"),
    ],
)  # fmt: skip
def test_what_aceso_has_no_word_for_is_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        from_plan(plan)
    assert "Aceso cannot express" in str(refused.value) and reason in str(refused.value)


def test_t5_is_not_resharded_inside_a_stage() -> None:
    plan = uniform_plan("t5-770m", "2xv100-32gb", tp=2, global_batch=16, micro_batch=4, precision="fp16")
    with pytest.raises(InputError, match="stage 0: ops with degrees of their own"):
        from_plan(changed(plan, runs=(OpRun(0, 1, 1, 2),)))


GOOD = plan_for("gpt", "350M", [], 315).to_dict()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_name": "gpd"}, "model_name is 'gpd'. Did you mean 'gpt'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"kv_channels": 64}, "kv_channels is not a field"),
        ({"num_layers": [3, 4]}, "num_layers is (3, 4)"),
        ({"num_layers": True}, "num_layers"),
        ({"global_batch_size": 63}, "global_batch_size 63 is not a multiple"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": 8.0}, "micro_batch_size"),
        ({"num_stages": 2}, "num_gpus has 1 entry, num_stages is 2"),
        ({"num_gpus": ["1"]}, "num_gpus.0"),
        ({"num_gpus": [2]}, "model_parallel_size_of_each_op.0.0 is 1 and dp 1, but num_gpus.0 is 2"),
        ({"num_gpus": [3], "data_parallel_size_of_each_op": [[3] * 315]}, "data_parallel_size_of_each_op.0.0 is 3, which does not divide"),
        ({"recompute_ops": [[2] * 315]}, "recompute_ops.0.0"),
        ({"recompute_ops": [[1] * 315]}, "checkpoint_activations.0 is False"),
        ({"recompute_ops": [[0] * 9]}, "recompute_ops.0 has 9 entries"),
        ({"algo_of_each_op": [[1] + [0] * 314]}, "resharding_stages.0 is False"),
        ({"checkpoint_activations": [0]}, "checkpoint_activations.0"),
        ({"hidden_dim": 3}, "hidden_dim"),
        ({"num_gpus": "x" * 10**6}, "num_gpus"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_aceso_plan(path)
    assert named in str(refused.value) and str(path) in str(refused.value) and len(str(refused.value)) < 3000


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"a": 1}', "\ufeff{}", '{"model_name": ' + "9" * 5000 + "}"])
def test_hostile_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        read_aceso_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError):
        read_aceso_plan(path)


def test_an_inconsistent_plan_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="num_gpus has 2 entries"):
        write_aceso_plan(tmp_path / "plan.json", plan_for("gpt", "350M", [], 315, num_gpus=(1, 1)))
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_inside_one_node_sends_nothing_over_the_network(small_tables: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_tables / "aceso", tmp_path / "aceso")
    sizes, speeds = (folder / "p2p_inter_node.csv").read_text().splitlines()
    (folder / "p2p_inter_node.csv").write_text(f"{sizes}\n{', '.join(str(float(speed) / 100) for speed in speeds.split(','))}\n")
    plan = plan_for("gpt", "350M", [100, 200], 315, micro_batch_size=4)
    fast, slow = (AcesoTables.open(one) for one in (small_tables / "aceso", folder))
    inside, crossing = ([score_plan(plan, tables, per_node) for tables in (fast, slow)] for per_node in (8, 2))
    assert inside[0] == inside[1]
    later = [its.messages_s > 1.5 * mine.messages_s for mine, its in zip(crossing[0].stages, crossing[1].stages, strict=True)]
    assert later == [False, True, True]  # the second of three stages sends to another node, and the third receives
