"""Plan files: round trips, and how wrong ones are answered."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Predicted, Stage, StageMemory
from penstock.plans.schema import json_schema, plan_from_dict, plan_to_dict, read_plan, write_plan
from penstock.plans.validity import check_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "plans").glob("*.json"))

counts = st.integers(1, 10_000_000)
sizes = st.integers(0, 10_000_000)
ops = st.tuples(st.integers(0, 9_999_999), st.integers(0, 9_999_999))
members = st.integers(0, 9_999_999)
ranks = st.lists(members, min_size=1, max_size=9).map(tuple)
amounts = st.floats(0, 1e300, exclude_min=True)
maybe = st.none() | amounts
memories = st.builds(StageMemory, *[st.integers(0, 2**60)] * 9)
runs = st.builds(lambda ops, tp, dp, algo: OpRun(ops[0], ops[1], tp, dp, algo), ops, counts, counts, sizes)
stages = st.builds(
    lambda ops, **more: Stage(*ops, **more),
    ops,
    devices=st.lists(ranks, min_size=1, max_size=3).map(tuple),
    degrees=st.builds(Degrees, counts, counts, counts, counts),
    runs=st.lists(runs, max_size=3).map(tuple),
    recompute=st.lists(st.lists(ops, max_size=4).map(tuple), max_size=4).map(tuple),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
)
names = st.text(min_size=1).filter(lambda text: "\0" not in text)
references = names | st.dictionaries(
    names.filter(lambda key: key not in ("base", "family", "name")), st.integers() | st.text() | st.booleans(), min_size=1
)
plans = st.builds(
    Plan,
    model=references,
    cluster=references,
    global_batch=counts,
    stages=st.lists(stages, min_size=1, max_size=4).map(tuple),
    micro_batching=st.builds(
        MicroBatching,
        st.sampled_from(["padded", "packed"]),
        st.sampled_from(["fixed", "dynamic"]),
        st.none() | counts,
        st.none() | counts,
        per_replica=st.lists(counts, max_size=3).map(tuple),
        slower=st.dictionaries(members, st.tuples(*[st.floats(0.1, 9.0)] * 3), max_size=2).map(lambda own: tuple(sorted(own.items()))),
        slower_links=st.dictionaries(st.tuples(members, members), st.floats(0.1, 9.0), max_size=2).map(
            lambda own: tuple(sorted((*pair, factor) for pair, factor in own.items()))
        ),
    ),
    num_replicas=counts,
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    seq_length=sizes,
    dec_length=sizes,
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    costs=st.text(min_size=1),
    predicted=st.none()
    | st.builds(Predicted, amounts, st.text(min_size=1), maybe, maybe, maybe, maybe, st.lists(memories, max_size=3).map(tuple)),
    notes=st.lists(st.text(), max_size=3).map(tuple),
)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_round_trip(plan: Plan) -> None:
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan))), "plan") == plan


@given(plans)
@settings(max_examples=60, deadline=None)
def test_checking_never_crashes(plan: Plan) -> None:
    assert check_plan(plan)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_round_trip(path: Path, tmp_path: Path) -> None:
    plan = read_plan(path)
    assert check_plan(plan) == []
    write_plan(tmp_path / "again.json", plan)
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_memory_has_the_purposes_of_the_costs() -> None:
    from penstock.costs.memory import MemoryBreakdown

    assert [field.name for field in fields(StageMemory)] == [field.name for field in fields(MemoryBreakdown)]
    assert StageMemory(*range(9)).total_bytes == 36


def test_the_documented_example_is_valid() -> None:
    page = (ROOT / "docs" / "reference" / "plan.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```js\n(.*?)```", page, flags=re.DOTALL)
    assert check_plan(plan_from_dict(json.loads(re.sub(r"//.*", "", example)), "plan.md")) == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_json_schema_is_up_to_date() -> None:
    written = (ROOT / "docs" / "reference" / "plan.schema.json").read_text(encoding="utf-8")
    assert written == json_schema(), "run `python -m penstock.plans.schema`"


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, global_batch=8, micro_batch=1)
    data = plan_to_dict(plan)
    data["predicted"] = {"time_s": 1.0, "costs": "roofline", "memory": [{"weights_bytes": 3}]}
    return data


def changed(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with the field at a dotted path set."""
    result = copy.deepcopy(data)
    *parents, last = path.split(".")
    place: Any = result
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return result


