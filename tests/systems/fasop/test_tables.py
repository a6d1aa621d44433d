"""FASOP's inputs: chains, layer times, node kinds and settings."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.systems.fasop.search import search_fasop
from penstock.systems.fasop.tables import FasopTables

LAYERS = ["embedding_layer", "block", "block", "block", "post_process"]
TINY = {
    "hidden_size": 8, "sequence_length": 4, "vocab_size": 100, "num_attention_heads": 2, "global_batch_size": 16, "layer_types": LAYERS,
}  # fmt: skip
KIND = {
    "instance": "p4d", "gpu": "A100", "gpus_per_node": 4, "intra_bits_per_s": 8e9, "inter_bits_per_s": 4e9,
    "usable_mem_gib": 2, "usd_per_hour": 3.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model whose last block is slower than the two before it."""
    (tmp_path / "models.json").write_text(json.dumps({"tiny": TINY}))
    (tmp_path / "node_types.json").write_text(json.dumps({"default": {"A": KIND}}))
    (tmp_path / "settings.json").write_text(
        json.dumps({"tiny-homo": {"model": "tiny", "node_table": "default", "nodes": "AA", "total_steps": 10}})
    )
    lines = ["model,gpu,tp,mbs,layer_index,layer_type,fwdbwd_seconds"]
    for gpu, speed in (("A100", 1), ("A10", 2)):
        for tp in (1, 2):
            for mbs in (1, 2):
                times = [0.3, 3.0, 3.0, 3.3, 0.6]
                lines += [f"tiny,{gpu},{tp},{mbs},{i},{LAYERS[i]},{t * speed * mbs / tp}" for i, t in enumerate(times)]
    (tmp_path / "layer_fwdbwd_cost.csv").write_text("\n".join(lines))
    return tmp_path


def test_chain_groups_layers_of_equal_times(folder: Path) -> None:
    source = FasopTables.open(folder)
    model = source.model("tiny")
    assert [(block.name, copies) for block, copies in model.runs] == [
        ("embedding_layer", 1), ("block", 2), ("block-3", 1), ("post_process", 1),
    ]  # fmt: skip
    assert [placed.name for placed in model.ops] == ["embedding_layer", "block.0.layer", "block.1.layer", "block-3.layer", "post_process"]
    assert model.num_parameters == 800 + 3 * (12 * 64 + 20800)
    assert model.max_tp() == 2
    assert source.layer_times_s("tiny")["A10", 2, 2].tolist() == [0.6, 6.0, 6.0, 6.6, 1.2]


def test_node_kinds_and_settings(folder: Path) -> None:
    source = FasopTables.open(folder)
    kind = source.node_kinds()["A"]
    assert (kind.gpu, kind.gpus_per_node, kind.intra_bits_per_s, kind.usable_mem_gib, kind.usd_per_hour) == ("A100", 4, 8e9, 2, 3.5)
    assert source.settings()["tiny-homo"].nodes == "AA"
    with pytest.raises(InputError, match=r"no node table 'defualt'. Did you mean 'default'"):
        source.node_kinds("defualt")


def test_wrong_input_is_explained(folder: Path) -> None:
    source = FasopTables.open(folder)
    with pytest.raises(InputError, match=r"no model 'tyny'. Did you mean 'tiny'"):
        source.model("tyny")
    times = folder / "layer_fwdbwd_cost.csv"
    text = times.read_text()
    times.write_text(text.replace("tiny,A100,1,1,2,", "tiny,A100,1,1,7,"))
    with pytest.raises(InputError, match=r"row 4, column 'layer_index': expected 0 to 4, the layers of tiny, got '7'"):
        FasopTables.open(folder).model("tiny")
    times.write_text(text.replace("tiny,A10,", "huge,A10,"))
    with pytest.raises(InputError, match=r"column 'model': expected one of tiny, got 'huge'"):
        FasopTables.open(folder).model("tiny")
    (folder / "models.json").write_text(json.dumps({"tiny": {**TINY, "hidden_size": "wide"}}))
    with pytest.raises(InputError, match=r"tiny.hidden_size: .*got 'wide'"):
        FasopTables.open(folder)
    times.unlink()
    with pytest.raises(InputError, match=r"'layer_fwdbwd_cost.csv' is missing"):
        FasopTables.open(folder)


@pytest.mark.parametrize("below", [False, True], ids=["beside", "known_cost"])
def test_vectors_as_fasop_ships_them(folder: Path, below: bool) -> None:
    """Forward times of one sample: three times as long with backward, and as much longer for more samples as `scaling` says."""
    (folder / "layer_fwdbwd_cost.csv").unlink()
    place = folder / "known_cost" if below else folder
    place.mkdir(exist_ok=True)
    np.save(place / "tiny_A100_1.npy", np.array([0.1, 1.0, 1.0, 1.1, 0.2]))
    np.save(place / "tiny_A10_2.npy", np.array([0.1, 1.0, 1.0, 1.1, 0.2], object), allow_pickle=True)
    np.save(place / "other_A10_2.npy", np.ones(3))
    (folder / "models.json").write_text(json.dumps({"tiny": TINY | {"scaling": {"A10": {"block": {"4": 1.5, "8": 2.5}}}}}))
    source = FasopTables.open(folder)
    times = source.layer_times_s("tiny")
    assert sorted({key[2] for key in times}) == [1, 2, 4, 8, 16] and {key[:2] for key in times} == {("A100", 1), ("A10", 2)}
    assert times["A100", 1, 4].tolist() == pytest.approx([1.2, 12, 12, 13.2, 2.4])
    assert [float(times["A10", 2, size][1]) for size in (1, 2, 4, 8, 16)] == pytest.approx([3, 3, 4.5, 7.5, 15])
    assert float(times["A10", 2, 16][0]) == pytest.approx(16 * 0.3)
    assert search_fasop(source, "tiny-homo").time_s > 0


def test_wrong_vectors_are_explained(folder: Path) -> None:
    (folder / "layer_fwdbwd_cost.csv").unlink()
    path = folder / "tiny_A100_1.npy"
    saved = io.BytesIO()
    np.save(saved, np.ones(5))
    hostile = io.BytesIO()
    np.save(hostile, np.array([print, 1], object), allow_pickle=True)
    huge = saved.getvalue().replace(b"(5,)", b"(5" + b"0" * 12 + b",)").replace(b" " * 12 + b"\n", b"\n")
    for data, message in (
        (b"x", "not a vector of numbers"), (saved.getvalue()[:-8], "not a vector"), (hostile.getvalue(), "is refused: it holds the name"),
        (huge, "not a vector"),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            FasopTables.open(folder).layer_times_s("tiny")
    np.save(path, np.ones(4))
    with pytest.raises(InputError, match="hold 4 numbers; expected 5 times, the layers of tiny"):
        FasopTables.open(folder).layer_times_s("tiny")
