"""What is said of somebody's model before it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.models.modules.cutting import transformers_models
from penstock.models.modules.cutting.describing import describe, describe_origin
from penstock.models.modules.cutting.origins import made_of
from penstock.plans.precision import chosen_precision

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = transformers.GPTNeoXConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        attention_dropout=0.25, architectures=["GPTNeoXForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_dropout_that_is_left_out_is_told_and_a_model_traced_once_while_its_file_stays_as_it_is(folder: str) -> None:
    model = describe_origin(f"hf:{folder}")
    assert any("attention dropout of 0.25 is left out" in note for note in model.notes) and "packed" in model.layouts
    assert describe_origin(f"hf:{folder}") is model
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    assert describe_origin(f"hf:{folder}").num_ops == model.num_ops - 1


@pytest.mark.parametrize(("named", "planned", "told"), [("float32", "fp32", False), ("float16", "fp16", False), (None, "bf16", True)])
def test_the_dtype_of_its_config_is_that_of_its_plans(folder: str, named: str | None, planned: str, told: bool) -> None:
    config = Path(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": named}))
    model, notes = chosen_precision(resolve_model(f"hf:{folder}"), resolve_cluster("1xa100-40gb"))
    assert model.dtype == planned and any("the config names no dtype" in note for note in notes) == told


def test_why_a_large_model_is_padded_is_told(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "_SMALL_BYTES", 0)
    model = describe_origin(f"hf:{folder}")
    assert model.layouts == ("padded",) and any(note.startswith("samples are padded: a model so large") for note in model.notes)


def test_layers_that_would_be_skipped_by_chance_run_and_a_note_says_so(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BartConfig(
        vocab_size=40, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32, encoder_layerdrop=0.1,
        decoder_layerdrop=0.2, architectures=["BartForConditionalGeneration"], **sizes,
    )  # fmt: skip
    config.save_pretrained(str(tmp_path))
    model = describe_origin(f"hf:{tmp_path}")
    assert any("layerdrop of 0.2 is left out" in note for note in model.notes)
    assert {"model.encoder.layers.0", "model.decoder.layers.0", "model.decoder.layers.1"} <= {*model.names}


def test_a_model_without_places_takes_samples_of_any_length(tmp_path: Path) -> None:
    from penstock import find_plans

    config = transformers.BloomConfig(
        vocab_size=40, hidden_size=16, n_layer=1, n_head=2, architectures=["BloomForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(str(tmp_path))
    assert find_plans(f"hf:{tmp_path}", "1xcpu", data=[[1] * 200, [2] * 9], tokens_per_batch=200)[0].seq_length == 199


def test_a_table_of_places_that_is_too_short_is_told() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(9, 4), nn.Parameter(torch.zeros(64, 4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.places[: ids.shape[1]]  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"of length 96: .*a table of places of its own \(`pos\[:, :n\]`\) must have as many rows"):
        describe(made_of(Short()))
