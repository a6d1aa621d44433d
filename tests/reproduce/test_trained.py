"""Models trained for real: data that fills its rows, torch's pipeline against plain torch, and the figure that puts both side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import run_ranks

from penstock.cli.main import run
from penstock.data.dataset import open_data
from penstock.reproduce import trained
from penstock.reproduce.peers.checkout import PeerError
from penstock.reproduce.peers.torch_pipelining import PipelineSizes, PipelineSteps, _module, train_stage

SIZES = PipelineSizes(2, 16, 2, 32, 8, 2, 4, 2)


def stage(rank: int) -> PipelineSteps:
    return train_stage(rank, SIZES)


def test_torchs_pipeline_trains_as_one_process_does() -> None:
    """The same weights, batches and updates: what is compared with is a pipeline that works."""
    import torch

    first, last = run_ranks(stage, 2)
    assert first.losses == [] and len(last.losses) == 4 and len(last.times_s) == 2
    module = torch.nn.Sequential(*_module(SIZES, 0), *_module(SIZES, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    ids = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(1))
    for loss in last.losses:
        optimizer.zero_grad()
        own = torch.nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        own.backward()
        optimizer.step()
        assert loss == pytest.approx(own.item(), rel=1e-5)


def test_every_sample_fills_its_row(tmp_path: Path) -> None:
    """Or useful samples of ours would be compared with longer ones of torch's."""
    gpt, t5 = (open_data(trained._data(tmp_path, family), "train") for family in ("gpt", "t5"))
    assert set(np.asarray(gpt.lengths[0])) == {129}
    assert [set(np.asarray(side)) for side in t5.lengths] == [{128}, {62}]
    images = open_data(trained._data(tmp_path, "wide-resnet"), "train")
    assert images[0]["images"].shape == (3, 32, 32) and len({int(images[i]["labels"]) for i in range(64)}) == 10


def test_the_figure_tells_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def train(folder: Path, name: str, plan: Any, data: Path, steps: int) -> trained._Trained:
        return trained._Trained(40.0 if name == "same" else 50.0, 60.0, (2.0, 2.0 if name == "t5" else 1.0))

    def fail(sizes: PipelineSizes) -> PipelineSteps:
        raise PeerError("torch.distributed.pipelining failed: no gloo")

    monkeypatch.setattr(trained, "_found_plan", lambda *_: None)
    monkeypatch.setattr(trained, "_data", lambda folder, family: folder)
    monkeypatch.setattr(trained, "_trained", train)
    told = []
    for peer in (lambda sizes: PipelineSteps([0.5, 0.9, 1.0], []), fail):
        monkeypatch.setattr(trained, "train_with_torch", peer)
        assert run(["reproduce", "aceso", "--figure", "trained", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--json"]) == 0
        told += json.loads(capsys.readouterr().out)["results"]
    claims = [(claim["what"].split(":")[0], claim["found"], claim["holds"]) for claim in told[0]["claims"]]
    assert claims == [("gpt", 0.5, True), ("t5", 1.0, False), ("wide-resnet", 0.5, True), ("gpt", 40 * 0.9 / 32, True)]
    assert "no gloo" in told[1]["note"] and len(told[1]["claims"]) == 3
