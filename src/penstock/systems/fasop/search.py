"""Search over FASOP's costs: stages of unequal layers, degrees and GPU kinds on clusters of several node kinds, with a bound.

Rough plans come from a dynamic programme over (layers left, GPUs left of each kind) for many limits on the slowest stage; device order
along the pipeline falls out of the counts. Each is placed on nodes and improved by moves under the 1F1B clock. Work is counted in
steps, not seconds: the same input gives the same plan.

Why this is not `search.partition`, which Aceso's tables are searched with. There a pipeline takes (m - 1) × slowest stage + sum of stages,
and a message is part of a stage's time, known from how many devices the stages before it took. By FASOP's rules

- a message delays the next stage and not the sender, so that the time is that of a clock and not of a formula;
- what a message, a gradient ring and the tied embedding take follows from the nodes that each replica of a stage stands on, which two
  stages may share: placing a stage changes the times of others, also of one at the far end of the pipeline;
- replicas of a stage may be spread over any number of nodes, where the partition programme knows one node or whole ones.

So plans are changed as a whole (`kernels.improve`), and the bound counts which stages could share nodes (`bound`). Only rough plans could
come from the partition programme, with the tied embedding as negative relief. They were tried: with 7 limits on the slowest stage for
each of two guesses of the links, five of the six published settings end in the same plan and one 0.2 % slower, and plans of 24 random
clusters are 0.3 % slower on average and up to 6 % (28 + 28 GPUs), in the same time. The programme here asks for no number of stages,
which leaves time for twice as many limits, and gives a plan for each kind of GPUs in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, permutations, product
from typing import Any

import numpy as np

from penstock.errors import InputError, ProfileMissingError, near_misses
from penstock.systems.fasop.bound import lower_bound_s
from penstock.systems.fasop.rules import (
    INTER_OVERHEAD,
    INTRA_OVERHEAD,
    Case,
    Counted,
    FasopProblem,
    Option,
    Sketches,
    build_case,
    micro_batches_of,
    options_of,
    too_small,
)
from penstock.systems.fasop.tables import FasopTables

__all__ = ["ClusterAnswer", "FasopAnswer", "pareto_fasop", "search_fasop"]


@dataclass(frozen=True)
class Effort:
    """How much is tried: bounds on the slowest stage, and steps of work on each rough plan, on all of them, and on the best."""

    most_states: int
    """Counts of GPUs that a rough plan tells apart; larger clusters are counted in pairs, fours and so on."""
    num_bounds: int
    ratio: float
    work: int
    total_work: int
    deep_work: int


THOROUGH = Effort(most_states=1200, num_bounds=14, ratio=1.06, work=1_200_000, total_work=12_000_000, deep_work=8_000_000)
QUICK = Effort(most_states=300, num_bounds=4, ratio=1.2, work=800_000, total_work=3_000_000, deep_work=0)


@dataclass(frozen=True)
class FasopAnswer:
    """The best plan (stages with `layers`, `tp`, `dp` and `devices` as [node kind, node, GPUs]), its time, and a bound on any plan's."""

    plan: dict[str, Any]
    time_s: float
    bound_s: float | None
    usd_per_step: float
    """Price of the nodes that the plan touches."""
    num_devices: int
    """GPUs that the plan uses."""


@dataclass(frozen=True)
class ClusterAnswer:
    """What one cluster of a pool can do, and the cluster that is at least as good in time, money and GPUs, if there is one."""

    counts: dict[str, int]
    answer: FasopAnswer | None
    """None where no plan fits."""
    dominated_by: dict[str, int] | None = None


@dataclass(frozen=True, eq=False)
class _Draft:
    """A plan in the making: rows of layers, options and spreads; how many last stages sit beside the first; how nodes are picked."""

    samples: int
    time_s: float
    rows: np.ndarray
    tail: int = 0
    fullest: int = 0

    @cached_property
    def key(self) -> tuple[int, bytes]:
        """Drafts with the same options lead to the same plan."""
        return self.samples, self.rows[1].tobytes()


