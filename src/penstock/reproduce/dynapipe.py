"""DynaPipe's figures 12 to 16 by its cost tables, on batches drawn from seeded lengths: the data set it used is not ours to ship."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.batching.baselines import packed_rows, run_baseline, token_budget
from penstock.batching.costs import PipelineCosts
from penstock.batching.fitting import positions
from penstock.batching.lengths import read_lengths
from penstock.batching.ordering import by_length, curves, tour
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planned import with_recompute_choices
from penstock.batching.planner import costs_for, plan_batch
from penstock.batching.search import usual_steps
from penstock.batching.split import Windows
from penstock.errors import InfeasibleError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, Reproduction, at_least, at_most, compared, within
from penstock.reproduce.peers.checkout import Peer
from penstock.reproduce.peers.dynapipe import DynaPipePlanned, plan_with_dynapipe
from penstock.systems.dynapipe.rules import dynapipe_costs
from penstock.systems.dynapipe.tables import open_configuration

__all__ = ["DYNAPIPE_FIGURES", "seeded_lengths"]

_SYSTEMS = {"gptA": "GPT 6.7B, 8 GPUs", "t5D": "T5 11B, 8 GPUs"}
_FILES = {"gptA": "gpt", "t5D": "t5", "t5C": "t5"}
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
_LENGTHS, _TOKENS = (512, 1024, 2048, 4096), 65_536


@dataclass(frozen=True)
class _Batch:
    """A global batch, and how long samples of its data may be."""

    samples: list[SampleLengths]
    longest: int

    def tokens_per_s(self, plan: BatchPlan | None) -> float | None:
        """Throughput of a plan for it."""
        return None if plan is None else sum(sample.length + sample.dec_length for sample in self.samples) / plan.predicted_s


def seeded_lengths(count: int, has_decoder: bool, seed: int = 0, longest: int = 2048) -> list[SampleLengths]:
    """Lengths like those of a mixture of instruction tasks: log-normal, decoders short and weakly correlated."""
    numbers = np.random.default_rng(seed)
    first, second = numbers.standard_normal((2, count))
    if not has_decoder:
        return [SampleLengths(i, int(n)) for i, n in enumerate(np.clip(np.exp(np.log(120) + 1.14 * first), 8, longest))]
    enc = np.clip(np.exp(np.log(105) + 1.14 * first), 8, longest)
    dec = np.clip(np.exp(np.log(16) + 1.25 * (0.3 * first + 0.954 * second)), 1, longest)
    return [SampleLengths(i, int(n), int(m)) for i, (n, m) in enumerate(zip(enc, dec, strict=True))]


def _costs(evidence: Evidence, name: str) -> PipelineCosts:
    return evidence.once(f"costs {name}", lambda: dynapipe_costs(*open_configuration(evidence.folder / name)))


def _prefix(samples: Sequence[SampleLengths], tokens: int) -> list[SampleLengths]:
    """The first samples of so many tokens in all."""
    total = np.cumsum([sample.length + sample.dec_length for sample in samples])
    return list(samples[: max(1, int(np.searchsorted(total, tokens, side="right")))])


def _drawn(has_decoder: bool, longest: int, tokens: int) -> _Batch:
    return _Batch(_prefix(seeded_lengths(tokens // 40, has_decoder, longest=longest), tokens), longest)


def _planned(evidence: Evidence, costs: PipelineCosts, batch: _Batch) -> BatchPlan:
    steps = usual_steps(costs, len(batch.samples)) // (10 if evidence.quick else 1)
    return plan_batch(batch.samples, costs, steps=steps)


def _packed(costs: PipelineCosts, batch: _Batch) -> BatchPlan | None:
    """DynaPipe's baseline: rows as long as samples may be, in encoder and decoder, a token between neighbours, attention over whole rows;
    the best number of rows and mode of recomputation."""
    found = []
    for rows in (1, 2, 4, 8):
        try:
            found.append(run_baseline(packed_rows(batch.samples, costs, rows, batch.longest, "across", separator=1), costs, "packed"))
        except InfeasibleError:
            break
    return min(found, key=lambda plan: plan.predicted_s, default=None)


def _compared(evidence: Evidence, batches: Callable[[bool], dict[float, _Batch]], x_title: str) -> Drawing:
    """Throughput of dynamic micro-batches and of packed rows, for both models."""
    found, claims = [], []
    for name, title in _SYSTEMS.items():
        costs = _costs(evidence, name)
        own: list[float | None] = []
        rows: list[float | None] = []
        places = batches(costs.has_decoder)
        for batch in places.values():
            own.append(batch.tokens_per_s(_planned(evidence, costs, batch)))
            rows.append(batch.tokens_per_s(_packed(costs, batch)))
        found += [Plotted(f"{title}: Penstock", list(places), own), Plotted(f"{title}: packed rows", list(places), rows)]
        ratio = next((o / r for o, r in zip(reversed(own), reversed(rows), strict=True) if o and r), np.nan)
        claims.append(at_least(f"{title}: speed-up over packed rows in the last case that both fit", ratio, 1.05))
    return Drawing(found, x_title, "tokens per second", claims, "lines", log_x=True, note=(
        "Times by DynaPipe's published cost tables and simulator rules; lengths drawn like FLAN's from a fixed seed, not FLAN itself. "
        "Packed rows are the baseline of the paper: as long as samples may be, in encoder and decoder, attention over the whole row."
    ))  # fmt: skip


def _by_length(evidence: Evidence) -> Drawing:
    chosen = _LENGTHS[1:3] if evidence.quick else _LENGTHS
    return _compared(evidence, lambda dec: {float(n): _drawn(dec, n, _TOKENS) for n in chosen}, "longest sample, tokens")


def _by_batch(evidence: Evidence) -> Drawing:
    chosen = (16_384, 65_536) if evidence.quick else (16_384, 32_768, 65_536, 131_072)
    return _compared(evidence, lambda dec: {float(n): _drawn(dec, 2048, n) for n in chosen}, "global batch, tokens")


def _dynapipes(evidence: Evidence) -> tuple[dict[tuple[str, str], DynaPipePlanned], str]:
    """What DynaPipe's own planner makes of the shared batches."""

    def work(peer: Peer, key: tuple[str, str]) -> DynaPipePlanned:
        (planned,) = plan_with_dynapipe(peer, *open_configuration(evidence.folder / key[0]), [_shared(evidence, *key).samples])
        return planned

    return evidence.beside("DynaPipe", _anchored(evidence), work)


