"""Profiling a model on this machine's device: units of work, saved one by one, so that a killed run goes on where it stopped."""

from __future__ import annotations

import copy
import datetime
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from penstock.costs.profile import (
    BesidePoint,
    DeviceProfile,
    Profile,
    SeriesKey,
    coordinates,
    read_profile,
    series_key,
)  # fmt: skip
from penstock.costs.profiled import DeviceCosts
from penstock.costs.speeds import OpClass, class_of
from penstock.errors import InputError
from penstock.models.catalog import TRACED
from penstock.models.modules import Batch, Chain, TensorParallel, build_chain
from penstock.models.ops import ITEM_BYTES, Model, PlacedOp, TensorSpec
from penstock.models.shapes import NOTHING
from penstock.processes.burners import Burners
from penstock.profiling.grid import (
    GridLimits,
    Lengths,
    attention_grid,
    mixed_lengths,
    refine,
    spread_lengths,
    sweep_lengths,
    sweep_size,
)
from penstock.profiling.local import device_facts
from penstock.profiling.measure import OpMeasure, Run, hold_gradients, measure_ops, random_model_batch
from penstock.profiling.module_parts import run_units, window_chain, windows
from penstock.profiling.optimizer_step import optimizer_points
from penstock.profiling.stamp import stamp
from penstock.profiling.units import COPIES, Unit, units_of
from penstock.profiling.whole import WholeChain
from penstock.runtime.parallel.module_chain import ModuleChain, cut_module
from penstock.timing.recorded import FewShapes

__all__ = ["Profiler", "random_model_batch"]

WARMUP_S = 0.5
"""How long a GPU works on a shape that keeps it busy before it is timed."""
AGAIN_S, RESTED_S = 0.2, 0.5
"""How long it works where it did so until `RESTED_S` before: its clocks are those of lasting load already."""
RESTLESS = 0.1
"""Spread above which a measurement is made again."""
NOISY = 0.25
"""Error of a held-out point above which a sweep is made once more: on a quiet device it is a few percent."""
BESIDE_TOKENS = 4096
"""Of a pass that is measured beside a load: enough that ops, not their launches, are slowed."""


class _OutOfTimeError(Exception):
    """The time budget is spent in the middle of a unit."""


