"""Pipelines over several kinds of devices, annealed: cuts, devices and degrees of all stages change together, judged by the iteration.

The partition programme takes a message for one inside a node wherever a stage does not end with its node, and knows nothing of what follows
the last micro-batch. Where kinds are joined by slow networks both decide which stages are any good: small ones at both ends of a slow link,
which lose little by waiting for it, large ones between them, and few weights on nodes that are slow to sum gradients. Here all of this
counts, in the order of ranks in which a replica's stages lie side by side; nothing is recomputed. It proves nothing, and finds what the
programme misses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.plans.plan import Plan
from penstock.schedules.rules import SCHEDULES
from penstock.search.assemble import assembled, best_order, stage_of
from penstock.search.choice import Choice
from penstock.search.space.families import MAX_STAGES, PlanFamily, powers
from penstock.search.space.stage_costs import Ints, StageOption, sums_before

__all__ = ["AnnealedPipelines", "AnnealedStages", "PipelineArrays"]

_LOOK = 8_000
"""Steps of a first look at a way to begin."""
_WARMTH = 0.03
"""Share of its time by which a pipeline may become slower at first."""
_FULL = 0.97
"""Of the memory may be taken by what stages hold for sure; the estimate counts workspace besides."""


class PipelineArrays(NamedTuple):
    """What stages of each option cost, as the kernel takes it; [C, N + 1] are sums over the ops before an op."""

    work: Floats
    hidden: Floats
    """What zero-bubble hides in the fill and drain of the pipeline."""
    after: Floats
    """Gradient sync and optimizer step."""
    state: Floats
    kept: Floats
    """Shares of a device's memory: of weights and their like, and of each micro-batch in flight."""
    got: Floats
    back: Floats
    """[C, N + 1] bytes that a rank gets if its stage begins at an op, and gets back if it ends there."""
    link: Floats
    """[2, C, C, 3] inside a node and across nodes, to the stage behind: latency, seconds per byte there and back."""
    ends_s: Floats
    """[C, C] to sum the gradient of a weight that the first stage shares with that of op `tied`, in different nodes."""
    devices: Ints
    pool_of: Ints
    """[C]"""
    sizes: Ints
    nodes: Ints
    """[pools] devices, and devices of a node."""
    tied: int
    """The last op that shares a weight with the first one, or less than 0."""


class AnnealedStages(NamedTuple):
    """Stages, as many as `number`, and the time that they take."""

    time_s: float
    number: int
    cuts: Ints
    """Where they begin, and the end."""
    options: Ints


