"""DynPipe's figures 9 to 13, redrawn from its raw logs, and policies under loads compared on its own profile."""

from __future__ import annotations

import csv
import io
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from penstock.files import read_text
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, Reproduction, at_least

__all__ = ["DYNPIPE_FIGURES"]

_Rows = list[dict[str, str]]
_LOGS = "Redrawn from the published logs, unedited; nothing is of this run."
_WORKLOADS = {"resnet50_cifar10": 70.0, "vgg16_cifar10": 80.0, "resnet50_image64": 55.0, "vgg16_image64": 60.0}
"""Accuracy, in percent, at which the systems are compared."""
_OURS = "our costs of an RTX 4090"


def _rows(evidence: Evidence, name: str) -> _Rows:
    return list(csv.DictReader(io.StringIO(read_text(evidence.folder / name, "log"))))


def _series(rows: _Rows, key: str, x: str, y: str) -> list[Plotted]:
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for row in rows:
        found[row[key]][0].append(float(row[x]))
        found[row[key]][1].append(float(row[y]))
    return [Plotted(label, xs, ys, published=True) for label, (xs, ys) in found.items()]


def _hours_to(curve: Plotted, target: float) -> float:
    """When a curve first reaches a height."""
    return next((float(x) for x, y in zip(curve.x, curve.y, strict=True) if y is not None and y >= target), float("nan"))


def _accuracy(evidence: Evidence) -> Drawing:
    places, hours = list(_WORKLOADS), defaultdict[str, list[float | None]](list)
    for name, target in _WORKLOADS.items():
        for curve in _series(_rows(evidence, f"fig9_{name}.csv"), "system", "hours", "top1_pct"):
            hours[curve.label].append(_hours_to(curve, target))
    gains = [slow / fast for slow, fast in zip(hours["PipeDream"], hours["DynPipe"], strict=True) if slow and fast]
    claims = [at_least("least speed-up over PipeDream, as published", min(gains), 1.3)]
    curves = [Plotted(label, places, values, published=True) for label, values in hours.items()]
    return Drawing(curves, "", "hours to the accuracy", claims, note=_LOGS + " Some points were interpolated by their authors.")


def _bars(name: str, group: Sequence[str], value: str, title: str) -> FigureSpec:
    number, file, y_title = name, {"10": "fig10_throughput.csv", "11": "fig11_gpu_util.csv", "13": "fig13a_iteration_time.csv"}[name], title

    def make(evidence: Evidence) -> Drawing:
        found: dict[str, tuple[list[str], list[float]]] = defaultdict(lambda: ([], []))
        for row in _rows(evidence, file):
            found[row["system"]][0].append(" ".join(row[key] for key in group))
            found[row["system"]][1].append(float(row[value]))
        curves = [Plotted(label, xs, ys, published=True) for label, (xs, ys) in found.items()]
        return Drawing(curves, "", y_title, note=_LOGS)

    titles = {"10": "throughput", "11": "utilisation of GPUs", "13": "iterations beside a load"}
    return FigureSpec(number, f"figure {number}: {titles[number]}", make, (file,))


def _loads(evidence: Evidence) -> Drawing:
    rows = _rows(evidence, "fig12_iteration_time_raw.csv")
    epochs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        epochs[row["system"]][int(row["epoch"])].append(float(row["iteration_s"]))
    curves = [Plotted(system, sorted(own), [median(own[epoch]) for epoch in sorted(own)], published=True) for system, own in epochs.items()]
    return Drawing(curves, "epoch", "median seconds of a minibatch", kind="lines", note=(
        _LOGS + " The figure of the paper splices segments and adds noise; these are the logs. Their losses restart after each change."
    ))  # fmt: skip


def _policies(model: str, costs: str, evidence: Evidence) -> Drawing:
    """Every policy under the same loads, on simulated devices."""
    from penstock.reproduce.interference import MODELS, PHASES, speedups, told

    with tempfile.TemporaryDirectory() as folder:
        scene = MODELS[model](Path(folder), evidence.folder)
    if evidence.quick:
        scene = replace(scene, phases=(("idle", 300), ("light", 900), ("idle 2", 300), ("heavy", 900)))
    rows = speedups(scene, told(scene))
    phases = [name for name, _ in scene.phases if not name.startswith("idle")]
    curves = [Plotted(policy, phases, [own[phase][1] for phase in phases]) for policy, own in rows.items()]
    share, free = (min(rows["ours"][phase][1] / rows[oracle][phase][1] for phase in phases) for oracle in ("clairvoyant", "best cuts"))
    least = 0.97 if scene.phases == PHASES else 0.9  # short phases pay more for the time to notice
    claims = [at_least("full adaptation, as a share of a policy that knows every load beforehand", share, least)]
    return Drawing(curves, "load", "times as fast as never re-planned", claims, note=(
        f"{scene.num_ranks} simulated devices with {costs}; DynPipe's forest is taken to be always right. Who is clairvoyant pays to move "
        f"as we do; of the best cuts of every load on the same order of devices, if moving were free, full adaptation reaches {free:.3f}."
    ))  # fmt: skip


DYNPIPE_FIGURES = Reproduction("dynpipe", (
    FigureSpec("9", "figure 9: time to accuracy", _accuracy, tuple(f"fig9_{name}.csv" for name in _WORKLOADS)),
    _bars("10", ("model", "dataset"), "value", "samples per second"), _bars("11", ("model", "gpus"), "gpu_util_pct", "percent"),
    FigureSpec("12", "figure 12: minibatches beside loads that come and go", _loads, ("fig12_iteration_time_raw.csv",)),
    _bars("13", ("interference",), "iteration_s", "seconds of a minibatch"),
    FigureSpec("policies", "policies under the same loads, VGG-16", partial(_policies, "vgg16", "the times of DynPipe's profile"),
               ("vgg16_layer_profile.csv",)),
    FigureSpec("policies-resnet50", "policies under the same loads, ResNet-50", partial(_policies, "resnet50", _OURS)),
    FigureSpec("policies-bert", "policies under the same loads, BERT-large", partial(_policies, "bert-async", _OURS)),
), "DynPipe's public repository has its logs (no licence: they cannot be shipped); docs/systems/dynpipe.md says which CSV files to write "
   "from them.")  # fmt: skip
