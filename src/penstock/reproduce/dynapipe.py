"""DynaPipe's figures 12 to 17 by its cost tables, on batches drawn from seeded lengths: the data set it used is not ours to ship."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.batching.costs import PipelineCosts
from penstock.batching.planned import with_recompute_choices
from penstock.batching.planner import costs_for, plan_batch
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.reproduce.dynapipe_ablations import MICRO_BATCHING, SCHEDULES
from penstock.reproduce.dynapipe_batches import (
    SYSTEMS,
    TOKENS,
    LengthBatch,
    costs_of,
    drawn_batch,
    plan_dynamic,
    plan_packed,
    seeded_lengths,
    shared_batch,
)
from penstock.reproduce.dynapipe_grid import GRID
from penstock.reproduce.dynapipe_timed import TIMED
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, Reproduction, at_least, at_most, compared, within
from penstock.reproduce.peers.checkout import Peer
from penstock.reproduce.peers.dynapipe import DynaPipePlanned, plan_with_dynapipe
from penstock.systems.dynapipe.tables import open_configuration

__all__ = ["DYNAPIPE_FIGURES"]

_KNOWN_MS = {
    ("gptA", "tok16384_max2048"): 698.3, ("gptA", "tok65536_max2048"): 2222.0, ("gptA", "tok65536_max4096"): 2930.8,
    ("gptA", "n2048_max2048"): 14745.5, ("gptA", "n8192_max2048"): 71760.6, ("t5D", "tok16384_max2048"): 1870.3,
    ("t5D", "tok65536_max2048"): 6955.9, ("t5D", "n2048_max2048"): 40361.6, ("t5C", "tok65536_max2048"): 6205.7,
}  # fmt: skip
"""What DynaPipe's own planner makes of the shared batches (configuration, file), by its own simulator."""
_PACKED_MS = {("gptA", "tok65536_max2048"): 2850.0, ("gptA", "tok65536_max4096"): 5427.0, ("t5D", "tok65536_max2048"): 10436.0}
"""What its baseline of packed rows takes, by the same simulator."""
_OWN_MS = {("gptA", "tok65536_max2048"): 2062.0, ("t5D", "tok65536_max2048"): 5455.0}
"""What we found for them, with the full search."""
_LONG = {"n2048_max2048", "n8192_max2048", "tok65536_max4096"}
_LENGTHS = (512, 1024, 2048, 4096)


def _compared(evidence: Evidence, batches: Callable[[bool], dict[float, LengthBatch]], x_title: str) -> Drawing:
    """Throughput of dynamic micro-batches and of packed rows, for both models."""
    found, claims = [], []
    for name, title in SYSTEMS.items():
        costs = costs_of(evidence, name)
        own: list[float | None] = []
        rows: list[float | None] = []
        places = batches(costs.has_decoder)
        for batch in places.values():
            own.append(batch.tokens_per_s(plan_dynamic(evidence, costs, batch)))
            rows.append(batch.tokens_per_s(plan_packed(costs, batch)))
        found += [Plotted(f"{title}: Penstock", list(places), own), Plotted(f"{title}: packed rows", list(places), rows)]
        ratio = next((o / r for o, r in zip(reversed(own), reversed(rows), strict=True) if o and r), np.nan)
        claims.append(at_least(f"{title}: speed-up over packed rows in the last case that both fit", ratio, 1.05))
    return Drawing(found, x_title, "tokens per second", claims, "lines", log_x=True, note=(
        "Times by DynaPipe's published cost tables and simulator rules; lengths drawn like FLAN's from a fixed seed, not FLAN itself. "
        "Packed rows are the baseline of the paper: as long as samples may be, in encoder and decoder, attention over the whole row."
    ))  # fmt: skip


def _by_length(evidence: Evidence) -> Drawing:
    chosen = _LENGTHS[1:3] if evidence.quick else _LENGTHS
    return _compared(evidence, lambda dec: {float(n): drawn_batch(dec, n, TOKENS) for n in chosen}, "longest sample, tokens")


def _by_batch(evidence: Evidence) -> Drawing:
    chosen = (16_384, 65_536) if evidence.quick else (16_384, 32_768, 65_536, 131_072)
    return _compared(evidence, lambda dec: {float(n): drawn_batch(dec, 2048, n) for n in chosen}, "global batch, tokens")


def _dynapipes(evidence: Evidence) -> tuple[dict[tuple[str, str], DynaPipePlanned], str]:
    """What DynaPipe's own planner makes of the shared batches."""

    def work(peer: Peer, key: tuple[str, str]) -> DynaPipePlanned:
        (planned,) = plan_with_dynapipe(peer, *open_configuration(evidence.folder / key[0]), [shared_batch(evidence, *key).samples])
        return planned

    return evidence.beside("DynaPipe", _anchored(evidence), work)


def _anchored(evidence: Evidence) -> list[tuple[str, str]]:
    """The shared batches; the short form leaves out those that DynaPipe plans longer than 10 s."""
    return [key for key in _KNOWN_MS if not (evidence.quick and key[1] in _LONG)]