@dataclass
class Profiler:
    """Measures units on one device into one file."""

    path: Path
    device: torch.device
    name: str
    limits: GridLimits
    profile: Profile = field(default_factory=Profile)
    repeats: int = 0
    """Passes that are timed of each shape, three times as many of short ones; 0: 4 on a GPU, 2 on a processor."""
    warm_up_s: float | None = None
    """Seconds that a shape which keeps its device busy runs before it is timed; None: half a second on a GPU that rested, less on one that
    did not, none on a processor."""
    _deadline_s: float = float("inf")
    _busy_until_s: float = -float("inf")
    """When work that kept the device busy was measured last."""

    @classmethod
    def open(cls, path: str | Path, device: str) -> Profiler:
        """Starts a profile, or goes on with the one in `path`."""
        path, where = Path(path), torch.device(device)
        profile = read_profile(path) if path.exists() else Profile()
        name, facts = device_facts(where)
        today = datetime.date.today().isoformat()
        facts |= {"torch": torch.__version__, "date": today, "modules": stamp()}
        about = profile.devices.setdefault(name, DeviceProfile(facts)).about
        if about.get("modules") != stamp():
            about["modules"] = "several"
        return cls(path, where, name, GridLimits.for_device(where.type), profile)

    @property
    def here(self) -> DeviceProfile:
        """The profile of this machine's device."""
        return self.profile.devices[self.name]

    @property
    def _loaded_s(self) -> float:
        """Seconds of work that keeps the device busy before it is timed."""
        if self.warm_up_s is not None:
            return self.warm_up_s
        if self.device.type != "cuda":
            return 0.0
        return AGAIN_S if time.monotonic() - self._busy_until_s < RESTED_S else WARMUP_S

    def units(self, models: Sequence[Model], tps: Sequence[int], loads: Sequence[float] = ()) -> list[Unit]:
        """All work for these models that is not yet done; `loads` are numbers of processes beside which ops are measured too."""
        on_gpu = self.device.type == "cuda"
        units = sorted((unit for model in models for unit in units_of(model, tps, on_gpu=on_gpu)), key=lambda unit: (unit.tp, unit.round))
        units += [Unit(model, "beside", 1, load=load) for model in models for load in loads]
        return [unit for unit in units if unit.name not in self.here.done]

    def run(self, units: Sequence[Unit], *, time_budget_s: float = float("inf"), progress: Callable[[str], None] = print) -> int:
        """Measures units until the budget is spent, saving after each; returns how many were done.

        A unit that the end of the budget cuts off is forgotten, to be measured anew; the first one of a run counts as far as it got, so
        that a budget shorter than a unit leads somewhere, if to a coarser profile.
        """
        self._deadline_s = time.monotonic() + time_budget_s
        for count, unit in enumerate(units):
            if self._late():
                return count
            progress(unit.name)
            before = copy.deepcopy(self.here)
            try:
                self._quietest(unit, before)
            except _OutOfTimeError:
                if count:
                    self.profile.devices[self.name] = before
                    return count
            self._settle()
            self.here.done.append(unit.name)
            self.profile.write(self.path)
        return len(units)

    def _late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _quietest(self, unit: Unit, before: DeviceProfile) -> None:
        """Measures a unit; once more where held-out points show that something else kept the device busy, and the better of both stays."""
        worst = self._sweep(unit, before)
        if worst <= NOISY or self._late():
            return
        first, self.profile.devices[self.name] = self.here, copy.deepcopy(before)
        try:
            better = self._sweep(unit, before) < worst
        except _OutOfTimeError:
            better = False
        if not better:
            self.profile.devices[self.name] = first

    def _sweep(self, unit: Unit, before: DeviceProfile) -> float:
        """Measures a unit; the largest error of its held-out points."""
        sweeps = {
            "sizes": self._sweep_sizes, "lengths": self._sweep_lengths, "whole": self._compare_whole, "beside": self._beside,
            "parts": self._sweep_parts,
        }  # fmt: skip
        sweeps[unit.sweep.partition(" ")[0]](unit)
        return max((abs(error) for _, error in self.here.held_out[len(before.held_out) :]), default=0.0)

    def _settle(self) -> None:
        """With the unit's tensors gone, what is still allocated belongs to libraries."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self.here.base_bytes = max(self.here.base_bytes, float(torch.cuda.memory_allocated()))

    def _sweep_sizes(self, unit: Unit) -> None:
        """The whole (shortened) chain over a range of sizes."""
        model = unit.model.shortened(COPIES)
        chain = self._chain(model, 0, model.num_ops, unit)
        images = not model.seq_length
        low, high = (self.limits.min_samples, self.limits.max_samples) if images else (self._min_tokens(unit), self.limits.max_tokens)

        def measure(size: int) -> float | None:
            batch = random_model_batch(model, sweep_lengths(model, size), self.device)
            found = self._measure(unit, chain, model.ops, batch)
            return None if found is None else sum(m.forward_s + m.backward_s for m in found)

        errors = refine(low, high, measure, depth=self.limits.depth if unit.tp == 1 else 1, snap=partial(sweep_size, model))
        self.here.held_out += [(f"{unit.name} size {size}", error) for size, error in errors]
        if unit.algo == 0:
            self.here.optimizer += optimizer_points(unit.model.dtype, chain, self.device)

    def _sweep_lengths(self, unit: Unit) -> None:
        """Each distinct attention op between its neighbours, over sizes and lengths."""
        model = unit.model.shortened(1)
        longest = 8192 if self.device.type == "cuda" else 512
        if "max_positions" in model.ops[0].op.config and model.ops[0].op.config["max_positions"]:
            longest = min(longest, model.seq_length)
        for place in {p.op.signature: p for p in model.ops if p.op.kind == "attention"}.values():
            start, stop = place.index - 1, place.index + 2
            chain = self._chain(model, start, stop, unit)
            too_large = float("inf")
            for size, length in attention_grid(replace(self.limits, min_tokens=self._min_tokens(unit)), longest, fine=unit.tp == 1):
                if size * (length if place.op.config["bias_source"] else 1) >= too_large:
                    continue
                lengths = mixed_lengths(size, length, longest) if unit.layout == "packed" else _rows_for(place, size, length)
                batch = random_model_batch(model, lengths, self.device)
                found = self._measure(unit, chain, model.ops[start:stop], batch, only=place, start=start, model=model, length=length)
                if found is None:
                    too_large = size * (length if place.op.config["bias_source"] else 1)

    def _sweep_parts(self, unit: Unit) -> None:
        """A window of units of somebody's module, over sizes and lengths."""
        model = unit.model
        if model.dec_length:
            raise InputError(f"model '{model.name}' is an encoder-decoder, whose units are not measured: use --costs roofline.")
        cut = cut_module(model, self.device, 0)
        assert cut is not None
        longest = min(8192 if self.device.type == "cuda" else 512, model.seq_length)
        number = int(unit.sweep.partition(" ")[2])
        first, last = [*windows(model, COPIES)][number]
        chain = window_chain(cut, first, last)
        for lengths in self._part_lengths(model, unit.layout, longest):
            batch = random_model_batch(model, lengths, self.device)
            if self._measure(unit, chain, chain.places, batch, start=first, model=model, run=partial(run_units, chain)) is None:
                break
        if not number and unit.layout == model.layouts[0]:
            self.here.optimizer += optimizer_points(unit.model.dtype, chain, self.device)

    def _part_lengths(self, model: Model, layout: str, longest: int) -> Iterator[Lengths]:
        if not model.seq_length:
            yield from (Lengths(2**k) for k in range(1, 12) if self.limits.min_samples <= 2**k <= self.limits.max_samples)
            return
        for size, length in attention_grid(self.limits, longest, fine=False):
            yield spread_lengths(size, length, longest) if layout == "packed" else Lengths(size // length, length)

    def _min_tokens(self, unit: Unit) -> int:
        """Shards of small micro-batches are nobody's choice: their grid begins later."""
        return self.limits.min_tokens * (1 if unit.tp == 1 else 4)

    def _chain(self, model: Model, start: int, stop: int, unit: Unit) -> Chain:
        tp = TensorParallel(0, unit.tp, lone=unit.tp > 1)
        algos = [unit.algo if len(place.op.splits) > unit.algo else 0 for place in model.ops[start:stop]]
        return build_chain(model, start, stop, tp=tp, algos=algos, device=self.device)

    def _measure(
        self, unit: Unit, chain: Chain | ModuleChain, places: Sequence[PlacedOp], batch: Batch, *, only: PlacedOp | None = None,
        start: int = 0, model: Model | None = None, length: float | None = None, run: Run | None = None,
    ) -> list[OpMeasure] | None:  # fmt: skip
        """Measures and records one shape (`only` one op of it, at a nominal `length`); None when memory does not suffice."""
        if self._late() and self.here.series:  # however short the time, something is known of a device
            raise _OutOfTimeError
        inputs = (model or unit.model).carry_before(start)
        repeats = self.repeats or (4 if self.device.type == "cuda" else 2)
        try:
            found = min(self._tries(unit, chain, places, batch, inputs, repeats, run), key=_unrest)
        except torch.OutOfMemoryError:
            self.here.out_of_memory.append(f"{unit.name} {batch.shape}")
            torch.cuda.empty_cache()
            return None
        ops = {place.op.signature: place.op for place in places}
        for m in found:
            op = ops[m.signature]
            key = series_key(op, unit.model.dtype, unit.tp, unit.algo, batch.shape.layout)
            wanted = only is None or m.signature == only.op.signature
            if wanted and not self._known_elsewhere(key, unit):
                size, mean = coordinates(op, batch.shape)
                values = {name: value for name, value in asdict(m).items() if name != "signature"}
                self.here.add(key, op.kind, size=size, length=mean if length is None else length, **values)
        return found

    def _tries(
        self, unit: Unit, chain: Chain | ModuleChain, places: Sequence[PlacedOp], batch: Batch, inputs: Sequence[TensorSpec], repeats: int,
        run: Run | None = None,
    ) -> Iterator[list[OpMeasure]]:
        """Measures once, and once more where the first measurement was disturbed."""
        for _ in range(2):
            found = measure_ops(
                list(chain.ops), places, batch, inputs, tp=unit.tp, warmups=max(1, repeats // 2), repeats=repeats,
                warmup_s=self._loaded_s, run=run, at_once=self._is_recorded(unit, batch),
            )  # fmt: skip
            if sum(m.forward_s + m.backward_s for m in found) > sum(m.forward_host_s + m.backward_host_s for m in found):
                self._busy_until_s = time.monotonic()
            yield found
            if _unrest(found) < RESTLESS or self._late():
                return

    def _is_recorded(self, unit: Unit, batch: Batch) -> bool:
        """Whether training plays such passes from recordings, on ranks whose plans allow it."""
        if self.device.type != "cuda" or unit.model.family == TRACED or unit.tp > 1:
            return False
        flops = sum((place.op.flops for place in unit.model.ops), NOTHING)
        return not FewShapes(flops, unit.model.num_ops).keeps_busy(batch.shape)

    def _known_elsewhere(self, key: SeriesKey, unit: Unit) -> bool:
        """Ops that tp or algo do not change are measured once, in the plain sweep."""
        return unit.tp > 1 and (key.tp == 1 or (unit.algo == 1 and key.algo == 0))

    def _beside(self, unit: Unit) -> None:
        """Each class of ops in a pass of usual size, alone and beside processes that keep the device busy."""
        model = unit.model.shortened(COPIES)
        chain = self._chain(model, 0, model.num_ops, unit)
        size = self.limits.max_samples if not model.seq_length else min(self.limits.max_tokens, BESIDE_TOKENS)
        batch = random_model_batch(model, sweep_lengths(model, size), self.device)
        alone_s = self._classes_s(unit, chain, model, batch)
        count = math.ceil(unit.load)
        victim = os.getpid() if self.device.type == "cpu" else 0
        with Burners(count, "cpu" if victim else "cuda", victim, unit.load / count) as burners:
            burners.await_ready()
            beside_s = self._classes_s(unit, chain, model, batch)
        self.here.beside += [
            BesidePoint(unit.model.name, op_class, unit.load, time_s, beside_s[op_class]) for op_class, time_s in alone_s.items() if time_s
        ]

    def _classes_s(self, unit: Unit, chain: Chain, model: Model, batch: Batch) -> dict[str, float]:
        """Seconds of all ops of each class, forward and backward."""
        found = min(self._tries(unit, chain, model.ops, batch, model.carry_before(0), 6), key=_unrest)
        times_s = {m.signature: m.forward_s + m.backward_s for m in found}
        sums = dict.fromkeys((str(op_class) for op_class in OpClass), 0.0)
        for place in model.ops:
            sums[str(class_of(place.op))] += times_s[place.op.signature]
        return sums

    def _compare_whole(self, unit: Unit) -> None:
        """Compares the chain as a whole with the sum of its parts."""
        model = unit.model if self._fits(unit.model) else unit.model.shortened(COPIES)
        chain = self._chain(model, 0, model.num_ops, unit)
        hold_gradients(chain.parameters())
        whole = WholeChain(model, chain, DeviceCosts(replace(self.here, whole={})), self.device, self._loaded_s)
        smallest = self.limits.min_tokens if model.seq_length else self.limits.min_samples
        factors = whole.factors(sweep_lengths(model, smallest), unit.round)
        known = sum(replace(unit, sweep=f"whole {number}").name in self.here.done for number in range(1, unit.round))
        if known:
            factors = self.here.whole[model.ops[0].op.signature].joined(factors, known)
        self.here.whole.update({op.signature: factors for op in model.distinct_ops})

    def _fits(self, model: Model) -> bool:
        """Whether the whole model leaves room for its activations."""
        return model.num_parameters * 2 * ITEM_BYTES[model.dtype] < 0.1 * self.here.about["memory_bytes"]


def _unrest(found: Sequence[OpMeasure]) -> float:
    """The spread of the repeats of a measurement, weighted by time."""
    total = sum(m.forward_s + m.backward_s for m in found)
    return sum(m.spread * (m.forward_s + m.backward_s) for m in found) / max(total, 1e-12)


def _rows_for(place: PlacedOp, size: int, length: int) -> Lengths:
    """A padded batch in which this attention op sees `size` queries with `length` keys each."""
    if place.op.config["cross_source"]:
        queries = min(128, size)
        return Lengths(size // queries, length, queries)
    if place.op.config["side"] == "decoder":
        return Lengths(size // length, 8, length)
    return Lengths(size // length, length, 8 if place.op.config["bias_source"] else 0)