@dataclass(frozen=True)
class _Size:
    """One number of samples per micro-batch."""

    options: list[Option]
    case: Case


def search_fasop(tables: FasopTables, setting: str) -> FasopAnswer:
    """The best plan found for one of the experiments, and a time that no plan is below."""
    problem = FasopProblem.of(tables, setting)
    sizes = sizes_of(problem)
    if not sizes:
        gpus = ", ".join(sorted({kind.gpu for kind in problem.kinds.values()}))
        raise ProfileMissingError(f"{tables.name} times no layers of setting '{setting}' on {gpus}. Profile one of them at tp 1.")
    draft = _search(problem, sizes, THOROUGH, [])
    if draft is None:
        raise too_small(problem)
    least = lower_bound_s(problem, [(size.options, size.case) for size in sizes.values()], draft.time_s)
    return _answer(problem, sizes, draft, setting, least)


def pareto_fasop(tables: FasopTables, setting: str, most: Mapping[str, int] | None) -> list[ClusterAnswer]:
    """Every cluster of up to `most` nodes of each kind (8 unless told), the smallest first, each with its best plan."""
    settings = tables.settings()
    if setting not in settings:
        raise InputError(f"{tables.name} has no setting '{setting}'. {near_misses(setting, settings)}")
    known = tables.node_kinds(settings[setting].node_table)
    most = dict(most) if most is not None else dict.fromkeys(known, 8)
    odd = [kind for kind in most if kind not in known]
    if odd:
        raise InputError(f"no node kind '{odd[0]}'. {near_misses(odd[0], known)}")
    grid = sorted(product(*(range(most[kind] + 1) for kind in most)), key=lambda counts: (sum(counts), counts))[1:]
    drafts: dict[tuple[int, ...], _Named] = {}
    answers = []

    def solve(counts: tuple[int, ...]) -> tuple[FasopProblem, dict[int, _Size], _Draft | None]:
        problem = FasopProblem.on(tables, settings[setting].model, known, dict(zip(most, counts, strict=True)))
        sizes = sizes_of(problem)
        smaller = [drafts[less] for index in range(len(counts)) if (less := _one_less(counts, index)) in drafts]
        carried = [found for named in smaller if (found := named.on(problem, sizes)) is not None]
        return problem, sizes, _search(problem, sizes, QUICK, carried)

    with ThreadPoolExecutor(2) as pool:
        for _, level in groupby(grid, key=sum):  # clusters of one size do not wait for each other, only for those one node smaller
            chosen = list(level)
            for counts, (problem, sizes, draft) in zip(chosen, pool.map(solve, chosen), strict=True):
                if draft is not None:
                    drafts[counts] = _Named.of(draft, problem, sizes)
                answer = _answer(problem, sizes, draft, setting, None) if draft else None
                answers.append(ClusterAnswer(dict(zip(most, counts, strict=True)), answer))
    return [_compared(answer, answers) for answer in answers]


def _one_less(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] - 1, *counts[index + 1 :])


@dataclass(frozen=True, eq=False)
class _Named:
    """A draft with its options by kind name, to be carried over to a larger cluster."""

    draft: _Draft
    options: list[tuple[tuple[str, ...], int, int]]

    @classmethod
    def of(cls, draft: _Draft, problem: FasopProblem, sizes: Mapping[int, _Size]) -> _Named:
        """Reads the names off."""
        names, options = list(problem.kinds), sizes[draft.samples].options
        chosen = [options[index] for index in draft.rows[1]]
        return cls(draft, [(tuple(names[kind] for kind in option.kinds), option.tp, option.dp) for option in chosen])

    def on(self, problem: FasopProblem, sizes: Mapping[int, _Size]) -> _Draft | None:
        """The same plan on a cluster with more nodes, where its options exist."""
        names = list(problem.kinds)
        if self.draft.samples not in sizes:
            return None
        places = {option: index for index, option in enumerate(sizes[self.draft.samples].options)}
        found = [places.get(Option(tuple(map(names.index, kinds)), tp, dp)) for kinds, tp, dp in self.options]
        if None in found:
            return None
        rows = self.draft.rows.copy()
        rows[1] = found
        return replace(self.draft, rows=rows)


