"""Messages timed between two steps, to tell a slow link from a slow rank: only while steps take longer than what ranks compute explains.

    step / busiest rank's passes     ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁████████████▁▁▁▁▁▁▁▁       beyond its usual level: somebody waits for messages
    timed messages                   ▲▲▲▲▲▲▲▲▲▲              ▲▲▲▲▲▲▲▲▲▲▲▲▲▲       what links usually take; and while there is reason to ask

A rank that becomes slow lengthens its passes and the step alike; a link lengthens the step alone. Every process comes to the same
conclusion from the same figures, so that both ends of a link are there when its messages are timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from penstock.adapting.detecting import WARM_UP, Cause, Change, Detector, StepFigures, Subject
from penstock.plans.ranks import pairs_of
from penstock.plans.references import cluster_of
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.telemetry.figures import RankFigures

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.rank import Rank

__all__ = ["LinkProbes", "link_subjects", "rounds_of"]

PROBED_STEPS = 12
"""For so many steps after waits grew messages are timed: twice what it takes to tell."""
TRIES = 4
"""Messages there and back; the quickest counts, for one of the ranks may be late for the first."""
LEAST_FACTOR = 1.5
"""Messages that take less than so many times what is usual are taken for usual: they go through the processor, which is often busy."""
FIRST = max(WARM_UP)
"""So many of the first times say what a link usually takes."""
PROBE_S, LEAST_BYTES, MOST_BYTES = 0.002, 2**16, 2**24
"""A message is about so long that it should take so many seconds."""
MAX_ALL_PAIRS = 8
"""Of so many processes all pairs are followed, since a later plan may have any of them for neighbours."""


def link_subjects(plan: Plan, members: Sequence[int]) -> list[Subject]:
    """The links that are followed in a job."""
    return list(combinations(sorted(members), 2)) if len(members) <= MAX_ALL_PAIRS else [*pairs_of(plan)]


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Pairs in rounds in which no rank is twice, the same on every rank.

    >>> rounds_of([(0, 1), (1, 2), (2, 3)])
    [[(0, 1), (2, 3)], [(1, 2)]]
    """
    found: list[list[tuple[int, int]]] = []
    busy: dict[int, set[int]] = defaultdict(set)
    for pair in pairs:
        number = next(number for number in range(len(pairs)) if not busy[number] & set(pair))
        if number == len(found):
            found.append([])
        found[number].append(pair)
        busy[number].update(pair)
    return found


class LinkProbes:
    """The probes of one process; all processes of a job have them, and ask them after each step."""

    def __init__(self, rank: Rank, members: Sequence[int]) -> None:
        self._rank = rank
        self.subjects = link_subjects(rank.plan, members)
        self._links = Detector({Cause.LINK: self.subjects})
        self._waits = Detector({Cause.PLANNING: [()]})
        """One series of steps over passes, of which nothing is common."""
        self._until = -1
        self._steps: list[int] = []
        """After which messages were timed."""
        self._usual: dict[Subject, list[float]] = defaultdict(list)

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> StepFigures | None:
        """Times messages after a step, beside what they usually take, in the order of `subjects`; None where there was no reason to. All
        processes have the same figures."""
        pairs = [pair for pair in pairs_of(self._rank.plan) if pair in self.subjects]
        if not pairs or self._rank.world.staged or not all(own.compute_s and own.predicted_s for own in ranks.values()):
            return None
        busiest_s = max(own.compute_s for own in ranks.values())
        whole_s = max(own.step_s - own.data_wait_s - own.planning_wait_s for own in ranks.values())
        waits = self._waits.add(step, {Cause.PLANNING: StepFigures([whole_s], [busiest_s])})
        if any(change.factor > change.before for change in waits):
            self._until = step + PROBED_STEPS
        if step > self._until and len(self._steps) >= FIRST and not self._slow_links():
            return None
        found = self._probe(pairs)
        self._steps.append(step)
        self.changes(self._links, found)
        return found

    def changes(self, detector: Detector, found: StepFigures) -> list[Change]:
        """The changes that the last timed messages show a detector. It counts them, and not the steps in between."""
        last = len(self._steps) - 1
        return [
            replace(change, since=self._steps[max(0, change.since)], noticed=self._steps[last])
            for change in detector.add(last, {Cause.LINK: found})
        ]

    def _slow_links(self) -> list[Subject]:
        return [link for link, factor in self._links.factors(Cause.LINK).items() if factor != 1.0]

    def _probe(self, pairs: Sequence[tuple[int, int]]) -> StepFigures:
        own = [0.0] * len(pairs)
        for pairs_at_once in rounds_of(pairs):
            for pair in pairs_at_once:
                if self._rank.world.rank in pair:
                    own[pairs.index(pair)] = self._time_s(pair)
        rows = self._rank.world.groups.gather(torch.tensor(own, dtype=torch.float64))
        ratios: dict[Subject, float] = {pair: self._ratio(pair, time_s) for pair, time_s in zip(pairs, rows.amax(0).tolist(), strict=True)}
        return StepFigures([ratios.get(pair, 0.0) for pair in self.subjects], [1.0 if pair in ratios else 0.0 for pair in self.subjects])

    def _ratio(self, pair: Subject, measured_s: float) -> float:
        """Over what a link took at first; paced devices know how many times as long as predicted theirs take."""
        if isinstance(self._rank, PacedRank):
            return measured_s
        first = self._usual[pair]
        if len(first) < FIRST:
            first.append(measured_s)
        ratio = measured_s / statistics.median(first)
        return ratio if ratio >= LEAST_FACTOR else 1.0

    def _time_s(self, pair: tuple[int, int]) -> float:
        """A message there and back, by the end that sends first; 0 on the other."""
        world, transport = self._rank.world, self._rank.transport
        here = world.rank == pair[0]
        peer = pair[1] if here else pair[0]
        if isinstance(self._rank, PacedRank):
            return self._rank.clock.link_factor(peer) if here else 0.0
        wanted = PROBE_S * cluster_of(self._rank.plan).flow_bandwidth_bytes_per_s(*pair)
        message = torch.zeros(int(min(max(wanted, LEAST_BYTES), MOST_BYTES)), dtype=torch.uint8, device=world.device)
        times = []
        for _ in range(TRIES):
            start = time.perf_counter()
            for sends in (here, not here):
                (transport.send if sends else transport.receive)([message], peer).wait()
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - start)
        return min(times) if here else 0.0
