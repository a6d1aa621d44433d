"""Whole `penstock train` runs beside what was predicted for them: fixed and dynamic plans, padded and packed, of several sizes.

`benchmarks/accuracy.py --parts runs` runs them and prints the table. Layers are cut to have models of other sizes with the same ops, which
are what a profile knows. Plan and data of a run stay in the folder, so that another profile can be asked about it later, without a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from flows import penstock, prepared
from lines import Lines

from penstock.models.catalog import model_from_mapping
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import model_of
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import predict_timelines
from penstock.runtime.telemetry.steps import read_steps

STEPS, GLOBAL_BATCH = 22, 128
COUNTED = range(14, STEPS)
"""What is compared: kernels are compiled by then, and shapes that come again recorded."""


@dataclass(frozen=True)
class Run:
    """One run: a model cut to so many layers, its data, and how micro-batches are formed."""

    model: str
    layers: int
    data: str
    policy: str
    layout: str
    samples: int | None = None

    @property
    def key(self) -> str:
        """How the run is remembered."""
        samples = f"-{self.samples}" if self.samples else ""
        return f"{self.model}-{self.layers}-{self.data}-{self.policy}-{self.layout}{samples}"


RUNS = (
    Run("gpt-1.3b", 24, "texts", "fixed", "padded", 8),
    Run("gpt-1.3b", 24, "lognormal", "dynamic", "packed"),
    Run("llama-1b", 16, "texts", "dynamic", "packed"),
    Run("t5-770m", 24, "pairs", "fixed", "padded", 16),
    Run("gpt-1.3b", 8, "lognormal", "fixed", "packed", 16),
    Run("gpt-1.3b", 8, "lognormal", "dynamic", "padded"),
    Run("gpt-1.3b", 4, "texts", "fixed", "packed", 4),
    Run("llama-1b", 8, "lognormal", "fixed", "padded", 8),
    Run("llama-1b", 8, "lognormal", "dynamic", "padded"),
    Run("t5-770m", 12, "pairs", "dynamic", "padded"),
    Run("llama-1b", 4, "lognormal", "fixed", "packed", 32),
    Run("gpt-1.3b", 12, "texts", "dynamic", "packed"),
)


def measure_runs(out: Path, costs: str, cluster: str, deadline: float, runs: tuple[Run, ...] = RUNS) -> None:
    """Trains what `out` does not hold yet."""
    lines = Lines(out / "runs.jsonl")
    for run in runs:
        if run.key in lines or time.monotonic() > deadline:
            continue
        plan, data, folder = out / f"{run.key}.json", _data(out, run.data), out / f"run-{run.key}"
        write_plan(plan, plan_of(run, costs, cluster))
        try:
            words = ("--data", data, "--steps", str(STEPS), "--out", str(folder), "--compare", "--json")
            told = json.loads(penstock("train", str(plan), *words))
            told["time_s"] = mean(step.time_s or 0.0 for step in read_steps(folder / "steps.jsonl")[COUNTED.start :])
        except subprocess.CalledProcessError as error:
            print(f"{run.key} failed: {error}", flush=True)
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # its checkpoint is many gigabytes
        kept = {name: told[name] for name in ("time_s", "tokens_per_s", "stages", "ranks")}
        predicted_s = _predicted_s(plan, Path(data), costs)
        lines.add(run.key, predicted_s=predicted_s, **kept)
        print(run.key, f"predicted {predicted_s * 1e3:.0f} ms, measured {told['time_s'] * 1e3:.0f} ms", flush=True)


def plan_of(run: Run, costs: str, cluster: str) -> Plan:
    """One stage on one device, nothing recomputed."""
    sizes = {"base": run.model, "layers": run.layers}
    model = model_from_mapping(sizes, "benchmark", run.key)
    batching = MicroBatching(run.layout, run.policy, run.samples)  # type: ignore[arg-type]
    return Plan(
        sizes, cluster, GLOBAL_BATCH, (Stage(0, model.num_ops, ((0,),)),), batching, seq_length=min(model.seq_length, 2048),
        dec_length=min(model.dec_length, 512), precision=model.dtype, gradients="fp32", costs=costs,
    )  # fmt: skip


def _data(out: Path, name: str) -> str:
    """A folder of texts, or of pairs of texts for a model with a decoder."""
    if name != "pairs":
        return prepared(out, name)
    folder, texts = out / "data-pairs", out / "pairs.jsonl"
    if not folder.exists():
        source = random.Random(1)
        words = ["water", "falls", "down", "the", "long", "pipe", "and", "turns", "wheels", "of", "iron"]
        lengths = [(round(source.lognormvariate(4.8, 0.8)), round(source.lognormvariate(3.5, 0.6))) for _ in range(4000)]
        pairs = [tuple(" ".join(source.choices(words, k=max(8, min(count, 450)))) for count in pair) for pair in lengths]
        texts.write_text("".join(json.dumps({"input": one, "target": other}) + "\n" for one, other in pairs))
        penstock("prepare-data", str(texts), "--train-tokenizer", "2048", "--out", str(folder))
    return str(folder)


def run_errors(out: Path, costs: str) -> dict[str, tuple[float, float]]:
    """(predicted, measured) seconds of a step of each run, predicted anew where its plan and data are at hand."""
    lines = Lines(out / "runs.jsonl")
    found = {}
    for run in RUNS:
        if run.key in lines:
            plan, data = out / f"{run.key}.json", out / f"data-{run.data}"
            known = lines[run.key]
            predicted_s = _predicted_s(plan, data, costs) if plan.exists() and data.exists() else known["predicted_s"]
            found[run.key] = (predicted_s, known["time_s"])
    return found


def _predicted_s(path: Path, data: Path, costs: str) -> float:
    """The mean of the steps that are compared, as what was measured is: their lengths differ, and so do mean and median."""
    plan = dataclasses.replace(read_plan(path), costs=costs)
    assert model_of(plan).num_ops == plan.stages[-1].last
    found = predict_timelines(*run_inputs(TrainRequest(plan, str(data), STEPS, "nowhere")), COUNTED)
    return mean(max(replica.makespan_s for replica in step) for step in found)
