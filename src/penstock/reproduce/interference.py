"""Policies under loads that come and go beside a pipeline, as in DynPipe's experiments: never re-planned, re-planned by its trigger, by us.

A light load slows the first device, a heavy one the last; `benchmarks/dynpipe.py` says how they are calibrated from DynPipe's logs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.adapting.adapter import Adapter
from penstock.adapting.detecting import Cause, StepFigures
from penstock.adapting.ladder import PAUSE_STEPS, Ladder, Remedy
from penstock.clusters import Cluster
from penstock.costs.sources import open_costs
from penstock.costs.speeds import Speeds
from penstock.costs.table import CostTable
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.search.present_cuts import with_cuts, with_present_cuts
from penstock.systems.dynpipe.blocks import pieces

__all__ = ["MODELS", "POLICIES", "PROFILE", "REACH", "BlockCosts", "Floats", "Scene", "cuts_of", "speedups", "told", "vgg16"]

Floats = NDArray[np.float64]
PROFILE = "vgg16_layer_profile.csv"
IDLE_S = 0.133
LIGHT_S, HEAVY_S = 0.240, 0.344
LIGHT, HEAVY = 1.9, 3.1
PHASES = (("idle", 1000), ("light", 3000), ("idle 2", 3000), ("light 2", 3000), ("idle 3", 1500), ("heavy", 3000), ("idle 4", 1500))
EPOCH = 1560
WINDOW, BASELINE, DRAIN = 50, 100, 70
TRIGGER = 1.5
RESTART_S, EPOCH_RESTART_S = 7.5, 17.0
MINIBATCHES = 64
"""Of which the clock runs so many to say what one takes."""
NOISE = 0.05
UNTIED = "untied.yaml"
"""BERT-large whose logits have a weight of their own: asynchronous stages cannot share one."""
REACH = {"light": 1.12, "light 2": 1.12, "heavy": 1.65}


class BlockCosts:
    """Our costs with the times of DynPipe's blocks in place of ours."""

    def __init__(self, cluster: Cluster, rows: Sequence[tuple[float, float]], scale: float) -> None:
        self._ours = open_costs("roofline", cluster)
        self._rows, self._scale = rows, scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """Ops that several blocks describe get their mean."""
        table = self._ours.table(model, shapes, tps, cluster)
        sums = np.zeros((len(table.op_names), 2))
        counts = np.zeros(len(table.op_names))
        block = 0
        for piece in pieces(model):
            sums[table.chain[piece.last - 1]] += np.sum(self._rows[block : block + piece.num_blocks], axis=0)
            counts[table.chain[piece.first : piece.last]] += 1
            block += piece.num_blocks
        times = self._scale * sums / np.maximum(counts, 1)[:, None]
        like = np.ones_like(table.forward_s)
        return replace(
            table, forward_s=like * times[:, 0, None, None, None, None], backward_s=like * times[:, 1, None, None, None, None],
            host_s=np.zeros((0, 0, 3, 0, 0)),
        )  # fmt: skip

    def optimizer_s(self, *_: Any, **__: Any) -> float:
        """Zero: the profile has the update in its backward passes, if anywhere."""
        return 0.0


