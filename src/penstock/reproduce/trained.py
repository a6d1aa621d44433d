"""A tiny GPT, T5 and Wide-ResNet profiled, planned and trained for real on two processes, beside torch.distributed.pipelining."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.files import write_bytes, write_json, write_text
from penstock.plans.plan import Plan
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, at_least, at_most
from penstock.reproduce.peers.torch_pipelining import PipelineSizes, train_with_torch

__all__ = ["TRAINED"]

_CLUSTER, _BATCH, _MICRO_BATCH, _LAYERS, _LENGTH, _VOCAB = "2xcpu", 32, 4, 8, 128, 512
_MODELS: Mapping[str, dict[str, Any]] = {
    "gpt": {"base": "gpt-tiny", "layers": _LAYERS, "hidden": 128, "heads": 4, "seq_length": _LENGTH, "vocab": _VOCAB, "tied": False,
            "activation": "gelu"},
    "t5": {"base": "t5-tiny", "vocab": _VOCAB, "seq_length": _LENGTH, "dec_length": _LENGTH // 2},
    "wide-resnet": {"base": "resnet-tiny", "width_factor": 2, "wide_conv1": False, "image_size": 32, "num_classes": 10},
}  # fmt: skip
_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class _Trained:
    """One run: samples per second, as predicted and as measured, and its losses."""

    measured: float
    predicted: float
    losses: tuple[float, ...]


def _data(folder: Path, family: str) -> Path:
    """Texts of which every sample fills its row, or images whose brightness tells their class; made once."""
    from penstock.data.images import prepare_images
    from penstock.data.text.prepare import TextRequest, prepare_text

    out, numbers = folder / f"data-{family}", random.Random(0)
    if family == "wide-resnet":
        generator = np.random.default_rng(0)
        records = generator.integers(0, 70, (640, 3073)).astype(np.uint8)
        records[:, 0] = generator.integers(0, 10, len(records))
        records[:, 1:] += 17 * records[:, :1]
        write_bytes(folder / "images" / "data_batch_1.bin", records.tobytes())
        prepare_images([folder / "images"], out, (9.0, 1.0, 0.0))
        return out
    lines = []
    for _ in range(400):
        start = numbers.randrange(500)
        counted = [str(number) for number in range(start, start + 2 * _LENGTH)]
        text = " ".join(counted)
        lines.append({"text": text} if family == "gpt" else {"input": text, "target": " ".join(reversed(counted))})
    write_text(folder / f"{family}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    limits = (_LENGTH + 1, None) if family == "gpt" else (_LENGTH, _LENGTH // 2 - 2)
    prepare_text(TextRequest((folder / f"{family}.jsonl",), out, train_tokenizer=_VOCAB, limits=limits))
    return out


def _found_plan(folder: Path, model: Path, budget_s: float) -> Plan:
    """Measures the model's ops on both processors at once, and takes the best plan by them."""
    from penstock.costs.profiled import Profiled
    from penstock.models import resolve_model
    from penstock.profiling.run import Profiler
    from penstock.profiling.together import measure_together
    from penstock.search import best_plans

    path = folder / f"{model.stem}-profile.json"
    units = [unit for unit in Profiler.open(path, "cpu").units([resolve_model(str(model))], [1]) if unit.layout == "padded"]
    measure_together(path, units, 2, time_budget_s=budget_s, progress=lambda name: None)
    return best_plans(str(model), _CLUSTER, _BATCH, costs=Profiled.open(path), max_tp=1, top=1)[0].plan


def _trained(folder: Path, name: str, plan: Plan, data: Path, steps: int) -> _Trained:
    from penstock.runtime.request import TrainRequest
    from penstock.runtime.settings import LearningRate, TrainingSettings
    from penstock.runtime.trainer import PlanTrainer

    request = TrainRequest(plan, str(data), steps, str(folder / f"run-{name}"), TrainingSettings(LearningRate(_LEARNING_RATE)))
    trainer = PlanTrainer(request)
    result = trainer.train()
    return _Trained(_BATCH / result.time_s, _BATCH / trainer.predicted(result).time_s, tuple(result.losses))


def _measured(evidence: Evidence) -> Drawing:
    from penstock.plans.build import uniform_plan

    steps, budget_s = (8, 6.0) if evidence.quick else (24, 30.0)
    runs: dict[str, _Trained] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, fields in _MODELS.items():
            model = folder / f"{family}.yaml"
            write_json(model, fields)
            runs[family] = _trained(folder, family, _found_plan(folder, model, budget_s), _data(folder, family), steps)
        same = uniform_plan(str(folder / "gpt.yaml"), _CLUSTER, global_batch=_BATCH, micro_batch=_MICRO_BATCH, pp=2, schedule="1f1b")
        pipeline = _trained(folder, "same", same, folder / "data-gpt", steps)
    sizes = _MODELS["gpt"]
    asked = PipelineSizes(_LAYERS, sizes["hidden"], sizes["heads"], _VOCAB, _LENGTH, _MICRO_BATCH, _BATCH // _MICRO_BATCH, steps)
    torch_s, said = None, ""
    try:
        torch_s = statistics.median(train_with_torch(asked).times_s)
    except PenstockError as error:
        said = f" {error}"
    claims = [at_most(f"{family}: last loss, as a share of the first", run.losses[-1] / run.losses[0], 0.99)
              for family, run in runs.items()]  # fmt: skip
    if torch_s:
        share = pipeline.measured * torch_s / _BATCH
        claims.append(at_least("gpt: speed of the same pipeline beside torch.distributed.pipelining", share, 0.7))
    curves = [
        Plotted("torch.distributed.pipelining, 1F1B", ["gpt"], [_BATCH / torch_s if torch_s else None]),
        Plotted("Penstock, the same pipeline", ["gpt"], [pipeline.measured]),
        Plotted("Penstock, the plan found", list(runs), [run.measured for run in runs.values()]),
        Plotted("predicted of it", list(runs), [run.predicted for run in runs.values()]),
    ]
    return Drawing(curves, "", "samples per second", claims, log_y=True, note=(
        "Profiled, planned and trained in this run on two processes of this machine's processor: tiny models, rows that are full. "
        f"Other load on the machine shows.{said}"
    ))  # fmt: skip


TRAINED = FigureSpec("trained", "tiny GPT, T5 and Wide-ResNet: profiled, planned, trained", _measured)
