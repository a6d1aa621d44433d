"""Plan search: the grid of uniform plans today.

Only the entry points are listed here; the modules behind them are internal.
"""

from penstock.search.grid import Choice, best_plans, uniform_plans

__all__ = ["Choice", "best_plans", "uniform_plans"]
