"""Memory that ops take under the options of a family.

N are the ops of the chain, O the distinct ones, P the ways to bring back what an op keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.models.segments import pieces
from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.option_tables import OptionTables
from penstock.search.space.pass_prices import PassPrices
from penstock.search.space.stage_costs import StageOption

__all__ = ["MemoryPrices"]


@dataclass(frozen=True, eq=False)
class MemoryPrices(FamilyPart):
    """Bytes that a family's options hold."""

    tables: OptionTables
    passes: PassPrices

    @remembered
    def op_shares(self, option: StageOption) -> tuple[Floats, Floats, Floats]:
        """Shares of a device's memory that hold [O] the state of each distinct op at least and [O, P] what it keeps of one micro-batch,
        and [O, P] the time to bring that back at least."""
        recovery, limit = self.request.recovery[option.sequence], self.family.pools[option.pool].memory_limit
        shape, state = self.tables.of(option)[1], self.tables.weights(option) * self.state_bytes(option)
        return state / limit, recovery.bytes_at(shape, option.tp) / limit, recovery.least_s(self.passes.op_times(option)[0])

    def state_bytes(self, option: StageOption) -> float:
        """Bytes that a weight, its gradient and what the optimizer keeps for it take on one device."""
        weight, gradient, master, moments = self.tables.bytes_per_weight
        holders = option.dp * self.family.replicas if option.zero else 1
        return weight / (holders if option.zero > 2 else 1) + gradient / (holders if option.zero > 1 else 1) + (master + moments) / holders

    def kept(self, option: StageOption) -> tuple[Floats, Floats]:
        """[N] bytes that ops keep of a micro-batch, and what of it the next stage keeps instead."""
        recovery, shape, numbers = self.request.recovery[option.sequence], self.tables.of(option)[1], self.tables.chain[0]

        def of_ops() -> tuple[Floats, Floats]:
            made, passed = (np.array([size.at(shape, option.tp) for size in sizes]) for sizes in (recovery.made, recovery.passed))
            return made[numbers], passed[numbers]

        return self.request.once("kept", (shape, option.tp, option.sequence), of_ops)

    def block_bytes(self, option: StageOption, parameters: Floats) -> float:
        """Gradients of a block twice, as they were made and on their way, and under ZeRO-3 its weights twice too."""
        weight, gradient, _, _ = self.tables.bytes_per_weight
        starts = [piece.start for piece in pieces(self.request.model, 0, len(parameters))]
        largest = float(np.add.reduceat(parameters, starts).max())
        return (weight + gradient + (2 * weight if option.zero == 3 else 0)) * largest