def _anchors(evidence: Evidence) -> Drawing:
    """The shared batches, on which DynaPipe's own planner was run or is run now."""
    keys, (theirs, said) = _anchored(evidence), _dynapipes(evidence)
    places = {key: "\n".join((key[0], *key[1].split("_"))) for key in keys}
    found = {places[key]: one.ms for key, one in theirs.items() if one.ms}
    known = {places[key]: _KNOWN_MS[key] for key in keys}
    ours, rows, claims = [], [], []
    for key, place in places.items():
        batch, costs, said_as = shared_batch(evidence, *key), costs_of(evidence, key[0]), place.replace("\n", ", ")
        plan, packed = plan_dynamic(evidence, costs, batch), plan_packed(costs, batch)
        ours.append(plan.predicted_s * 1e3)
        rows.append(packed.predicted_s * 1e3 if packed else None)
        share = ours[-1] / found.get(place, known[place])
        claims.append(at_most(f"{said_as}: share of DynaPipe's time", share, 0.99))
        if key in _PACKED_MS:
            claims.append(within(f"{said_as}: ms of packed rows", rows[-1] or np.inf, _PACKED_MS[key], 0.001))
        if key in _OWN_MS and not evidence.quick:
            claims.append(within(f"{said_as}: ms of Penstock", ours[-1], _OWN_MS[key], 0.002))
    curves = [
        Plotted("packed rows", list(places.values()), rows), *compared("DynaPipe", list(places.values()), found, known),
        Plotted("Penstock", list(places.values()), ours),
    ]  # fmt: skip
    took = ", ".join(f"{key[0]} {key[1]} {one.cpu_s:.1f} s" for key, one in theirs.items())
    return Drawing(curves, "batch", "ms per iteration", claims, log_y=True, note=(
        "All by DynaPipe's cost tables and simulator. Packed rows are as long as samples of the data may be, in encoder and decoder, with "
        "a token between neighbours: rows as long as the longest sample of the batch are shorter, and faster. "
        + (f"DynaPipe's planner ran here: {took} of CPU time. " if took else "") + said
    ))  # fmt: skip


def _packed_costs() -> PipelineCosts:
    """Our own costs of a GPT 6.7B on as many GPUs, cut alike, whose samples lie end to end: DynaPipe's tables know padded ones alone."""
    plan = uniform_plan("gpt-6.7b", "8xa100-40gb", global_batch=512, micro_batch=1, pp=4, replicas=2, layout="packed", zero=1)
    plan = with_recompute_choices(replace(plan, micro_batching=MicroBatching("packed", "dynamic")), model_of(plan))
    costs = costs_for(plan, 2048)
    return replace(costs, layouts={"packed": costs.layouts["packed"]})


def _padding(evidence: Evidence) -> Drawing:
    (gpt, t5), found = SYSTEMS.values(), dict[str, tuple[float, float | None]]()
    for name, title in SYSTEMS.items():
        costs, batch = costs_of(evidence, name), drawn_batch(costs_of(evidence, name).has_decoder, 2048, TOKENS)
        packed = plan_packed(costs, batch)
        found[title] = (plan_dynamic(evidence, costs, batch).padding_share, packed.padding_share if packed else None)
    end_to_end = plan_batch(drawn_batch(False, 2048, TOKENS).samples, _packed_costs()).padding_share
    curves = [Plotted("Penstock, padded", list(found), [own for own, _ in found.values()]),
              Plotted("Penstock, packed", [gpt], [end_to_end]),
              Plotted("packed rows", list(found), [rows for _, rows in found.values()])]  # fmt: skip
    claims = [
        at_most(f"{gpt}: share of padding", found[gpt][0], 0.05), at_most(f"{t5}: share of padding", found[t5][0], 0.3),
        at_most(f"{gpt}, packed: share of padding", end_to_end, 0.01),
    ]  # fmt: skip
    return Drawing(curves, "", "share of positions that are padding", claims, note=(
        "64k tokens, samples of at most 2,048 tokens. Packed micro-batches of ours, whose attention stays inside samples, are planned by "
        "our own costs."
    ))  # fmt: skip


def _planning(evidence: Evidence) -> Drawing:
    sizes = (128, 512, 2048) if evidence.quick else (128, 512, 2048, 8192)
    found = []
    claims = []
    for name, title in SYSTEMS.items():
        costs = costs_of(evidence, name)
        took = []
        for count in sizes:
            samples = seeded_lengths(count, costs.has_decoder)
            runs = []
            for _ in range(3):
                cpu = time.process_time()
                plan_batch(samples, costs)
                runs.append(time.process_time() - cpu)
            took.append(min(runs))
        found.append(Plotted(title, sizes, took))
        claims.append(at_most(f"{title}: CPU seconds to plan 512 samples at once", took[1], 0.02))
    return Drawing(found, "samples", "CPU seconds", claims, "lines", log_x=True, log_y=True, note=(
        "Planning at once, without search; DynaPipe's planner takes 6 to 95 CPU seconds for GPT batches of 128 to 8,192 samples."
    ))  # fmt: skip


def _needed(*more: str) -> tuple[str, ...]:
    return ("configs.json", *more)


DYNAPIPE_FIGURES = Reproduction("dynapipe", (
    FigureSpec("12", "figure 12: throughput by the longest sample", _by_length, _needed()),
    FigureSpec("13", "figure 13: throughput by the global batch", _by_batch, _needed()),
    FigureSpec("anchors", "the same batches under DynaPipe's own planner", _anchors, _needed("inputs")),
    FigureSpec("14", "figure 14: padding", _padding, _needed()),
    MICRO_BATCHING, SCHEDULES,
    FigureSpec("16", "figure 16: time to plan a batch", _planning, _needed()),
    TIMED, GRID,
), "DynaPipe's cost models come with its Megatron-LM fork, as pickles; docs/systems/dynapipe.md says under which names they are "
   "read.")  # fmt: skip