WRONG = [
    ("global_batch", "eight", "global_batch"),
    ("global_batch", 8.0, "global_batch"),
    ("global_batch", True, "global_batch"),
    ("global_batch", -8, "global_batch"),
    ("global_batch", 0, "global_batch"),
    ("global_batch", 10**30, "global_batch"),
    ("global_batch", None, "global_batch"),
    ("global_batch", float("nan"), "global_batch"),
    ("gobal_batch", 8, "'global_batch'"),
    ("model", 7, "a name, a path or a mapping was expected"),
    ("model", "", "model"),
    ("model", {}, "model"),
    ("model", {"base": ["gpt-tiny"]}, "['gpt-tiny']"),
    ("model", "a\0.yaml", "a name was expected"),
    ("cluster", ["4xa100"], "cluster"),
    ("precision", "fp8", "'bf16'"),
    ("optimizer", "lion", "'adamw'"),
    ("schedule", "1F1B", "'1f1b'"),
    ("seq_length", -1, "seq_length"),
    ("num_replicas", 0, "num_replicas"),
    ("micro_batching", [], "micro_batching"),
    ("micro_batching.layout", "ragged", "'padded'"),
    ("micro_batching.sample", 3, "'samples'"),
    ("micro_batching.samples", 0, "micro_batching.samples"),
    ("stages", [], "stages"),
    ("stages", {"0": 1}, "stages"),
    ("stages.1.ops", "17-36", "FIRST:END"),
    ("stages.1.ops", [17, 36], "FIRST:END"),
    ("stages.1.ops", "17:99999999", "FIRST:END"),
    ("stages.1.devices", "1", "stages.1.devices"),
    ("stages.1.devices", [], "stages.1.devices"),
    ("stages.1.devices", [1], "stages.1.devices.0"),
    ("stages.1.devices", ["5-2"], "backwards"),
    ("stages.1.devices", ["0-9999999"], "more than 1000000 ranks"),
    ("stages.1.device", ["1"], "'devices'"),
    ("stages.1.degrees.pp", 2, "'tp' or 'ep' or 'dp' or 'cp'"),
    ("stages.1.degrees.tp", 0, "stages.1.degrees.tp"),
    ("stages.1.degrees.tp", "2", "stages.1.degrees.tp"),
    ("stages.1.runs", [{"ops": "17:18", "tp": 1}], "stages.1.runs.0.dp"),
    ("stages.1.runs", [{"ops": "17:18", "tp": 1, "dp": 1, "algos": 1}], "'algo'"),
    ("stages.1.recompute", ["", "", "", "", ""], "at most 4"),
    ("stages.1.recompute", [None], "stages.1.recompute.0"),
    ("stages.1.zero", 4, "stages.1.zero"),
    ("stages.1.sequence_parallel", 1, "stages.1.sequence_parallel"),
    ("predicted.time_s", float("nan"), "predicted.time_s"),
    ("predicted.time_s", float("inf"), "predicted.time_s"),
    ("predicted.time_s", -1.0, "predicted.time_s"),
    ("predicted.memory", [{"weights": 3}], "'weights_bytes'"),
    ("predicted.memory", [{"weights_bytes": 1.5}], "predicted.memory.0.weights_bytes"),
    ("notes", "one", "notes"),
    ("notes", [1], "notes.0"),
]


@pytest.mark.parametrize(("path", "value", "part"), WRONG, ids=[f"{path}={str(value)[:20]}" for path, value, _ in WRONG])
def test_wrong_fields_are_named(path: str, value: object, part: str, good: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(good, path, value)), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_plan(file)
    message = str(caught.value)
    assert path in message and part in message and str(file) in message
    assert len(message) < 600


@pytest.mark.parametrize("field", ["model", "cluster", "global_batch", "stages", "micro_batching", "schedule", "precision", "num_replicas"])
def test_missing_fields_are_named(field: str, good: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{field}: Field required"):
        plan_from_dict({name: value for name, value in good.items() if name != field}, "plan")


@pytest.mark.parametrize("version", [2, 0, "1", True, 1.0, None, 10**400])
def test_other_versions_are_refused(version: object, good: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"field 'version' is .*, this Penstock reads 1"):
        plan_from_dict({**good, "version": version}, "plan")


@pytest.mark.parametrize("data", [None, 3, [], "plan", {}, {"format": "penstock-profile", "version": 1}])
def test_other_files_are_refused(data: object) -> None:
    with pytest.raises(InputError, match="plan"):
        plan_from_dict(data, "plan 'x.json'")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"version": ' + "1" * 5000 + "}", "\x00", "nul"])
def test_text_that_is_no_json(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"plan\.json"):
        read_plan(file)


def test_a_plan_that_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    plan = Plan("gpt-tiny", "1xa100-40gb", 8, (Stage(0, 36, ((0,),), zero=7),), MicroBatching("padded", "fixed", 1))
    with pytest.raises(InputError, match=r"stages\.0\.zero"):
        write_plan(tmp_path / "plan.json", plan)
    assert list(tmp_path.iterdir()) == []
