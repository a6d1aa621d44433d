"""The searcher of stages whose ops have degrees of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.search.op_degrees.mixed_plans import free_bound_s, mixed_plans
from penstock.search.progress import Progress, ProofLine, weakest
from penstock.search.space.families import PlanFamily, Subspace

__all__ = ["PerOpDegrees"]


class PerOpDegrees:
    """Plans that give each op of a stage its own tp, dp and split, in families where some run of ops gains by that."""

    def __init__(self, families: Sequence[PlanFamily]) -> None:
        """`families` in the order in which to look at them."""
        self._families = families
        self._lines: list[ProofLine] = []

    def bound(self) -> float:
        """The least bound of the subspaces that were looked at."""
        return weakest(self._lines)

    def best(self, progress: Progress) -> None:
        """Solves families that may be faster than the best plan so far. The first answer of each is a bound, so that nothing is left to
        prove; where time is up, what the ops take alone is one."""
        for family in self._families:
            if (free_s := free_bound_s(family)) >= progress.best_s:
                continue
            every = Subspace(family.options, family.num_devices, fine=True, per_op=True)
            if progress.out_of_time():
                self._lines.append(ProofLine(family.replicas, family.samples, every, free_s, None))
                continue
            progress.tell(f"degrees of each op: {family}")
            for plans in mixed_plans(family, progress.best_s):
                subspace = replace(every, max_stages=plans.max_stages)
                self._lines.append(ProofLine(family.replicas, family.samples, subspace, free_s, plans.bound_s))
                if plans.bound_s < progress.best_s:
                    progress.add(plans.best(progress.best_s))

    def prove(self, progress: Progress) -> None:
        """Adds the lines of the search."""
        progress.lines += [line for line in self._lines if line.bound_s < progress.best_s]