class _ByMinibatch(Ladder):
    """Says of one minibatch what a ladder says of an iteration; asked the same again and again."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._known: dict[Any, Any] = {}

    def time_s(self, plan: Plan, speeds: Speeds) -> float:
        key = cuts_of(plan), repr(speeds)
        if key not in self._known:
            self._known[key] = super().time_s(plan, speeds) / MINIBATCHES
        return float(self._known[key])

    def options(self, plan: Plan, speeds: Speeds, known: Iterable[Plan] = ()) -> tuple[Remedy, ...]:
        key = cuts_of(plan), repr(speeds), tuple(map(cuts_of, known))
        if key not in self._known:
            self._known[key] = tuple(map(self._of_minibatch, super().options(plan, speeds, known)))
        return tuple(self._known[key])

    def _of_minibatch(self, one: Remedy) -> Remedy:
        """A move does not wait for an iteration, but until the pipeline has run empty and is full again."""
        waits = PAUSE_STEPS * (1 - 2 * len(one.plan.stages) / MINIBATCHES) * one.time_s
        return replace(one, time_s=one.time_s / MINIBATCHES, pause_s=max(0.0, one.pause_s - waits) if one.pause_s else 0.0)

    def best(self, plan: Plan, speeds: Speeds) -> Plan:
        """The best cuts of a plan."""
        estimator = self.estimator(speeds)
        return min((plan, *with_present_cuts(plan, estimator.estimate(plan), estimator)), key=lambda one: self.time_s(one, speeds))


@dataclass(frozen=True)
class Scene:
    """A pipeline, and the loads beside it."""

    name: str
    plan: Plan
    ladder: _ByMinibatch
    light: float = LIGHT
    heavy: float = HEAVY
    phases: tuple[tuple[str, int], ...] = PHASES

    @property
    def num_ranks(self) -> int:
        """Devices."""
        return len(self.plan.ranks)

    def factors(self) -> Floats:
        """[minibatches, ranks]"""
        found = np.ones((sum(length for _, length in self.phases), self.num_ranks))
        start = 0
        for name, length in self.phases:
            if name.startswith("light"):
                found[start : start + length, 0] = self.light
            elif name.startswith("heavy"):
                found[start : start + length, -1] = self.heavy
            start += length
        return found

    def take_s(self, plan: Plan, factors: Floats) -> float:
        """One minibatch of a plan."""
        return self.ladder.time_s(plan, _speeds(factors))

    def stages_s(self, plan: Plan, factors: Floats) -> Floats:
        """What each stage computes in one, as DynPipe measures it."""
        found = self.ladder.estimator(Speeds()).estimate(plan).stages
        return np.array([stage.work.forward_pass_s + stage.work.backward_pass_s for stage in found]) * factors


def _speeds(factors: Floats) -> Speeds:
    return Speeds.of(dict(enumerate(factors.tolist())))


def cuts_of(plan: Plan) -> tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]:
    return tuple((stage.first, stage.last, stage.devices) for stage in plan.stages)


Policy = Callable[[Scene, Floats, int], tuple[Floats, list[Plan]]]
"""Seconds of each minibatch, pauses included, and the plan that each ran under."""


def _static(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    return np.array([scene.take_s(scene.plan, row) for row in factors]), [scene.plan] * len(factors)


def _best_cuts(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    plans = {row: scene.ladder.best(scene.plan, _speeds(np.array(row))) for row in set(map(tuple, factors.tolist()))}
    found = [plans[tuple(row.tolist())] for row in factors]
    return np.array([scene.take_s(plan, row) for plan, row in zip(found, factors, strict=True)]), found


def _clairvoyant(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    """Knows every load when it comes, how slow it is and how long it lasts, and pays for moves."""
    plan, times, plans = scene.plan, [], []
    changes = np.flatnonzero((factors[1:] != factors[:-1]).any(axis=1)) + 1
    for own in np.split(factors, changes):
        options = scene.ladder.options(plan, _speeds(own[0]))
        chosen = min(options, key=partial(_lasting_s, len(own)))
        plan = chosen.plan
        times += [scene.take_s(plan, own[0])] * len(own)
        times[-len(own)] += chosen.pause_s
        plans += [plan] * len(own)
    return np.array(times), plans


def _lasting_s(count: int, one: Remedy) -> float:
    """What moving and so many minibatches take."""
    return one.time_s * count + one.pause_s


def _epoch_restart(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    plan, times, plans = scene.plan, [], []
    for number, row in enumerate(factors):
        pause_s = 0.0
        if number % EPOCH == 0 and number:
            better = scene.ladder.best(plan, _speeds(row))
            pause_s = EPOCH_RESTART_S if cuts_of(better) != cuts_of(plan) else 0.0
            plan = better
        times.append(scene.take_s(plan, row) + pause_s)
        plans.append(plan)
    return np.array(times), plans


def _triggered(scene: Scene, factors: Floats, seed: int, *, predicts: bool) -> tuple[Floats, list[Plan]]:
    """DynPipe's rule: sums of windows, a baseline of each epoch or plan, one ratio."""
    noise = np.exp(np.random.default_rng(seed).normal(0, NOISE, factors.shape))
    plan, times, plans = scene.plan, [], []
    since, sums, restart = 0, np.zeros(scene.num_ranks), -1
    baseline: Floats | None = None
    for number, row in enumerate(factors):
        pause_s = 0.0
        if number == restart or since == EPOCH:
            if number == restart:
                plan, pause_s = scene.ladder.best(plan, _speeds(row) if predicts else Speeds()), RESTART_S
            since, sums, restart, baseline = 0, np.zeros(scene.num_ranks), -1, None
        times.append(scene.take_s(plan, row) + pause_s)
        plans.append(plan)
        since += 1
        sums = sums + scene.stages_s(plan, row * noise[number])
        if since % WINDOW == 0:
            if since == BASELINE:
                baseline = sums
            elif baseline is not None and restart < 0 and max((sums / baseline).max(), (baseline / sums).max()) >= TRIGGER:
                restart = number + 1 + DRAIN
            sums = np.zeros(scene.num_ranks)
    return np.array(times), plans


