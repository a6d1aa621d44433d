"""Degrees of each op: stages whose ops are divided each in its own way.

The names below need no plan and no cluster, only arrays of costs; adapters of other planners' tables use them.
"""

from penstock.search.op_degrees.lazy_stages import LazyStages, MixedCosts, OpChoice, SolvedStage

__all__ = ["LazyStages", "MixedCosts", "OpChoice", "SolvedStage"]