def sizes_of(problem: FasopProblem) -> dict[int, _Size]:
    found = {}
    for samples in micro_batches_of(problem):
        options = options_of(problem, samples)
        found[samples] = _Size(options, build_case(problem, samples, options))
    return found


def _search(problem: FasopProblem, sizes: Mapping[int, _Size], effort: Effort, carried: list[_Draft]) -> _Draft | None:
    """Rough plans of every micro-batch size, the promising ones improved, the best of them in depth; None where nothing fits."""
    drafts = list(carried)
    hopes = sorted((_rough_bound_s(problem, size), samples) for samples, size in sizes.items())
    for hope_s, samples in hopes:
        if hope_s < min((draft.time_s for draft in drafts), default=np.inf):
            drafts += _sketches(problem, samples, sizes[samples], effort)
    best_s = min((draft.time_s for draft in drafts), default=np.inf)
    hopeful = [samples for hope_s, samples in hopes if hope_s < best_s]
    uniform = (placed(sizes[b].case, b, chosen) for b in hopeful for chosen in uniform_stages(problem, sizes[b].options))
    drafts += [draft for draft in uniform if draft.time_s < best_s]
    distinct: dict[tuple[int, bytes], _Draft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.time_s):
        if np.isfinite(draft.time_s):
            distinct.setdefault(draft.key, draft)
    left, improved = effort.total_work, []
    for draft in _in_turn(list(distinct.values())):
        if left > 0:
            better, used = _improved(problem, sizes, draft, min(left, effort.work), False)
            improved.append(better)
            left -= used
    improved.sort(key=lambda draft: draft.time_s)
    left = max(left, 0) + effort.deep_work
    for rank, draft in enumerate(improved):
        if left > 0:
            improved[rank], used = _improved(problem, sizes, draft, left, True)
            left -= used
    return min(improved, key=lambda draft: draft.time_s, default=None)


def _in_turn(drafts: list[_Draft]) -> list[_Draft]:
    """The fastest first; each further draft of one micro-batch size waits a little for those of others."""
    taken: dict[int, int] = {}
    keyed = []
    for index, draft in enumerate(drafts):
        rank = taken[draft.samples] = taken.get(draft.samples, -1) + 1
        keyed.append((draft.time_s * (1 + 0.02 * rank), index))
    return [drafts[index] for _, index in sorted(keyed)]


