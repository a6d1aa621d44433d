"""Adaptive cyclic schedule: micro-batches are injected one per cycle as long as memory allows, so that spare ones hide unequal costs.

In every cycle a device takes from each of its stages the first micro-batch that waits for a forward and for a backward pass, and
runs these in turn, a backward pass first. What it makes can be taken in the next cycle.

    3 stages, 5 micro-batches; a stage holds up to 2 · (stages left) - 1
    0: F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
    1: F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    2: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

The order does not depend on times, only on the order of injection and on bytes; each action then runs as soon as it can.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from penstock.ordering.greedy import checked_order, does_not_fit
from penstock.schedules.actions import BACKWARD, FORWARD, Action, Schedule
from penstock.timing.workload import Workload

__all__ = ["adaptive"]


def adaptive(workload: Workload, order: Sequence[int] = ()) -> Schedule:
    """The schedule with micro-batches injected in `order`; no device goes above its limit.

    Raises `InfeasibleError` if not even one micro-batch at a time fits.
    """
    injection = checked_order(order, workload.num_micro_batches).tolist()
    for reserve in (False, True):
        devices = [_Device(workload, device, reserve) for device in range(workload.num_devices)]
        if _run_cycles(devices, workload, injection):
            return tuple(tuple(device.actions) for device in devices)
    raise does_not_fit(workload)


def _run_cycles(devices: Sequence[_Device], workload: Workload, injection: Sequence[int]) -> bool:
    """Whether all actions could be placed."""
    last = workload.num_stages - 1
    home = [devices[device] for device in workload.devices]
    for rank, m in enumerate(injection):
        home[0].waiting[FORWARD, 0].append((rank, m))
    left = 2 * workload.num_stages * workload.num_micro_batches
    while left:
        made = [made for device in devices for made in device.cycle()]
        if not made:
            return False
        left -= len(made)
        for rank, (stage, kind, m) in made:
            if kind == FORWARD and stage < last:
                home[stage + 1].waiting[FORWARD, stage + 1].append((rank, m))
            elif kind == FORWARD:
                home[stage].waiting[BACKWARD, stage].append((rank, m))
            elif stage > 0:
                home[stage - 1].waiting[BACKWARD, stage - 1].append((rank, m))
    return True


class _Device:
    """The queues, the memory and the actions so far of one device; queues hold (rank in the order of injection, micro-batch)."""

    def __init__(self, workload: Workload, device: int, reserve: bool) -> None:
        self.stages, self.actions = workload.stages_of(device), list[Action]()
        self.waiting = {(kind, stage): deque[tuple[int, int]]() for kind in (FORWARD, BACKWARD) for stage in self.stages}
        self._work, self._limit, self._reserve = workload, float(workload.limit_bytes[device]) * (1 + 1e-9), reserve
        self._level = float(workload.base_bytes[device])
        self._held: dict[tuple[int, int], float] = {}
        """The most workspace that a later pass of each (stage, micro-batch) on the device will take."""

    def cycle(self) -> list[tuple[int, Action]]:
        """Runs what waits at the head of each queue, with its rank in the order of injection."""
        heads = {
            kind: sorted((self.waiting[kind, stage][0][0], stage) for stage in self.stages if self.waiting[kind, stage])
            for kind in (BACKWARD, FORWARD)
        }
        made = []
        for kind, stage in _alternating(heads[BACKWARD], heads[FORWARD]):
            rank, m = self.waiting[kind, stage][0]
            if kind == FORWARD and not self._take(stage, m):
                continue
            if kind == BACKWARD:
                self._give_back(stage, m)
            self.waiting[kind, stage].popleft()
            self.actions.append(Action(stage, kind, m))
            made.append((rank, self.actions[-1]))
        return made

    def _take(self, stage: int, m: int) -> bool:
        """Holds the micro-batch if the device has room for it, also while it runs any later pass of what it then holds.

        With `reserve` room is taken for all stages of the device when the first one runs.
        """
        if self._reserve and stage != self.stages[0]:
            return True
        stages = self.stages if self._reserve else [stage]
        workspace = self._work.workspace_bytes[:2, :, m]
        needed = float(sum(self._work.stored_bytes[own, m] for own in stages))
        extra = max(float(workspace[:, stages].max()), *self._held.values(), 0.0)
        if self._level + needed + extra > self._limit:
            return False
        self._level += needed
        self._held |= {(own, m): float(workspace[FORWARD if self._reserve else BACKWARD :, own].max()) for own in stages}
        return True

    def _give_back(self, stage: int, m: int) -> None:
        self._level -= float(self._work.stored_bytes[stage, m])
        del self._held[stage, m]


def _alternating(backward: Sequence[tuple[int, int]], forward: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(kind, stage) of a backward pass, a forward pass, and so on while there are both."""
    pairs = zip_longest(((BACKWARD, stage) for _, stage in backward), ((FORWARD, stage) for _, stage in forward))
    return (each for each in chain.from_iterable(pairs) if each is not None)
