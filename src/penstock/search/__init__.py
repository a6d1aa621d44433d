"""Plan search: uniform plans, and plans with stages of any size.

Only the entry points are listed here; the modules behind them are internal.
"""

from penstock.search.best import search_plans
from penstock.search.grid import Choice, best_plans, uniform_plans

__all__ = ["Choice", "best_plans", "search_plans", "uniform_plans"]
