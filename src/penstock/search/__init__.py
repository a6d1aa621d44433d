"""Plan search: uniform plans, and plans with stages of any size, with a bound.

Only the entry points are listed here; the modules behind them are internal.
"""

from penstock.search.choice import Choice
from penstock.search.engine import Outcome, search_plans
from penstock.search.uniform import best_plans, uniform_plans

__all__ = ["Choice", "Outcome", "best_plans", "search_plans", "uniform_plans"]
