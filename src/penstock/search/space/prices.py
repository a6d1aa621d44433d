"""What every option of a family costs, each kind of cost in a file of its own, and all of them op by op as the programmes read them.

    pass_prices     forward and backward times of ops
    update_prices   gradient sync and optimizer step after the last micro-batch
    memory_prices   what ops hold
    message_prices  between stages
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.levels import Levels, levels_of
from penstock.search.space.memory_prices import MemoryPrices
from penstock.search.space.message_prices import MessagePrices
from penstock.search.space.option_tables import OptionTables
from penstock.search.space.pass_prices import PassPrices
from penstock.search.space.stage_costs import OptionCosts, StageOption
from penstock.search.space.update_prices import UpdatePrices
from penstock.timing.pass_times import rerun

__all__ = ["FamilyPrices"]


@dataclass(frozen=True, eq=False)
class FamilyPrices(FamilyPart):
    """Costs of options where a number of replicas run micro-batches of so many samples."""

    @cached_property
    def tables(self) -> OptionTables:
        """What the others are made from."""
        return OptionTables(self.family)

    @cached_property
    def updates(self) -> UpdatePrices:
        """Gradient sync and optimizer step."""
        return UpdatePrices(self.family, self.tables)

    @cached_property
    def passes(self) -> PassPrices:
        """Forward and backward times."""
        return PassPrices(self.family, self.tables, self.updates)

    @cached_property
    def memory(self) -> MemoryPrices:
        """What ops hold."""
        return MemoryPrices(self.family, self.tables, self.passes)

    @cached_property
    def messages(self) -> MessagePrices:
        """Between stages."""
        return MessagePrices(self.family, self.tables)

    @cached_property
    def bounded(self) -> dict[tuple[StageOption, ...], object]:
        """What bounds have put together for sets of options."""
        return {}

    def levels(self, option: StageOption) -> Levels:
        """What recomputation can save under one option; how its weights are divided does not matter."""
        return self._levels(replace(option, zero=min(option.zero, 1)))

    @remembered
    def _levels(self, option: StageOption) -> Levels:
        count = self.family.count if self.request.asynchronous else 0
        key = (self.tables.of(option)[1], option.tp, option.sequence, self.tables.device(option), count)
        return self.request.once("levels", key, lambda: levels_of(self.costs(option), self.request.blocks))

    @remembered
    def costs(self, option: StageOption) -> OptionCosts:
        """Costs of the chain's ops under one option, from the estimator's own table."""
        forward, compute = self.passes.times(option)
        table, shape = self.tables.of(option)
        s, ops = table.shape_index(shape), table.chain
        enter, leave = self.messages.at_cuts_s(option)
        columns = (table.workspace_bytes, table.backward_workspace_bytes)
        workspace, backward_workspace = (np.ascontiguousarray(x[ops, s, 0, 0]) for x in columns)
        kept, passed = self.memory.kept(option)
        parameters, entering = np.ascontiguousarray(table.parameters[ops, 0, 0]), table.input_bytes[ops, s, 0, 0].copy()
        if option.zero > 1:  # nothing enters the only stage, but the weights and gradients of two blocks at a time
            entering[0] += self.memory.block_bytes(option, parameters)
        state_bytes = self.memory.state_bytes(option)
        if self.request.asynchronous:  # micro-batches under way keep the weights that they used, the newest of them those of the state
            weight = self.tables.bytes_per_weight[0]
            kept, state_bytes = kept + parameters * weight, state_bytes - weight
        parameters *= state_bytes
        light = self.request.once("light", (option.sequence,), lambda: self._light(option.sequence))
        return OptionCosts(
            option, forward, compute, kept, parameters, workspace, backward_workspace, entering, enter, leave, passed=passed, light=light
        )

    def _light(self, sequence: bool) -> NDArray[np.bool_]:
        """[N] ops that need not run again at the end of a recomputed run."""
        model = self.request.estimator.model_under(sequence)
        return np.array([not rerun([model.ops[first]], [0]) for first in self.tables.chain[1]])[self.tables.chain[0]]

    def hiding(self, costs: OptionCosts) -> OptionCosts:
        """The costs under a zero-bubble schedule, which hides weight gradients in the fill and drain of the pipeline."""
        return replace(costs, hidden_fill_s=np.maximum(costs.compute - self.passes.filling(costs.option), 0.0))

    def least_costs(self, option: StageOption) -> OptionCosts:
        """Costs that no stage of this option can be below, with or without sequence parallelism."""
        own = self.costs(self.tables.leanest(option))
        if not own.option.sequence:
            return own
        other = self.costs(replace(own.option, sequence=False))
        names = ("forward", "compute", "forward_reserve", "backward_reserve", "enter", "leave")
        return replace(own, **{name: np.minimum(getattr(own, name), getattr(other, name)) for name in names})
