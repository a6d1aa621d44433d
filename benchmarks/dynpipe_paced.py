"""VGG16 that really trains at the pace of DynPipe's layer profile, on two paced devices, while loads come and go: static beside ours.

The model has all layers of VGG16, a thirty-second of their channels, and images of 32 × 32, so that two cores keep up; each op takes what
DynPipe's profile says of its block, times `PACE`, and messages take as long as theirs. Asynchronous 1F1B, drained for a checkpoint
after every step, so that each has a time of its own.
"""

from __future__ import annotations

import csv
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.adapting.events import RunEvent, read_events
from penstock.adapting.watching import move_run, obey_run
from penstock.costs.profile import DeviceProfile, Profile, series_key
from penstock.data.images import prepare_images
from penstock.models.shapes import Shape
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.reproduce.interference import REACH, Scene
from penstock.runtime.request import PlanningSettings, TrainRequest
from penstock.runtime.run import Watching
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.steps import StepRecord, read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.search.present_cuts import with_cuts
from penstock.timing.disturbance import Disturbance, DisturbanceChange

__all__ = ["PacedRun", "paced_runs", "paced_speedups", "write_steps"]

PACE = 0.2
"""Of the profile's times, so that nobody waits for minutes."""
THINNER, SMALLER = 32, 224 // 32
MODEL = """family: vgg
widths: [2, 4, 8, 16, 16]
classifier_width: 128
num_classes: 10
image_size: 32
dropout: 0.0
dtype: fp32
"""
BATCH, MINIBATCHES = 32, 8
PHASES = (("idle", 8), ("light", 24), ("idle 2", 28), ("light 2", 24), ("idle 3", 28), ("heavy", 24))
"""Each so many steps of `MINIBATCHES`."""
SETTLED = 8
"""The last steps of a phase: what the plan is worth that was moved to."""
_SIZES = (BATCH / 2, BATCH, 2 * BATCH)


@dataclass(frozen=True)
class PacedRun:
    """What came of one policy."""

    steps: list[StepRecord]
    events: list[RunEvent]

    @property
    def moves(self) -> list[RunEvent]:
        """Those that were carried out."""
        return [event for event in self.events if event.event == "moved"]


def paced_runs(scene: Scene, folder: Path) -> dict[str, PacedRun]:
    """Both policies under the loads of a scene of VGG16; everything is written below `folder`."""
    plan, data = _plan(scene, folder), _images(folder)
    return {name: _run(plan, data, scene, folder / name, watching) for name, watching in (("static", obey_run), ("ours", move_run))}


def _run(plan: Plan, data: str, scene: Scene, out: Path, watching: Watching) -> PacedRun:
    shutil.rmtree(out, ignore_errors=True)
    changes, first = [], 0
    for name, length in PHASES:
        if not name.startswith("idle"):
            rank, factor = (0, scene.light) if name.startswith("light") else (1, scene.heavy)
            changes.append(DisturbanceChange((rank,), factor, "pulse", first, length))
        first += length
    request = TrainRequest(
        plan, data, first, str(out), TrainingSettings(clip_norm=None), device="paced", checkpoint_every=1, planning=PlanningSettings(0),
        disturbance=Disturbance(tuple(changes)),
    )  # fmt: skip
    PlanTrainer(request, watching).train()
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return PacedRun(read_steps(out / "steps.jsonl"), list(read_events(out)) if (out / "events.jsonl").exists() else [])


def _plan(scene: Scene, folder: Path) -> Plan:
    """The scene's plan for the thin model, with costs and links that make it take `PACE` times as long."""
    (folder / "vgg16-thin.yaml").write_text(MODEL, encoding="utf-8")
    rate = scene.ladder.cluster.flow_bandwidth_bytes_per_s(0, 1) / (THINNER * SMALLER**2 * PACE)
    link = f"{{bandwidth_gb_per_s: {rate / 1e9:.9f}, latency_us: 0}}"
    (folder / "two.yaml").write_text(f"nodes: [{{device: rtx4090, gpus: 2, intra: {link}}}]\n", encoding="utf-8")
    plan = uniform_plan(
        str(folder / "vgg16-thin.yaml"), str(folder / "two.yaml"), global_batch=BATCH * MINIBATCHES, micro_batch=BATCH, pp=2,
        schedule="pipedream", precision="fp32",
    )  # fmt: skip
    model, cluster = model_of(plan), cluster_of(plan)
    table = scene.ladder.source.table(model, [Shape.images(BATCH)], [1], cluster)
    measured = DeviceProfile({"name": "DynPipe's layer profile"})
    for number, op in enumerate(model.distinct_ops):
        forward_s, backward_s = (max(1e-9, PACE * float(own[number, 0, 0, 0, 0])) for own in (table.forward_s, table.backward_s))
        for size in _SIZES:
            share = size / BATCH
            measured.add(
                series_key(op, model.dtype, 1, 0, "padded"), op.kind, size=size, length=0, forward_s=share * forward_s,
                backward_s=share * backward_s, spread=0, forward_host_s=0, backward_host_s=0, growth_bytes=0, forward_peak_bytes=0,
                backward_peak_bytes=0,
            )  # fmt: skip
    Profile({"rtx4090": measured}).write(folder / "layers.json")
    plan = replace(plan, costs=f"profile:{folder / 'layers.json'}")
    return with_cuts(plan, [0, *(stage.last for stage in scene.plan.stages)], ())


def _images(folder: Path) -> str:
    """Of classes that can be told apart, so that a loss that begins anew would be seen."""
    if not (folder / "images").exists():
        draw = np.random.default_rng(0)
        labels, kinds = draw.integers(0, 10, 4096), draw.integers(64, 192, (10, 3072))
        noisy = np.clip(kinds[labels] + draw.normal(0, 40, (4096, 3072)), 0, 255)
        np.concatenate([labels[:, None], noisy], axis=1).astype(np.uint8).tofile(folder / "data_batch_1.bin")
        prepare_images([folder / "data_batch_1.bin"], folder / "images", (1.0, 0.0, 0.0))
    return str(folder / "images")


def paced_speedups(found: dict[str, PacedRun]) -> dict[str, tuple[float, float]]:
    """For each phase: how many times as fast as static ours was in all of it, and in its last steps."""
    rows, first = {}, 0
    for name, length in PHASES:
        ends = first + length
        static, ours = ([step.time_s or 0.0 for step in found[own].steps] for own in ("static", "ours"))
        rows[name] = sum(static[first:ends]) / sum(ours[first:ends]), sum(static[ends - SETTLED : ends]) / sum(ours[ends - SETTLED : ends])
        first = ends
    return {name: rows[name] for name in REACH}


def write_steps(path: Path, found: dict[str, PacedRun]) -> None:
    """Raw times and losses of every step."""
    names = [name for name, length in PHASES for _ in range(length)]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["policy", "step", "phase", "seconds_of_a_minibatch", "loss", "plan"])
        for policy, run in found.items():
            for step, name in zip(run.steps, names, strict=True):
                table.writerow([policy, step.step, name, f"{(step.time_s or 0.0) / MINIBATCHES / PACE:.6f}", step.loss, step.plan])