def _simple(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    return _triggered(scene, factors, seed, predicts=False)


def _dynpipe(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    return _triggered(scene, factors, seed, predicts=True)


def _ours(scene: Scene, factors: Floats, seed: int) -> tuple[Floats, list[Plan]]:
    subjects = [(rank,) for rank in range(scene.num_ranks)]
    adapter = Adapter(scene.ladder, scene.plan, {Cause.COMPUTE: subjects})
    measured = factors * np.exp(np.random.default_rng(seed).normal(0, NOISE, factors.shape))
    times, plans = [], []
    for number, row in enumerate(factors):
        plans.append(adapter.decider.plan)
        times.append(scene.take_s(adapter.decider.plan, row))
        decision = adapter.add(number, {Cause.COMPUTE: StepFigures(measured[number], np.ones(scene.num_ranks))}).decision
        if decision.moves:
            times[-1] += decision.chosen.pause_s
            adapter.adopted(decision)
    return np.array(times), plans


POLICIES: dict[str, Policy] = {
    "static": _static, "simple": _simple, "epoch-restart": _epoch_restart, "dynpipe": _dynpipe, "ours": _ours,
    "clairvoyant": _clairvoyant, "best cuts": _best_cuts,
}  # fmt: skip


def _scene(name: str, plan: Plan, ladder: _ByMinibatch) -> Scene:
    return Scene(name, ladder.best(plan, Speeds()), ladder)


def _cluster(folder: Path, count: int, gb_per_s: float) -> str:
    path = folder / f"{count}-{gb_per_s:.3f}.yaml"
    link = f"{{bandwidth_gb_per_s: {gb_per_s}, latency_us: 0}}"
    path.write_text(f"nodes: [{{device: rtx4090, gpus: {count}, intra: {link}}}]\n", encoding="utf-8")
    return str(path)


def vgg16(folder: Path, data: Path) -> Scene:
    """Two devices, asynchronous 1F1B, batch 32, [10, 28]: Fig. 12 and 13."""
    with (data / PROFILE).open(encoding="utf-8") as file:
        rows = [(float(row["fwd_ms"]) / 1e3, float(row["bwd_ms"]) / 1e3) for row in csv.DictReader(file)]
    ladder, plan = _of_profile(folder, rows, 1.0)
    ladder, plan = _of_profile(folder, rows, IDLE_S / ladder.time_s(plan, Speeds()))
    light, heavy = (_factor(ladder, plan, rank, wanted_s) for rank, wanted_s in enumerate((LIGHT_S, HEAVY_S)))
    return Scene("vgg16", plan, ladder, light, heavy)


def _of_profile(folder: Path, rows: Sequence[tuple[float, float]], scale: float) -> tuple[_ByMinibatch, Plan]:
    """With all times of the profile multiplied by `scale`."""
    reference = _cluster(folder, 2, 1000 * 2**20 / scale / 1e9)
    plan = uniform_plan("vgg16", reference, global_batch=32 * MINIBATCHES, micro_batch=32, pp=2, schedule="pipedream", precision="fp32")
    cluster = cluster_of(plan)
    plan = with_cuts(plan, [0, 10, model_of(plan).num_ops], ())
    return _ByMinibatch(model_of(plan), cluster, BlockCosts(cluster, rows, scale)), plan


def _factor(ladder: _ByMinibatch, plan: Plan, rank: int, wanted_s: float) -> float:
    """How slow a rank is where a minibatch takes so long."""
    low, high = 1.0, 8.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if ladder.time_s(plan, Speeds.of({rank: middle})) < wanted_s else (low, middle)
    return low


def _modelled(name: str, model: str, count: int, batch: int, schedule: str) -> Callable[[Path, Path], Scene]:
    def made(folder: Path, data: Path) -> Scene:
        """With our costs of an RTX 4090, over 10 GB/s."""
        reference = _cluster(folder, count, 10.0)
        (folder / UNTIED).write_text("base: bert-large\ntied: false\n", encoding="utf-8")
        plan = uniform_plan(
            str(folder / model) if model == UNTIED else model, reference, global_batch=batch * MINIBATCHES, micro_batch=batch, pp=count,
            schedule=schedule, precision="fp32",
        )  # fmt: skip
        cluster = cluster_of(plan)
        return _scene(name, plan, _ByMinibatch(model_of(plan), cluster, open_costs("roofline", cluster)))

    return made


MODELS: dict[str, Callable[[Path, Path], Scene]] = {
    "vgg16": vgg16,
    "resnet50": _modelled("resnet50", "resnet-50", 2, 48, "pipedream"),
    "bert": _modelled("bert", "bert-large", 4, 16, "1f1b"),
    "bert-async": _modelled("bert-async", UNTIED, 4, 16, "pipedream"),
}


def told(scene: Scene, seed: int = 0) -> dict[str, tuple[Floats, list[Plan]]]:
    """All policies in one scene."""
    factors = scene.factors()
    return {name: policy(scene, factors, seed) for name, policy in POLICIES.items()}


def speedups(scene: Scene, found: dict[str, tuple[Floats, list[Plan]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """For each policy and phase: mean seconds of a minibatch, and how many times as fast as static."""
    ends = np.cumsum([length for _, length in scene.phases])
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for name, (times, _) in found.items():
        means = [float(own.mean()) for own in np.split(times, ends[:-1])]
        static = [float(own.mean()) for own in np.split(found["static"][0], ends[:-1])]
        rows[name] = {phase: (mean, base / mean) for (phase, _), mean, base in zip(scene.phases, means, static, strict=True)}
    return rows