@dataclass(frozen=True)
class AnnealedPipelines:
    """Pipelines of one family."""

    family: PlanFamily

    @cached_property
    def schedule(self) -> str:
        """The one that hides most."""
        return max(self.family.request.unchunked, key=lambda name: SCHEDULES[name].fill_relief)

    @cached_property
    def options(self) -> list[StageOption]:
        """Options of the subspace in which stages may differ."""
        return list(self.family.subspaces[0].options)

    @cached_property
    def arrays(self) -> PipelineArrays:
        """What their stages cost."""
        prices, options, pools = self.family.prices, self.options, self.family.pools
        costs = [prices.costs(option) for option in options]
        hiding = [prices.hiding(c).hidden for c in costs] if SCHEDULES[self.schedule].fill_relief else [c.hidden for c in costs]
        room = [pools[option.pool].with_share(_FULL).memory_limit for option in options]
        sizes, of_size = _alike(options, lambda option: (option.pool, option.num_devices))
        link = np.array([[[prices.messages.link_between(a, b, across) for b in sizes] for a in sizes] for across in (False, True)])
        shares, of_share = _alike(options, lambda option: (option.pool, option.num_devices, option.tp))
        ends_s = np.array([[prices.updates.ends_between_s(a, b) for b in shares] for a in shares])
        got, back = (np.stack(side) for side in zip(*map(prices.messages.cut_bytes, options), strict=True))
        return PipelineArrays(
            sums_before([c.compute for c in costs]), sums_before(hiding), sums_before([prices.updates.side_by_side_s(o) for o in options]),
            sums_before([c.weights / limit for c, limit in zip(costs, room, strict=True)]),
            sums_before([c.kept / limit for c, limit in zip(costs, room, strict=True)]),
            # In the order that kernels are compiled for: picking columns leaves them the other way round.
            got, back, np.ascontiguousarray(link[:, of_size[:, None], of_size]), ends_s[of_share[:, None], of_share],
            np.array([o.num_devices for o in options]), np.array([o.pool for o in options]),
            np.array([pool.num_devices for pool in pools]), np.array([max(pool.per_node, 1) for pool in pools]),
            prices.tables.tied[0],
        )  # fmt: skip

    @cached_property
    def looked(self) -> list[tuple[AnnealedStages, AnnealedStages]]:
        """What annealing for a moment makes of each pipeline to begin with, and that pipeline; the fastest first."""
        begun = [self._begun(options) for options in self._starts() if 0 < len(options) <= MAX_STAGES]
        found = [(self._annealed(pipeline, _LOOK), pipeline) for pipeline in begun]
        return sorted((pair for pair in found if pair[0].time_s < np.inf), key=lambda pair: pair[0].time_s)

    def best(self, steps: int, begun: int) -> Choice | None:
        """The best plan met in so many steps from each of the most promising pipelines to begin with, if it fits."""
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda pair: self._annealed(pair[1], steps), self.looked[:begun]))
        choice = self._choice(min(found, key=lambda pipeline: pipeline.time_s)) if found else None
        return choice if choice is not None and choice.estimate.fits else None

    def _begun(self, options: list[int]) -> AnnealedStages:
        """Stages of some options with shares of the ops by their speeds."""
        num_ops = self.arrays.work.shape[1] - 1
        cuts, own = np.full(MAX_STAGES + 2, num_ops), np.zeros(MAX_STAGES, np.int64)
        own[: len(options)], cuts[: len(options)] = options, _shares(self.arrays.work[options, -1], num_ops)
        return AnnealedStages(np.inf, len(options), cuts, own)

    def _annealed(self, pipeline: AnnealedStages, steps: int) -> AnnealedStages:
        from penstock.search.partition.annealing_kernels import anneal

        cuts, options = pipeline.cuts.copy(), pipeline.options.copy()
        held_by_all = SCHEDULES[self.schedule].splits_backward
        time_s, number = anneal(self.arrays, self.family.count, held_by_all, steps, _WARMTH, 0, pipeline.number, cuts, options)
        return AnnealedStages(float(time_s), int(number), cuts, options)

    def _starts(self) -> Iterator[list[int]]:
        """Options of stages to begin with: equal parts of nodes, kind after kind, or all others between two halves of a kind."""
        for size in self._part_sizes():
            each = [self._equal(pool, size) for pool in range(len(self.family.pools))]
            for pool, own in enumerate(each):
                others = [option for other, options in enumerate(each) if other != pool for option in options]
                half = len(own) // 2
                yield from ([*own, *others], [*own[:half], *others, *own[half:]])

    def _part_sizes(self) -> list[int]:
        """Devices of a stage such that all devices make as many stages as there may be, and half as many."""
        largest, sizes = int(self.arrays.nodes.max()), self.arrays.sizes
        return [size for size in powers(largest) if (sizes // size).sum() <= MAX_STAGES][:2]

    def _equal(self, pool: int, size: int) -> list[int]:
        """Stages of so many devices of a kind, or of one of its nodes, with samples divided as far as can be."""
        size = min(size, int(self.arrays.nodes[pool]))
        able = [c for c, option in enumerate(self.options) if option.pool == pool and option.num_devices == size]
        return [max(able, key=lambda c: self.options[c].dp)] * int(self.arrays.sizes[pool] // size) if able else []

    def _choice(self, pipeline: AnnealedStages) -> Choice:
        """The plan of these stages, estimated."""
        from penstock.search.partition.annealing_kernels import pipeline_s

        family, starts, cuts = self.family, np.zeros(MAX_STAGES, np.int64), pipeline.cuts
        pipeline_s(self.arrays, family.count, False, pipeline.number, cuts, pipeline.options, starts)

        def plan_in(together: bool) -> Plan:
            options = [self.options[at] for at in pipeline.options[: pipeline.number]]
            made = [
                stage_of(int(cuts[at]), int(cuts[at + 1]), option, family.ranks(option, int(starts[at]), together))
                for at, option in enumerate(options)
            ]
            return assembled(family.request.frame, made, family.samples, self.schedule)

        return best_order(family, "exact", plan_in)


def _alike(options: Sequence[StageOption], likeness: Callable[[StageOption], Hashable]) -> tuple[list[StageOption], Ints]:
    """One of all options that are alike, and [C] which of these each option is like: messages depend on little, and there are C² pairs."""
    found = {likeness(option): option for option in options}
    order = {key: index for index, key in enumerate(found)}
    return list(found.values()), np.array([order[likeness(option)] for option in options])


def _shares(times: Floats, num_ops: int) -> Ints:
    """[stages] where stages begin whose speeds are the inverse of some times, each with an op at least."""
    speeds = np.cumsum(1 / times)
    starts = np.concatenate([[0.0], speeds[:-1]]) / speeds[-1] * num_ops
    return np.asarray(np.maximum(np.floor(starts).astype(np.int64), np.arange(len(times))))
