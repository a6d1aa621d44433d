"""`penstock prepare-data`, `search` and `train` one after the other, for images and for BERT shards, with evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan

STEPS, BATCH = 4, 16


def write_cifar(folder: Path) -> Path:
    """Images whose brightness tells their class, so that there is something to learn."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("data_batch_1", 120), ("test_batch", 20)):
        records = rng.integers(0, 70, (count, 3073)).astype(np.uint8)
        records[:, 0] = rng.integers(0, 10, count)
        records[:, 1:] += 17 * records[:, :1]
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_folders(folder: Path) -> Path:
    """Pictures of several sizes, some grey, in a folder for each class."""
    images = pytest.importorskip("PIL.Image", reason="the Python package 'pillow' is not installed")
    rng = np.random.default_rng(0)
    for label in range(4):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(12):
            pixels = (rng.integers(0, 60, (64 + number, 70, 3)) + 50 * label).astype(np.uint8)
            images.fromarray(pixels if number % 5 else pixels[..., 0]).save(folder / f"class{label}" / f"{number}.png")
    return folder


def write_shard(path: Path) -> Path:
    """Padded samples of 20 to 96 tokens with up to eight masked ones."""
    h5py = pytest.importorskip("h5py", reason="the Python package 'h5py' is not installed")
    rng, count, longest, most = np.random.default_rng(0), 60, 96, 8
    parts = {"input_ids": longest, "input_mask": longest, "segment_ids": longest, "masked_lm_positions": most, "masked_lm_ids": most}
    found: dict[str, Any] = {name: np.zeros((count, width), np.int32) for name, width in parts.items()}
    for row in range(count):
        length, masked = int(rng.integers(20, longest + 1)), int(rng.integers(1, most + 1))
        places = np.sort(rng.choice(np.arange(1, length), masked, replace=False))
        found["input_ids"][row, :length] = rng.integers(5, 500, length)
        found["input_mask"][row, :length], found["segment_ids"][row, length // 2 : length] = 1, 1
        found["masked_lm_positions"][row, :masked], found["masked_lm_ids"][row, :masked] = places, found["input_ids"][row, places]
        found["input_ids"][row, places] = 4
    with h5py.File(path, "w") as file:
        for name, values in {**found, "next_sentence_labels": rng.integers(0, 2, count)}.items():
            file[name] = values
    return path


def prepared(source: Path, out: Path, *options: str) -> str:
    assert run(["prepare-data", str(source), "--split", "3,1,0", "--out", str(out), "--json", *options]) == 0
    return str(out)


def trained(plan: Path, data: str, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    given = ["--data", data, "--steps", str(STEPS), "--eval-every", "2", "--lr", "3e-4", *options]
    assert run(["train", str(plan), "--out", str(out), "--json", *given]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == STEPS and all(np.isfinite(found["losses"]))
    assert [one["step"] for one in found["evaluated"]] == [2, 4] and all(0 <= one["accuracy"] <= 1 for one in found["evaluated"])
    return found


def test_images_of_cifar10(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that search finds; then one process and two stages, which give the same losses."""
    data = prepared(write_cifar(tmp_path / "cifar-10-batches-bin"), tmp_path / "data")
    (tmp_path / "cifar.yaml").write_text("base: resnet-tiny\nimage_size: 32\nnum_classes: 10\ndtype: fp32\n", encoding="utf-8")
    model, plan = str(tmp_path / "cifar.yaml"), tmp_path / "plan.json"
    size = ("--global-batch", str(BATCH), "--micro-batches", "4")
    assert run(["search", "--model", model, "--cluster", "2xcpu", *size, "--out", str(plan), "--json"]) == 0
    trained(plan, data, tmp_path / "found", capsys)
    # Sums of two threads differ in their last bits from those of one, which batch statistics enlarge.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    losses = []
    for pp in (1, 2):
        write_plan(plan, uniform_plan(model, "2xcpu", global_batch=BATCH, micro_batch=4, pp=pp))
        losses.append(trained(plan, data, tmp_path / f"run{pp}", capsys)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_folders_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepared(write_folders(tmp_path / "images"), tmp_path / "data", "--image-size", "64")
    plan = tmp_path / "plan.json"
    write_plan(plan, uniform_plan("resnet-tiny", "2xcpu", global_batch=BATCH, micro_batch=8))
    assert trained(plan, data, tmp_path / "run", capsys)["tokens_per_s"] > 0


def test_shards_of_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padded in one process, packed in two stages: the same losses."""
    data = prepared(write_shard(tmp_path / "shard.hdf5"), tmp_path / "data", "--vocab-size", "500")
    plan, losses = tmp_path / "plan.json", []
    for layout, pp in (("padded", 1), ("packed", 2)):
        write_plan(plan, uniform_plan("bert-tiny", "2xcpu", global_batch=BATCH, micro_batch=4, pp=pp, layout=layout))  # type: ignore[arg-type]
        losses.append(trained(plan, data, tmp_path / f"run{pp}", capsys)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("image_size: 64\nnum_classes: 10\n", "takes images of 64 × 64, but"),
        ("image_size: 32\nnum_classes: 7\n", "has 10 classes, model 'other' only 7"),
    ],
)
def test_images_that_do_not_suit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: str, message: str) -> None:
    data, plan = prepared(write_cifar(tmp_path / "cifar"), tmp_path / "data"), tmp_path / "plan.json"
    (tmp_path / "other.yaml").write_text(f"base: resnet-tiny\n{sizes}", encoding="utf-8")
    write_plan(plan, uniform_plan(str(tmp_path / "other.yaml"), "2xcpu", global_batch=BATCH, micro_batch=4))
    assert run(["train", str(plan), "--data", data, "--steps", "1", "--out", str(tmp_path / "run")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "option", [("--reserve-memory", "1.5"), ("--reserve-memory", "-0.1"), ("--warmup", "-1"), ("--budget-steps", "-2")]
)
def test_numbers_that_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]) -> None:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=8))
    given = ["--data", "nowhere", "--steps", "1", "--out", str(tmp_path / "run")]
    assert run(["train", str(tmp_path / "plan.json"), *given, *option]) == 2
    assert f"{option[0]} is {option[1]}" in capsys.readouterr().err
