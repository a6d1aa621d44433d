"""What everything costs: one interface (`CostSource`, `CostTable`), several sources, and the memory of a device.

Only the entry points are listed here; the modules behind them are internal.
"""

from penstock.costs.collectives import Group, collective_s, group_of, point_to_point_s, sync_gradients_s, transfer_s
from penstock.costs.efficiency import Calibration, Point, calibrate, load_calibration
from penstock.costs.memory import (
    MemoryBreakdown,
    OpBytes,
    Timeline,
    activation_timeline,
    bytes_per_parameter,
    rank_parameters,
    stage_memory,
    state_bytes,
)
from penstock.costs.roofline import Roofline
from penstock.costs.source import CostSource
from penstock.costs.table import CostTable

__all__ = [
    "Calibration",
    "CostSource",
    "CostTable",
    "Group",
    "MemoryBreakdown",
    "OpBytes",
    "Point",
    "Roofline",
    "Timeline",
    "activation_timeline",
    "bytes_per_parameter",
    "calibrate",
    "collective_s",
    "group_of",
    "load_calibration",
    "point_to_point_s",
    "rank_parameters",
    "stage_memory",
    "state_bytes",
    "sync_gradients_s",
    "transfer_s",
]
