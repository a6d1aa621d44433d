"""Workloads: however their numbers come, kernels see arrays of one type."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ordering.annealing import refine
from penstock.ordering.annealing_kernels import anneal
from penstock.ordering.greedy import greedy
from penstock.ordering.greedy_kernels import list_schedule
from penstock.schedules.orders import one_forward_one_backward
from penstock.timing.clock import peak_of_order, run_orders
from penstock.timing.event_clock import run_events
from penstock.timing.execution import execute
from penstock.timing.order_memory import order_peak_bytes
from penstock.timing.simulator import simulate
from penstock.timing.workload import Workload, links_of, workload_of

KERNELS = anneal, list_schedule, peak_of_order, run_events, run_orders


def use(work: Workload) -> None:
    """Calls each kernel that a workload is given to."""
    order = one_forward_one_backward(2, 3)
    simulate(order, work.durations_s, work.transfers_s)
    execute(order, work)
    order_peak_bytes(order, work)
    refine(order, work, num_steps=2)
    greedy(work)


def test_numbers_that_come_as_whole_arrays_as_parts_or_alone_compile_nothing_more() -> None:
    """What `python -m penstock.kernels` has compiled serves every command: nobody waits for the compiler while a plan is searched."""
    use(workload_of(np.ones((2, 2, 3))))
    before = [len(kernel.signatures) for kernel in KERNELS]
    whole = np.ones((4, 2, 3))
    others = {
        "transfers_s": np.ones((2, 1, 3)), "after_s": np.ones(2), "stored_bytes": np.ones((2, 3)), "waiting_bytes": np.zeros((2, 3)),
        "workspace_bytes": whole, "message_bytes": np.ones((2, 1, 3)), "base_bytes": np.ones(2), "limit_bytes": np.full(2, 1e9),
    }  # fmt: skip
    use(workload_of(whole, **others))
    for name, values in others.items():
        use(workload_of(whole.tolist(), **{name: values}))
        use(workload_of(np.asfortranarray(whole), **{name: values[..., :1]} if values.ndim > 1 else {}))
    simulate(one_forward_one_backward(2, 3), np.ones((2, 2, 3)), np.zeros((2, 1, 3)))
    assert [len(kernel.signatures) for kernel in KERNELS] == before


def test_a_workload_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        workload_of(np.ones((2, 2, 3))).durations_s[0] = 2.0


def test_transfers_take_turns_on_what_they_share() -> None:
    """A pair of devices in one direction, or all that a device sends; inside of one device there is nothing to wait for."""
    assert links_of([0, 1, 2], "none").tolist() == [[-1, -1], [-1, -1]]
    assert links_of([0, 1, 2], "pair").tolist() == [[0, 2], [1, 3]]
    assert links_of([0, 1, 2], "device").tolist() == [[0, 1], [1, 2]]
    assert links_of([0, 1, 1, 0], "pair").tolist() == [[0, -1, 1], [1, -1, 0]]
