"""Exact partition: the best cut of a chain of ops into stages on devices, whatever the costs of the stages come from.

The names below need no plan and no cluster, only arrays of costs; adapters of other planners' tables use them.
"""

from penstock.search.partition.flags import Flags, recompute_flags
from penstock.search.partition.programme import TOLERANCE, Partition, best_cuts, best_partition, rough_bound
from penstock.search.partition.stage_space import Machine, StageChoice, StageSpace, build_space
from penstock.search.space.blocks import Blocks
from penstock.search.space.stage_costs import DevicePool, OptionCosts, StageOption

__all__ = [
    "TOLERANCE", "Blocks", "DevicePool", "Flags", "Machine", "OptionCosts", "Partition", "StageChoice", "StageOption", "StageSpace",
    "best_cuts", "best_partition", "build_space", "recompute_flags", "rough_bound",
]  # fmt: skip
