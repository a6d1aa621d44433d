"""FASOP's result rows: the forms its files have, round trips, rows from plans, and what a row cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan, Predicted, Stage, StageMemory
from penstock.systems.fasop.rows import COLUMNS, FasopRow, fasop_text, read_fasop_rows, row_of_plan, write_fasop_rows
from penstock.systems.fasop.tables import FasopTables

OLD = """\
mbs,tp,dp,pp,node placement,partition,estimated time (step/s),pipeline time,DP all-reduce time,Emb layer all-reduce time,\
price_per_step,is_oom,oom_gpumem,is_fsdp_oom,fsdpoom_gpumem
4,1,16,1.0,"['g5.24xlarge', 'g5.24xlarge']",[26],0.95,0.7,0.25,0.0,0.006,False,tensor([9.0552]),True,tensor(5.3)
2,4,2,2.0,"['p4d.24xlarge', 'g5.24xlarge']","[11, 15]",1.5,1.4,0.1,0.0,,False,,False,
"""
PLAN = uniform_plan("gpt-tiny", "1xp4d.24xlarge+2xg5.24xlarge", pp=4, tp=2, replicas=2, global_batch=32, micro_batch=2)


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_as_fasop_writes_it(tmp_path: Path) -> None:
    first, second = read_fasop_rows(table(tmp_path, OLD))
    assert first == FasopRow(
        4, 1, 16, 1, ("g5.24xlarge", "g5.24xlarge"), (26,), time_s=0.95, pipeline_s=0.7, dp_all_reduce_s=0.25, embedding_all_reduce_s=0.0,
        price_usd_per_step=0.006, is_oom=False, memory_gib=9.0552, is_fsdp_oom=True, fsdp_memory_gib=5.3,
    )  # fmt: skip
    assert second.price_usd_per_step is None and second.memory_gib is None and second.num_a100 is None


numbers = st.none() | st.floats(0, 1e6)
counts = st.integers(1, 1024)
names = st.lists(st.sampled_from(["p4d.24xlarge", "g5.24xlarge", "my node"]), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.builds(
    lambda parts, *rest: FasopRow(*rest[:3], len(parts), rest[3], parts, *rest[4:]),
    st.lists(counts, min_size=1, max_size=8).map(tuple), counts, counts, counts, names, st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9), numbers, numbers, numbers, numbers, numbers, st.none() | st.booleans(), numbers,
    st.none() | st.booleans(), numbers, numbers,
), min_size=1, max_size=4))  # fmt: skip
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[FasopRow]) -> None:
    path = tmp_path_factory.mktemp("fasop") / "rows.csv"
    write_fasop_rows(path, rows)
    found = read_fasop_rows(path)
    assert found == sorted(rows, key=lambda row: float("inf") if row.time_s is None else row.time_s)


def test_a_plan_as_a_row() -> None:
    memory = tuple(StageMemory(weights_bytes=bytes_) for bytes_ in (30 << 30, 1, 2, 3))
    row = row_of_plan(replace(PLAN, predicted=Predicted(1.25, "roofline", price_usd=0.5, memory=memory)))
    assert row == FasopRow(
        2, 2, 2, 4, ("p4d.24xlarge", "g5.24xlarge", "g5.24xlarge"), (2, 1, 1, 2), num_a100=1, num_a10=2, time_s=1.25,
        price_usd_per_step=0.5, is_oom=False, memory_gib=30.0,
    )  # fmt: skip
    assert fasop_text([row]) == (
        "mbs,tp,dp,pp,node placement,num_a100,num_a10,partition,estimated time (s/step),pipeline time,DP all-reduce time,"
        "embedding layer all-reduce time,price_per_step,is_oom,oom_gpumem,is_fsdp_oom,fsdpoom_gpumem,train_cost\n"
        "2,2,2,4,\"['p4d.24xlarge', 'g5.24xlarge', 'g5.24xlarge']\",1,2,\"[2, 1, 1, 2]\",1.25,,,,0.5,False,30.0,,,\n"
    )
    full = tuple(StageMemory(weights_bytes=bytes_ << 30) for bytes_ in (30, 1, 30, 1))  # too much for the A10Gs of stage 2
    assert row_of_plan(replace(PLAN, predicted=Predicted(1.0, "roofline", memory=full))).is_oom is True
    assert row_of_plan(PLAN).time_s is None


def test_a_plan_over_fasops_own_chain(small_tables: Path) -> None:
    tables = FasopTables.open(small_tables / "fasop")
    model = tables.model("T5")
    cut, stages = model.config["required_cuts"][0], model.num_ops

    def plan(at: int) -> Plan:
        cluster = "2xv100-32gb"
        base = uniform_plan("gpt-tiny", cluster, pp=2, global_batch=8, micro_batch=1)
        halves = (Stage(0, at, ((0,),)), Stage(at, stages, ((1,),)))
        return replace(base, model="T5", stages=halves, seq_length=model.seq_length, precision="fp16")

    assert row_of_plan(plan(cut), model).partition == (cut, stages - cut)
    with pytest.raises(InputError, match=r"FASOP cannot express stage 0: it holds encoder and decoder\. Cut at op"):
        row_of_plan(plan(cut + 2), model)


T5 = uniform_plan("t5-tiny", "2xa100-40gb", pp=2, global_batch=8, micro_batch=2)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (uniform_plan("gpt-tiny", "2xa100-40gb", recompute="full", pp=2, global_batch=8, micro_batch=2), "stage 0: it recomputes ops"),
        (uniform_plan("gpt-tiny", "2xa100-40gb", zero=1, replicas=2, global_batch=8, micro_batch=2), "stage 0: zero is 1"),
        (uniform_plan("gpt-tiny", "2xa100-40gb", tp=2, sequence_parallel=True, global_batch=8, micro_batch=2), "sequence parallelism"),
        (uniform_plan("gpt-tiny", "4xa100-40gb", tp=2, global_batch=8, micro_batch=2), "2 idle devices: it always uses all 4"),
        (replace(T5, schedule="gpipe"), "the schedule 'gpipe'"),
        (replace(T5, stages=(replace(T5.stages[0], last=T5.stages[0].last + 14), replace(T5.stages[1], first=T5.stages[1].first + 14))),
         "stage 1: it starts at op"),
        (replace(T5, stages=(replace(T5.stages[0], last=32), replace(T5.stages[1], first=32))), "stage 0: it holds encoder and decoder"),
        (replace(PLAN, stages=(replace(PLAN.stages[0], last=12), replace(PLAN.stages[1], first=12), *PLAN.stages[2:])), "'layers.1'"),
        (replace(PLAN, micro_batching=replace(PLAN.micro_batching, policy="dynamic")), "differ from batch to batch"),
    ],
)  # fmt: skip
def test_what_a_row_cannot_express(plan: Plan, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        row_of_plan(plan)
    assert "FASOP cannot express" in str(refused.value) and reason in str(refused.value)


GOOD = {"mbs": "1", "tp": "1", "dp": "1", "pp": "2", "node placement": "['a']", "partition": "[1, 2]"}


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("mbs", "0"), ("mbs", ""), ("mbs", "nan"), ("tp", "-1"), ("dp", "1.5"), ("pp", "1e300"), ("pp", "3"),
        ("node placement", "a"), ("node placement", "[]"), ("node placement", "['a' 'b']"), ("node placement", "__import__('os')"),
        ("node placement", "['" * 5000), ("partition", "[]"), ("partition", "[1, -2]"), ("partition", "[" + "9" * 5000 + "]"),
        ("is_oom", "maybe"), ("oom_gpumem", "tensor([1, 2])"), ("oom_gpumem", "1e999"), ("estimated time (s/step)", "inf"),
        ("num_a100", "0.5"), ("train_cost", "x"),
    ],
)  # fmt: skip
def test_wrong_cells_are_named(column: str, cell: str, tmp_path: Path) -> None:
    cells = {**GOOD, column: cell}
    header, row = ",".join(cells), ",".join('"' + value.replace('"', '""') + '"' for value in cells.values())
    with pytest.raises(InputError) as refused:
        read_fasop_rows(table(tmp_path, f"{header}\n{row}\n"))
    named = "partition" if (column, cell) == ("pp", "3") else column
    assert f"row 2, column '{named}'" in str(refused.value)


@pytest.mark.parametrize("text", ["", "mbs,tp\n1,1\n", ",".join(COLUMNS.values()) + "\n", "mbs\n\n\n"])
def test_wrong_tables(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_fasop_rows(table(tmp_path, text))


def test_names_that_a_row_cannot_hold() -> None:
    with pytest.raises(InputError, match="cannot name a node \"it's\""):
        fasop_text([FasopRow(1, 1, 1, 1, ("it's",), (3,))])