def _sketches(problem: FasopProblem, samples: int, size: _Size, effort: Effort) -> list[_Draft]:
    """Rough plans of one micro-batch size, each placed on nodes and timed."""
    from penstock.systems.fasop import kernels as kernels

    kinds, options, case = list(problem.kinds.values()), size.options, size.case
    one_kind = [kinds[option.kinds[0]] for option in options]
    unit, limit = _counting(problem, effort.most_states)
    devices = np.array([option.num_devices for option in options])
    kind = np.array([option.kinds[0] if len(option.kinds) == 1 else -1 for option in options])
    units = np.array([-(-option.num_devices // unit[option.kinds[0]]) for option in options])
    node = np.array([max(1, k.gpus_per_node // u) for k, u in zip(kinds, unit, strict=True)])
    intra_link = np.array([k.intra_bits_per_s for k in one_kind]) / INTRA_OVERHEAD
    inter_link = np.array([k.inter_bits_per_s for k in one_kind]) / INTER_OVERHEAD
    intra, inter = samples * case.sample_bits / case.dp / intra_link, samples * case.sample_bits * case.tp / inter_link
    ring = np.array([k.intra_bits_per_s if n <= k.gpus_per_node else k.inter_bits_per_s for n, k in zip(devices, one_kind, strict=True)])
    tables = Sketches.empty(len(kinds), len(case.gradient_bits) - 1, int(np.prod(limit + 1)))
    fluid, found, seen = _fluid_s(problem, size), [], set()
    for step, together in product(range(effort.num_bounds), (False, True)):
        link = [(max if together else min)(k.intra_bits_per_s, k.inter_bits_per_s) for k in one_kind]
        tied = np.array([case.tied_bits / o.tp * min(o.dp, case.per_node) / 2 for o in options]) / link
        tau = fluid * 1.03 * effort.ratio**step
        kernels.sketch(case, Counted(kind, units, limit, node, intra, inter, tied, ring), tau, tables)
        for chosen in tables.options(len(options)):
            if chosen.tobytes() not in seen:
                seen.add(chosen.tobytes())
                found.append(placed(case, samples, chosen))
    return found + [placed(case, samples, np.array([c])) for c in range(len(options))]


def uniform_stages(problem: FasopProblem, options: list[Option]) -> Iterator[np.ndarray]:
    """Equal stages on one kind of GPUs after the other: where links are slow, rough plans that count on faster ones are worse."""
    most = len(problem.model.layer_types)
    index = {(option.kinds[0], option.tp, option.dp): c for c, option in enumerate(options) if len(option.kinds) == 1}
    for tp, dp in sorted({(tp, dp) for _, tp, dp in index}):
        stages = [
            [index[k, tp, dp]] * (kind.gpus_per_node // tp * tp * count // (tp * dp)) if (k, tp, dp) in index else []
            for k, (kind, count) in enumerate(zip(problem.kinds.values(), problem.counts, strict=True))
        ]
        for order in permutations(part for part in stages if part):
            chosen = [c for part in order for c in part]
            if 1 < len(chosen) <= most:
                yield np.array(chosen)


def _counting(problem: FasopProblem, most_states: int) -> tuple[list[int], np.ndarray]:
    """GPUs of each kind that rough plans count as one, and how many of these there are."""
    devices = [kind.gpus_per_node * count for kind, count in zip(problem.kinds.values(), problem.counts, strict=True)]
    unit = [1] * len(devices)
    while np.prod([n // u + 1 for n, u in zip(devices, unit, strict=True)]) > most_states:
        largest = max(range(len(devices)), key=lambda index: devices[index] / unit[index])
        unit[largest] *= 2
    return unit, np.array([n // u for n, u in zip(devices, unit, strict=True)])


def _fluid_s(problem: FasopProblem, size: _Size) -> float:
    """Time of a micro-batch if every GPU were busy and layers could be divided at will."""
    layer_s = np.diff(size.case.times, axis=1)
    rate = np.zeros(layer_s.shape[1])
    for index, (kind, count) in enumerate(zip(problem.kinds.values(), problem.counts, strict=True)):
        own = [option.num_devices * layer_s[c] for c, option in enumerate(size.options) if option.kinds == (index,)]
        if own:
            rate += kind.gpus_per_node * count / np.maximum(np.min(own, axis=0), 1e-12)
    return float((1 / rate).sum()) if rate.all() else float(layer_s.sum())


def _rough_bound_s(problem: FasopProblem, size: _Size) -> float:
    """A time no plan is below: one micro-batch at the best options, all others at the pace of GPUs, weighed by speed, never idle."""
    layer_s = np.diff(size.case.times, axis=1)
    need, room = np.full(layer_s.shape[1], np.inf), 0.0
    for index, (kind, count) in enumerate(zip(problem.kinds.values(), problem.counts, strict=True)):
        own = [option.num_devices * layer_s[c] for c, option in enumerate(size.options) if index in option.kinds]
        if own:
            least = np.min(own, axis=0)
            need = np.minimum(need, least / max(least.sum(), 1e-12))
            room += kind.gpus_per_node * count / max(least.sum(), 1e-12)
    return float(layer_s.min(axis=0).sum() + (size.case.num_micro_batches - 1) * need.sum() / room)


def placed(case: Case, samples: int, chosen: np.ndarray) -> _Draft:
    """A rough plan on nodes, with none, one or two of its last stages beside the first."""
    from penstock.systems.fasop import kernels as kernels

    drafts = []
    for tail in range(min(3, len(chosen))):
        rows = np.stack([np.zeros_like(chosen), chosen, np.array([kernels.narrowest(case, c) for c in chosen])])
        time = kernels.start(case, rows[0], rows[1], rows[2], tail, False, 1e9, 1.0)
        drafts.append(_Draft(samples, float(time), rows, tail))
    return min(drafts, key=lambda draft: draft.time_s)


def _improved(problem: FasopProblem, sizes: Mapping[int, _Size], draft: _Draft, work: int, deep: bool) -> tuple[_Draft, int]:
    """A better draft, and the work it took."""
    from penstock.systems.fasop import kernels as kernels

    depth = draft.rows.shape[1]
    rows = np.ones((3, min(problem.num_devices, len(problem.model.layer_types))), np.int64)
    rows[1] = 0
    rows[:, :depth] = draft.rows
    shape = np.array([depth, draft.tail, draft.fullest, work])
    time = kernels.improve(sizes[draft.samples].case, rows, shape, draft.time_s, 8, deep)
    return _Draft(draft.samples, float(time), rows[:, : shape[0]].copy(), int(shape[1]), int(shape[2])), work - int(shape[3])


def _answer(problem: FasopProblem, sizes: Mapping[int, _Size], draft: _Draft, setting: str, bound_s: float | None) -> FasopAnswer:
    from penstock.systems.fasop import kernels as kernels

    size, depth = sizes[draft.samples], draft.rows.shape[1]
    nodes = np.zeros((depth, max(option.dp for option in size.options)), np.int64)
    layers, chosen, spread = (np.ascontiguousarray(row) for row in draft.rows)
    kernels.deal(size.case, chosen, spread, draft.tail, draft.fullest > 0, nodes)
    names = [name for name, count in zip(problem.kinds, problem.counts, strict=True) for _ in range(count)]
    options = [size.options[index] for index in chosen]
    stages = [
        {"layers": int(count), "tp": option.tp, "dp": option.dp, "mbs": draft.samples // option.dp,
         "devices": _devices([int(node) for node in nodes[stage, : option.dp]], option.tp, names)}
        for stage, (count, option) in enumerate(zip(layers, options, strict=True))
    ]  # fmt: skip
    plan = {"setting": setting, "mbs": draft.samples // options[0].dp, "stages": stages}
    used = {int(node) for stage, option in enumerate(options) for node in nodes[stage, : option.dp]}
    price = sum(problem.kinds[names[node]].usd_per_hour for node in used) / 3600
    bound = min(bound_s, draft.time_s) if bound_s is not None else None
    return FasopAnswer(plan, draft.time_s, bound, draft.time_s * price, sum(option.num_devices for option in options))


def _devices(replicas: list[int], tp: int, names: list[str]) -> list[list[Any]]:
    """Neighbouring replicas on one node as one entry."""
    entries: list[list[Any]] = []
    for node in replicas:
        if entries and entries[-1][1] == node:
            entries[-1][2] += tp
        else:
            entries.append([names[node], node, tp])
    return entries


def _compared(mine: ClusterAnswer, answers: list[ClusterAnswer]) -> ClusterAnswer:
    """With the first cluster that is nowhere worse and somewhere better, or equal and earlier in the list."""
    if mine.answer is None:
        return mine
    own = _merits(mine.answer)
    for other in answers:
        if other is mine or other.answer is None:
            continue
        theirs = _merits(other.answer)
        earlier = answers.index(other) < answers.index(mine)
        if all(a <= b for a, b in zip(theirs, own, strict=True)) and (theirs != own or earlier):
            return replace(mine, dominated_by=other.counts)
    return mine


def _merits(answer: FasopAnswer) -> tuple[float, float, int]:
    return answer.time_s, answer.usd_per_step, answer.num_devices