def _anchored(evidence: Evidence) -> list[tuple[str, str]]:
    """The shared batches; the short form leaves out those that DynaPipe plans longer than 10 s."""
    return [key for key in _KNOWN_MS if not (evidence.quick and key[1] in _LONG)]


def _shared(evidence: Evidence, name: str, size: str) -> _Batch:
    return _Batch(read_lengths(evidence.folder / "inputs" / f"{_FILES[name]}_{size}.csv"), int(size.partition("_max")[2]))


def _anchors(evidence: Evidence) -> Drawing:
    """The shared batches, on which DynaPipe's own planner was run or is run now."""
    keys, (theirs, said) = _anchored(evidence), _dynapipes(evidence)
    places = {key: f"{key[0]}\n{key[1]}" for key in keys}
    found = {places[key]: one.ms for key, one in theirs.items() if one.ms}
    known = {places[key]: _KNOWN_MS[key] for key in keys}
    ours, rows, claims = [], [], []
    for key, place in places.items():
        batch, costs, said_as = _shared(evidence, *key), _costs(evidence, key[0]), place.replace("\n", ", ")
        plan, packed = _planned(evidence, costs, batch), _packed(costs, batch)
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
    (gpt, t5), found = _SYSTEMS.values(), dict[str, tuple[float, float | None]]()
    for name, title in _SYSTEMS.items():
        costs, batch = _costs(evidence, name), _drawn(_costs(evidence, name).has_decoder, 2048, _TOKENS)
        packed = _packed(costs, batch)
        found[title] = (_planned(evidence, costs, batch).padding_share, packed.padding_share if packed else None)
    end_to_end = plan_batch(_drawn(False, 2048, _TOKENS).samples, _packed_costs()).padding_share
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


def _splitting(evidence: Evidence) -> Drawing:
    """Micro-batching alone: token budgets and dynamic splitting, after sorting and after a tour; 1F1B by the same tables."""
    costs = _costs(evidence, "t5D")
    batch = _drawn(True, 2048, _TOKENS // (4 if evidence.quick else 1))
    enc, dec = positions(batch.samples, costs)

    def split(orders: Sequence[NDArray[np.int64]]) -> float:
        return 1e3 * min(Windows(costs, enc, dec, order, 64).split(np.inf)[0] for order in orders)

    def budget(max_tokens: int) -> float:
        try:
            return run_baseline(token_budget(batch.samples, costs, max_tokens), costs, "budget").predicted_s * 1e3
        except InfeasibleError:
            return np.inf

    packed = _packed(costs, batch)
    split_ms, found_ms = split([tour(enc, dec)]), _planned(evidence, costs, batch).predicted_s * 1e3
    ways = {
        "packed rows": packed.predicted_s * 1e3 if packed else None,
        "token budget, sorted": min(map(budget, (1024, 2048, 4096, 8192))),
        "dynamic, sorted": split([by_length(enc, dec)]), "dynamic, tour": split_ms,
        "dynamic, Hilbert": split(curves(enc, dec)),
        "Hilbert and search": found_ms,
    }  # fmt: skip
    share = found_ms / split_ms
    claims = [at_most("Hilbert and search, as a share of dynamic splitting after a tour", share, 1.0)]
    return Drawing([Plotted("T5 11B", list(ways), list(ways.values()))], "", "ms per iteration", claims)


def _planning(evidence: Evidence) -> Drawing:
    sizes = (128, 512, 2048) if evidence.quick else (128, 512, 2048, 8192)
    found = []
    claims = []
    for name, title in _SYSTEMS.items():
        costs = _costs(evidence, name)
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
    FigureSpec("15", "figure 15: micro-batching, way by way", _splitting, _needed()),
    FigureSpec("16", "figure 16: time to plan a batch", _planning, _needed()),
), "DynaPipe's cost models come with its Megatron-LM fork, as pickles; docs/systems/dynapipe.md says under which names they are "
   "read.")  # fmt: skip
