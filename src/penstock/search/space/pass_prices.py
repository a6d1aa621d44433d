"""Forward and backward times of ops under the options of a family.

N are the ops of the chain, O the distinct ones. What is named `least_…` is a bound: no plan is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.costs.table import Floats
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES
from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.option_tables import OptionTables
from penstock.search.space.stage_costs import StageOption
from penstock.search.space.update_prices import UpdatePrices
from penstock.timing.pass_times import OpPasses, op_passes

__all__ = ["PassPrices"]


@dataclass(frozen=True, eq=False)
class PassPrices(FamilyPart):
    """Time that a family's options spend on the passes of a micro-batch."""

    tables: OptionTables
    updates: UpdatePrices

    def times(self, option: StageOption, algo: int = 0) -> tuple[Floats, Floats]:
        """[N] forward time and forward + backward time of every op, collectives included; infinite where it cannot be divided so."""
        forward, both = self.op_times(option, algo) if algo else self.op_times(option)
        return forward[self.tables.chain[0]], both[self.tables.chain[0]]

    def filling(self, option: StageOption) -> Floats:
        """[N] what each op adds at least to filling and draining the pipeline under any schedule of the request but the interleaved."""
        return self.op_filling(option)[self.tables.chain[0]]

    @remembered
    def op_times(self, option: StageOption, algo: int = 0) -> tuple[Floats, Floats]:
        """[O] `times` of the distinct ops; under ZeRO-2 and 3 with what every micro-batch sends of weights and gradients."""
        passes = self._op_passes(option, algo)
        forward, both = passes.forward_pass_s, passes.both_s
        if option.zero > 1:
            summed, gathered = self.updates.sent_s_per_weight(option)
            once = {2: summed, 3: summed + 2 * gathered}[option.zero]
            # What is sent once an iteration is in `op_after_s`, so that only the other micro-batches' share counts here.
            both = both + (once - (summed + (gathered if option.zero == 3 else 0.0)) / self.family.count) * self.tables.weights(option)
        if self.request.asynchronous:  # every micro-batch ends with an update
            both = both + self.updates.update_s(option)
        return forward / self.family.window, both / self.family.window

    @remembered
    def op_filling(self, option: StageOption) -> Floats:
        """[O] `filling` of the distinct ops."""
        time = self.op_times(option)[1]
        relief = max(SCHEDULES[name].fill_relief for name in (DEFAULT_SCHEDULE, *self.request.schedules))
        relief = min(relief, self.family.count)  # with one micro-batch only the drain can be filled
        return np.maximum(time - relief * self._op_passes(option).weight_s, 0.0) if relief else time

    @remembered
    def least_times(self, option: StageOption) -> Floats:
        """[O] forward + backward time of the distinct ops, the better of with and without sequence parallelism."""
        rows = self.tables.leanest(option)
        return np.asarray(np.minimum(self.op_times(rows)[1], self.op_times(replace(rows, sequence=False))[1]))

    @remembered
    def least_filling(self, option: StageOption) -> Floats:
        """[O] `op_filling`, the better of with and without sequence parallelism."""
        rows = self.tables.leanest(option)
        return np.asarray(np.minimum(self.op_filling(rows), self.op_filling(replace(rows, sequence=False))))

    def _op_passes(self, option: StageOption, algo: int = 0) -> OpPasses:
        """[O] passes of the distinct ops under one of their splits, ZeRO apart."""
        (table, shape), device = self.tables.of(option), self.tables.device(option)
        return self.request.once(
            "passes", (shape, option.tp, option.sequence, device, algo),
            lambda: op_passes(self.request.model, table, shape, device=device, tp=option.tp, algos=algo),
        )  # fmt: skip
