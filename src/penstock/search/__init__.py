"""Plan search: the best plans for a model on a cluster, with a bound, by `engine`.

space                                    what is asked; families of plans, options of stages, and what they cost
bounds                                   what no plan can be faster than, from ops alone
partition                                stages of any size: the exact programme over cuts and devices
replicas, interleaved, op_degrees        plans beyond it: unequal replicas, several chunks a device, degrees of each op
uniform                                  the grid of uniform plans
engine                                   the list of searchers; `assemble` puts plans together, `progress` is what they share
simplicity                               which of the plans found to offer: the simplest that is as fast as costs can tell
money, lengths, what_if, baselines       questions asked of the engine
"""

from penstock.plans.telling import degree_range, short_name
from penstock.search.baselines import BASELINES, Baseline, best_of
from penstock.search.choice import Choice
from penstock.search.engine import Outcome, search, search_plans
from penstock.search.lengths import LengthsChoice, search_for_lengths
from penstock.search.money import LeftOut, Objective, Offer, chosen, num_steps, offers
from penstock.search.simplicity import complexity, simplest
from penstock.search.space.request import Request
from penstock.search.uniform import best_plans
from penstock.search.what_if import Relaxed, Rival, found_beside, relaxed, request_of, rivals

__all__ = [
    "BASELINES", "Baseline", "Choice", "LeftOut", "LengthsChoice", "Objective", "Offer", "Outcome", "Relaxed", "Request", "Rival",
    "best_of", "best_plans", "chosen", "complexity", "degree_range", "found_beside", "num_steps", "offers", "relaxed", "request_of",
    "rivals", "search", "search_for_lengths", "search_plans", "short_name", "simplest",
]  # fmt: skip
