"""Small planning problems as constraint programmes: the same rules said once more, for a solver that knows nothing of pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from penstock.search.op_degrees.lazy_stages import MixedCosts
from penstock.search.partition.stage_space import Machine, StageSpace


def _solved(model: cp_model.CpModel, objective: Any) -> float:
    """The least value of an objective; infinite where nothing is possible."""
    model.minimize(objective)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return np.inf
    assert status == cp_model.OPTIMAL
    return float(round(solver.objective_value))


def best_partition_time(space: StageSpace, num_micro_batches: int) -> float:
    """Least (m - 1) × slowest + sum over all ways through a table of whole-number stage times, on the devices of every pool.

    Where messages inside a node and across nodes take the same, and a pool is one node.
    """
    return min(_partition_of(space, num_micro_batches, depth) for depth in range(1, space.times.shape[0] + 1))


def _partition_of(space: StageSpace, num_micro_batches: int, depth: int) -> float:
    model, num_cuts = cp_model.CpModel(), len(space.cuts) - 1
    chosen: dict[tuple[int, int, int, int], Any] = {}
    times: dict[tuple[int, int, int, int], int] = {}
    for behind, (c, _), (a, b) in itertools.product(range(depth), enumerate(space.costs), itertools.combinations(range(num_cuts + 1), 2)):
        time = np.inf if b - a > space.width[c, a] else space.times[behind, space.offset[c, a] + b - a - 1]
        if np.isfinite(time):
            key = (behind, c, a, b)
            times[key] = int(time + space.enter[c, 0, a] + space.leave[c, 0, b])
            chosen[key] = model.new_bool_var(str(key))
    for behind in range(depth):
        model.add_exactly_one(used for key, used in chosen.items() if key[0] == behind)
        for cut in range(num_cuts + 1):  # the stage before ends where this one begins
            begins = [used for key, used in chosen.items() if key[0] == behind and key[2] == cut]
            ends = [used for key, used in chosen.items() if key[0] == behind + 1 and key[3] == cut]
            model.add(sum(begins) == (sum(ends) if behind < depth - 1 else int(cut == 0)))
    model.add(sum(used for key, used in chosen.items() if key[0] == 0 and key[3] == num_cuts) == 1)
    for number, pool in enumerate(space.machine.pools):
        options = {c: costs.option.num_devices for c, costs in enumerate(space.costs) if costs.option.pool == number}
        taken = sum(options[key[1]] * used for key, used in chosen.items() if key[1] in options)
        model.add(taken <= pool.num_devices if space.machine.idle else taken == pool.num_devices)
    slowest = model.new_int_var(0, max(times.values(), default=0), "slowest")
    for key, used in chosen.items():
        model.add(slowest >= times[key] * used)
    return _solved(model, (num_micro_batches - 1) * slowest + sum(times[key] * used for key, used in chosen.items()))


def best_mixed_time(costs: Sequence[MixedCosts], machine: Machine, num_micro_batches: int, max_stages: int) -> float:
    """Least time over all cuts, devices of each stage, degrees and recomputation of each op that fit; whole numbers, no reserves."""
    return min(_Mixed(costs, machine, depth).solve(num_micro_batches) for depth in range(1, max_stages + 1))


class _Mixed:
    """All choices for a number of stages: op i is in stage s, which has option o, under configuration q."""

    def __init__(self, costs: Sequence[MixedCosts], machine: Machine, depth: int) -> None:
        self.costs, self.machine, self.depth = costs, machine, depth
        self.num_ops = costs[0].compute.shape[1]
        self.most = int(100 * sum(c.compute.sum() + c.kept.sum() + c.weights.sum() for c in costs)) + 1000
        self.model = cp_model.CpModel()
        self.at = [self._places(i) for i in range(self.num_ops)]
        self.again = [self.model.new_bool_var(f"again {i}") for i in range(self.num_ops)]
        self.option = {(s, o): self.model.new_bool_var(f"option {s} {o}") for s in range(depth) for o in range(len(costs))}

    def _places(self, i: int) -> dict[tuple[int, int, int], Any]:
        return {
            (s, o, q): self.model.new_bool_var(f"op {i} {s} {o} {q}")
            for s in range(self.depth) for o, c in enumerate(self.costs) for q in range(len(c.choices)) if c.allowed[q, i]
        }  # fmt: skip

    def _both(self, *terms: Any) -> Any:
        """A variable that says whether all hold."""
        together = self.model.new_bool_var("")
        self.model.add_bool_and(*terms).only_enforce_if(together)
        self.model.add_bool_or(*(term.negated() for term in terms)).only_enforce_if(together.negated())
        return together

    def solve(self, num_micro_batches: int) -> float:
        model = self.model
        for i in range(self.num_ops):
            model.add_exactly_one(self.at[i].values())
            for (s, o, _), here in self.at[i].items():
                model.add_implication(here, self.option[s, o])
        for s in range(self.depth):
            model.add_exactly_one(self.option[s, o] for o in range(len(self.costs)))
            model.add_at_least_one(here for places in self.at for (stage, _, _), here in places.items() if stage == s)
        stage_of = [sum(s * here for (s, _, _), here in places.items()) for places in self.at]
        for before, after in itertools.pairwise(stage_of):
            model.add(after >= before)
        for number, pool in enumerate(self.machine.pools):
            own = {o: c.num_devices for o, c in enumerate(self.costs) if c.pool == number}
            taken = sum(own[o] * used for (_, o), used in self.option.items() if o in own)
            model.add(taken <= pool.num_devices if self.machine.idle else taken == pool.num_devices)
        times = [self._stage(s) for s in range(self.depth)]
        slowest = model.new_int_var(0, self.most, "slowest")
        for time in times:
            model.add(slowest >= time)
        return _solved(model, (num_micro_batches - 1) * slowest + sum(times))

    def _stage(self, s: int) -> Any:
        """The time of a stage; that it fits is a constraint."""
        time: list[Any] = []
        held: list[Any] = []
        weights: list[Any] = []
        peak = self.model.new_int_var(0, self.most, f"peak {s}")
        carried: Any = 0
        for i in range(self.num_ops):
            for (stage, o, q), here in self.at[i].items():
                if stage != s:
                    continue
                c = self.costs[o]
                time += [int(c.compute[q, i]) * here, int(c.ending[q, i]) * self._both(here, self.again[i])]
                held.append(int(c.kept[q, i]) * here)
                weights.append(int(c.weights[q, i]) * here)
                first = here if i == 0 else self._both(here, *(x.negated() for (t, _, _), x in self.at[i - 1].items() if t == s))
                time.append(int(c.enter[0, q, i]) * first)
                held.append(int(c.entering[q, i]) * first)
                if i + 1 < self.num_ops:
                    last = self._both(here, *(x.negated() for (t, _, _), x in self.at[i + 1].items() if t == s))
                else:
                    last = here
                time.append(int(c.leave[0, q, i]) * last)
            carried = self._segment(s, i, carried, peak, time, held) if i else 0
        for o, c in enumerate(self.costs):
            memory = sum(weights) * int(self.machine.state_factor) + (self.depth - s) * sum(held) + peak
            self.model.add(memory <= int(self.machine.pools[c.pool].memory_limit)).only_enforce_if(self.option[s, o])
        return sum(time)

    def _segment(self, s: int, i: int, carried: Any, peak: Any, time: list[Any], held: list[Any]) -> Any:
        """What op i changes by having an op before it in the stage; returns the open segment behind it."""
        added, ends = [], []
        for (stage, o, p), here in self.at[i - 1].items():
            for (its, other, q), there in self.at[i].items():
                if (stage, its) != (s, s) or o != other:
                    continue
                c, pair = self.costs[o], self._both(here, there)
                time.append(int(c.reshard[p, q, i]) * pair)
                held.append(int(c.moved[p, q, i]) * pair)
                both = self._both(pair, self.again[i - 1], self.again[i])
                added.append((int(c.kept[p, i - 1]), both))
                if c.edge[p, q, i]:
                    ends.append(both)
                else:
                    held.append(-int(c.kept[p, i - 1]) * both)
                    time.append((int(c.forward[p, i - 1]) - int(c.ending[p, i - 1])) * both)
        if not added:
            return 0
        goes_on = self.model.new_bool_var("")
        self.model.add(sum(both for _, both in added) == goes_on)
        segment, behind = (self.model.new_int_var(0, self.most, "") for _ in range(2))
        self.model.add(segment >= carried + sum(size * both for size, both in added)).only_enforce_if(goes_on)
        self.model.add(peak >= segment)
        closed = self.model.new_bool_var("")
        self.model.add(sum(ends) == closed)
        self.model.add(behind >= segment).only_enforce_if(goes_on, closed.negated())
        return behind
