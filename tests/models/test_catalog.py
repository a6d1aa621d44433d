"""Finding models: by name, by a YAML file of sizes, from a named size with changes; and what the errors say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InputError
from penstock.models.catalog import FAMILIES, model_from_mapping, model_names, resolve_model


def test_every_named_size_builds() -> None:
    names = model_names()
    assert {"gpt-1.3b", "llama-8b", "bert-large", "t5-11b", "gpt2"} <= set(names)
    for name, family in names.items():
        model = resolve_model(name)
        assert (model.name, model.family) == (name, family)
        placed = [op.name for op in model.ops]
        assert len(set(placed)) == len(placed) == model.num_ops
        assert [op.name for op in model.ops if op.op.tied_to and op.op.tied_to not in placed] == []


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(InputError, match=r"unknown model 'gpt-1\.3'.*'gpt-1\.3b'") as caught:
        resolve_model("gpt-1.3")
    assert caught.value.exit_status == 2


def test_a_yaml_file_of_sizes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("family: llama\nlayers: 3\nhidden: 64\nheads: 8\nkv_heads: 2\nffn: 96\nvocab: 100\ntied: true\n", encoding="utf-8")
    model = resolve_model(str(path))
    assert (model.name, model.family, model.num_ops) == ("mine", "llama", 1 + 3 * 8 + 3)
    attention = 64 * (64 + 2 * 16) + 64 * 64
    assert model.num_parameters == 100 * 64 + 3 * (attention + 3 * 64 * 96 + 2 * 64) + 64


def test_numbers_with_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: llama-1b\neps: 1e-5\nrope_theta: 1e6\n", encoding="utf-8")
    model = resolve_model(str(path))
    assert (model.config["eps"], model.config["rope_theta"]) == (1e-5, 1e6)


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [("vgg-tiny", "convs", "[100000000000, 1, 1]"), ("resnet-tiny", "blocks", "[3, 4, 100000000000, 3]"), ("gpt-tiny", "layers", "10001"),
     ("t5-tiny", "vocab", "1" + "0" * 400), ("bert-tiny", "eps", "1" + "0" * 400)],
)  # fmt: skip
def test_sizes_beyond_any_model(base: str, field: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\n{field}: {value}\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"field '{field}' is ") as error:
        resolve_model(str(path))
    assert len(str(error.value)) < 300 + len(str(path))


def test_a_base_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "deeper.yml"
    path.write_text("base: gpt2\nname: deep\nlayers: 24\ndtype: fp32\n", encoding="utf-8")
    model = resolve_model(str(path))
    assert (model.name, model.dtype, model.config["hidden"], model.config["layers"]) == ("deep", "fp32", 768, 24)
    layer = 12 * 768**2 + 13 * 768
    assert model.num_parameters == resolve_model("gpt2").num_parameters + 12 * layer


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "layer": 3}, ["unknown field 'layer'", "'layers'"]),
        ({"family": "gpt", "layers": "two", "hidden": 64, "heads": 4}, ["'layers'", "'two'", "int"]),
        ({"family": "gpt", "layers": True, "hidden": 64, "heads": 4}, ["'layers'", "True"]),
        ({"family": "gpt", "layers": -1, "hidden": 64, "heads": 4}, ["'layers'", "-1", "0 or more"]),
        ({"base": "gpt2", "layers": 10**9}, ["'layers'", "1000000000", "at most 10000"]),
        ({"base": "t5-small", "dec_layers": 10**9}, ["'dec_layers'", "1000000000", "at most 10000"]),
        ({"base": "gpt2", "dropout": float("inf")}, ["'dropout'", "inf", "finite"]),
        ({"base": "gpt2", 1: 2}, ["unknown field '1'"]),
        ({"family": "gpt", "layers": 2, "hidden": 64}, ["missing field heads"]),
        ({"family": "bert"}, ["missing fields layers, hidden, heads, ffn"]),
        ({"family": "gpt", "layers": 2, "hidden": 64, "heads": 5}, ["hidden=64", "heads=5"]),
        ({"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 3, "ffn": 8}, ["heads=4", "kv_heads=3"]),
        ({"base": "gpt2", "attention_dropout": 0.1}, ["attention_dropout=0.1", "fused_attention: false"]),
        ({"base": "gpt2", "hidden": 7}, ["hidden=7", "heads=12"]),
        ({"base": "gtp2"}, ["'base'", "'gtp2'", "'gpt2'"]),
        ({"family": "lama"}, ["'family'", "'lama'", "'llama'"]),
        ({}, ["'family'", "None"]),
        (["gpt"], ["list"]),
    ],
)
def test_wrong_input_names_field_and_value(values: Any, told: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        model_from_mapping(values, "model file 'x.yaml'", "x")
    message = str(caught.value)
    assert all(part in message for part in told), message


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        resolve_model(str(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("family: [gpt\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken\.yaml' is not valid YAML: line 2"):
        resolve_model(str(broken))


def test_every_family_has_a_usual_shape_and_a_degree() -> None:
    for family in FAMILIES.values():
        for name in family.parts()[0]:
            model = resolve_model(name)
            assert model.usual_shape(2).samples == 2
            assert model.max_tp() >= 1


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("dropout", 5, "a probability"), ("dropout", -0.1, "a probability"), ("eps", -1e-5, "a small number"),
     ("eps", math.nan, "a finite number"), ("rope_theta", -1.0, "a number above 0"), ("rope_theta", math.inf, "a finite number")],
)  # fmt: skip
def test_numbers_that_make_no_model_are_refused(field: str, value: float, expected: str) -> None:
    with pytest.raises(InputError, match=f"field '{field}' is .*; expected {expected}"):
        model_from_mapping({"base": "llama-tiny", field: value}, "model file", "own")


def test_a_mixture_of_experts_says_what_becomes_of_its_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "num_local_experts": 2, "max_position_embeddings": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes}), encoding="utf-8")
    whole, note = resolve_model(f"hf:{tmp_path}").notes
    assert whole.startswith("tensor parallelism leaves 'model.layers.*.mlp.experts") and whole.endswith("whole on every rank.")
    assert note == "mixture of experts: cut and trained as it is; experts are not spread over devices yet."


def test_a_window_that_is_priced_as_full_attention_in_padded_rows_is_told() -> None:
    sizes = {"base": "llama-tiny", "seq_length": 128}
    notes = [model_from_mapping({**sizes, "window": window}, "test", "test").notes for window in (0, 32, 128)]
    assert notes[0] == notes[2] == () and "window of 32 tokens take the time of full attention" in notes[1][0]
