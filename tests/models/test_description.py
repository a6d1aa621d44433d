"""Descriptions as files: every model comes back equal, and a wrong file is told where it is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from oracles.kept import kept_bytes

from penstock.errors import InputError
from penstock.files import write_json
from penstock.models.catalog import model_names, resolve_model
from penstock.models.description import model_from_description, model_to_description
from penstock.models.shapes import Shape


@pytest.mark.parametrize("name", sorted(model_names()))
def test_round_trip(name: str) -> None:
    model = resolve_model(name)
    text = json.dumps(model_to_description(model))
    again = model_from_description(json.loads(text), "test")
    assert again == model
    assert [placed.op.signature for placed in again.ops] == [placed.op.signature for placed in model.ops]
    assert json.dumps(model_to_description(again)) == text


def test_a_file_resolves_like_a_name(tmp_path: Path) -> None:
    model = resolve_model("llama-70b")
    path = tmp_path / "mine.json"
    write_json(path, model_to_description(model))
    assert path.stat().st_size < 60_000  # Blocks are stored once, not per copy.
    again = resolve_model(str(path))
    assert again.num_parameters == model.num_parameters
    assert kept_bytes(again, 0, 40, Shape.padded(2, 64)) == kept_bytes(model, 0, 40, Shape.padded(2, 64))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The description of a small model with one entry replaced, or removed where the value is `...`."""
    description = copy.deepcopy(model_to_description(resolve_model("gpt-tiny")))
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    target: Any = description
    for step in steps:
        target = target[step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return description


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("format", "other", ["\"format\" is 'other'", "penstock-model"]),
        ("version", 2, ["version 2", "reads version 1"]),
        ("dtype", "fp23", ["dtype is 'fp23'", "'fp32'"]),
        ("name", ..., ["lacks name"]),
        ("seq_length", "long", ["seq_length is 'long'", "int"]),
        ("colour", "blue", ["unknown field 'colour'"]),
        ("runs", [], ["no ops"]),
        ("runs", ..., ["runs is None"]),
        ("runs/1/copies", 0, ["runs[1].copies is 0"]),
        ("runs/1/copies", True, ["runs[1].copies is True"]),
        ("runs/1/copies", 10**5, ["ops with all copies", "at most 320,000"]),
        ("runs/1/ops", [], ["runs[1] holds no ops"]),
        ("runs/1/ops/1/flops", {"split": {"tokens": 10**400}}, ["flops.split.tokens is 1000", "a number"]),
        ("runs/1/ops/1/carry/0/dims", ["tokens", 0], ["tensor 'qkv' has sizes ['tokens', 0]", "at least 1"]),
        ("runs/1/ops/1/carry/0/dims", ["tokens", 10**9, 10**9], ["tensor 'qkv'", "up to 10^15"]),
        ("runs/1/ops/1/config/made", None, ["op 'layers.0.qkv': config.made is None"]),
        ("runs/1/ops/1/config/made", [["hidden"]], ["config.made is [['hidden']]", "a list of names"]),
        ("runs/1/ops/1/flops", {"split": {"tokns": 1.0}}, ["runs[1].ops[1].flops.split", "'tokns'", "'tokens'"]),
        ("runs/1/ops/1/flops", {"split": {"tokens": "many"}}, ["flops.split.tokens is 'many'"]),
        ("runs/1/ops/1/flops", 12, ["runs[1].ops[1].flops is 12"]),
        ("runs/1/ops/1/nam", "x", ["unknown field 'runs[1].ops[1].nam'", "'name'"]),
        ("runs/1/ops/1/splits", [], ["op 'layers.0.qkv' has no splits"]),
        ("runs/1/ops/1/splits/0/saves_in", ["hiden"], ["op 'layers.0.qkv'", "saves_in names 'hiden'", "['hidden', 'residual']"]),
        ("runs/1/ops/1/splits/0/collectives/0/kind", "all_to_none", ["'all_to_none'", "'all_reduce'"]),
        ("runs/1/ops/1/carry/0/dims", ["tokens", "samples"], ["tensor 'qkv'", "at most one may be text"]),
        ("runs/1/ops/1/carry/0/dtype", "int3", ["tensor 'qkv' has dtype 'int3'"]),
        ("runs/1/ops/1/name", "norm1", ["'layers.0.norm1' appears more than once"]),
        ("runs/2/ops/1/tied_to", "embeding", ["tied to unknown op 'embeding'", "'embedding'"]),
    ],
)
def test_a_wrong_file_is_told_where(path: str, value: Any, told: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        model_from_description(changed(path, value), "model description 'x.json'")
    message = str(caught.value)
    assert message.startswith("model description 'x.json': ")
    assert all(part in message for part in told), message


def test_not_a_description() -> None:
    with pytest.raises(InputError, match="not a model description"):
        model_from_description([1, 2], "x.json")
