"""How long the programs of one replica take by a virtual clock; transfers wait for both ends, and a pair of ranks has one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.programs import instructions as i
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD

KINDS = {i.Forward: FORWARD, i.Backward: BACKWARD, i.BackwardInput: INPUT_GRAD, i.BackwardWeight: WEIGHT_GRAD}


def makespan_s(programs: Sequence[i.Program], durations_s: Any, transfer_s: float) -> float:
    """`durations_s` is [kind][stage][micro-batch]; every transfer takes `transfer_s`."""
    world = _World(programs, durations_s, transfer_s)
    alive = {program.rank: world.rank(program) for program in programs}
    while alive:
        before = dict(world.moved)
        for rank in list(alive):
            if next(alive[rank], "done") == "done":
                del alive[rank]
        assert alive == {} or before != world.moved, "ranks wait for each other"
    return max(world.now.values())


class _World:
    def __init__(self, programs: Sequence[i.Program], durations_s: Any, transfer_s: float) -> None:
        self.durations_s, self.transfer_s = durations_s, transfer_s
        self.now = {program.rank: 0.0 for program in programs}
        self.moved = {program.rank: 0 for program in programs}
        self.begun: dict[tuple[int, int], list[tuple[Any, float]]] = defaultdict(list)
        self.ended: dict[Any, float] = {}
        self.free: dict[tuple[int, int], float] = defaultdict(float)

    def rank(self, program: i.Program) -> Iterator[None]:
        """Runs one rank until it has to wait for another; time stands still meanwhile."""
        rank = program.rank
        for step in program.instructions:
            if type(step) in KINDS:
                self.now[rank] += self.durations_s[KINDS[type(step)]][step.stage][step.micro_batch]  # type: ignore[union-attr]
            elif isinstance(step, i.SendStart | i.ReceiveStart):
                self.begin(rank, step)
            elif isinstance(step, i.SendWait | i.ReceiveWait):
                key = self.key(rank, step, isinstance(step, i.SendWait))
                while key not in self.ended:
                    yield
                self.now[rank] = max(self.now[rank], self.ended[key])
            self.moved[rank] += 1

    def begin(self, rank: int, step: i.SendStart | i.ReceiveStart) -> None:
        own, its = self.begun[rank, step.peer], self.begun[step.peer, rank]
        own.append((self.key(rank, step, isinstance(step, i.SendStart)), self.now[rank]))
        pair = (min(rank, step.peer), max(rank, step.peer))
        while own and its:
            (key, here), (other, there) = own.pop(0), its.pop(0)
            assert key == other
            self.free[pair] = self.ended[key] = max(here, there, self.free[pair]) + self.transfer_s

    @staticmethod
    def key(rank: int, step: Any, sends: bool) -> tuple[Any, ...]:
        return (*((rank, step.peer) if sends else (step.peer, rank)), step.what, step.cut, step.micro_batch)
