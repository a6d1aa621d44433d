"""Rules between ranks: transfers that match at both ends, in the same order; reductions and shared weights that all take part in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from penstock.errors import plural
from penstock.programs import instructions as i
from penstock.programs.problems import Problem

__all__ = ["Transfer", "exchange_problems", "matched"]

_Key = tuple[i.Transferred, int, int, int, int]
"""What, cut, micro-batch, sender, receiver."""


class Transfer(NamedTuple):
    """Both ends of a transfer, each with its position in the program."""

    send: i.SendStart
    send_at: int
    receive: i.ReceiveStart
    receive_at: int
    sender: int
    receiver: int


_Ends = dict[_Key, tuple[list[tuple[int, i.SendStart]], list[tuple[int, i.ReceiveStart]]]]


def _ends(programs: Sequence[i.Program]) -> _Ends:
    """Sends and receives of each transfer, with their positions."""
    found: _Ends = {}
    for program in programs:
        rank = program.rank
        for at, step in enumerate(program.instructions):
            if isinstance(step, i.SendStart):
                found.setdefault((step.what, step.cut, step.micro_batch, rank, step.peer), ([], []))[0].append((at, step))
            elif isinstance(step, i.ReceiveStart):
                found.setdefault((step.what, step.cut, step.micro_batch, step.peer, rank), ([], []))[1].append((at, step))
    return found


def matched(programs: Sequence[i.Program]) -> Iterator[Transfer]:
    """Every send with the receive it belongs to; sends and receives without a partner are left out."""
    for (_, _, _, sender, receiver), (sends, receives) in _ends(programs).items():
        for (send_at, send), (receive_at, receive) in zip(sends, receives, strict=False):
            yield Transfer(send, send_at, receive, receive_at, sender, receiver)


def exchange_problems(programs: Sequence[i.Program], mixed_stages: Collection[int]) -> Iterator[Problem]:
    """Everything in which two ranks contradict each other: transfers, their order, reductions, shared weights.

    The groups that reduce `mixed_stages`, whose ops differ in degrees, are left to the rules that know the plan.
    """
    replicas = {program.rank: program.replica for program in programs}
    for (what, cut, m, sender, receiver), (sends, receives) in _ends(programs).items():
        name = f"{what} over cut {cut} of micro-batch {m} from rank {sender} to rank {receiver}"
        if replicas.get(sender) != replicas.get(receiver):
            at, rank = (sends[0][0], sender) if sends else (receives[0][0], receiver)
            yield Problem(rank, at, f"{name}: they are not ranks of one replica")
        elif len(sends) != len(receives):
            at, rank = (sends[-1][0], sender) if len(sends) > len(receives) else (receives[-1][0], receiver)
            yield Problem(rank, at, f"{name} is sent {plural(len(sends), 'time')} and received {plural(len(receives), 'time')}")
        for (_, send), (at, receive) in zip(sends, receives, strict=False):
            sent = [(part.name, part.dtype, part.sent_shape) for part in send.parts]
            got = [(part.name, part.dtype, part.sent_shape) for part in receive.parts]
            if sent != got:
                yield Problem(receiver, at, f"{name}: {_listed(sent)} is sent, {_listed(got)} is expected")
    yield from _order_problems(programs)
    yield from _reduction_problems(programs, mixed_stages)
    yield from _tied_problems(programs)


def _listed(parts: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name}:{dtype}[{'x'.join(map(str, shape))}]" for name, dtype, shape in parts) or "nothing"


def _order_problems(programs: Sequence[i.Program]) -> Iterator[Problem]:
    """Both ends of a pair begin their transfers in the same order; the first difference is told."""
    begun: dict[tuple[int, int], list[tuple[int, tuple[object, ...]]]] = defaultdict(list)
    for program in programs:
        for at, step in enumerate(program.instructions):
            if isinstance(step, i.SendStart | i.ReceiveStart):
                ends = (program.rank, step.peer) if isinstance(step, i.SendStart) else (step.peer, program.rank)
                begun[program.rank, step.peer].append((at, (step.what, step.cut, step.micro_batch, *ends)))
    for (rank, peer), mine in begun.items():
        if rank > peer:
            continue
        for (at, own), (_, its) in zip(mine, begun.get((peer, rank), ()), strict=False):
            if own != its:
                yield Problem(rank, at, f"rank {rank} begins {_shown(own)} when rank {peer} begins {_shown(its)}")
                break


def _shown(transfer: tuple[object, ...]) -> str:
    what, cut, m, sender, receiver = transfer
    return f"the {what} over cut {cut} of micro-batch {m} from {sender} to {receiver}"


def _reduction_problems(programs: Sequence[i.Program], mixed_stages: Collection[int]) -> Iterator[Problem]:
    """Ranks that hold the same weights all reduce them together."""
    if not programs[0].training:
        return
    holders: dict[int, list[tuple[i.Program, i.Place]]] = defaultdict(list)
    for program in programs:
        for place in program.places:
            holders[place.stage].append((program, place))
    sums = i.ReduceStart | i.StepStage
    starts = {(p.rank, s.stage): (at, s) for p in programs for at, s in enumerate(p.instructions) if isinstance(s, sums)}
    for stage, members in holders.items():
        for program, place in members:
            at, step = starts.get((program.rank, stage), (-1, None))
            for group in step.groups if step else ():
                yield from _group_problems(program.rank, at, stage, group, starts)
            same = {other.rank for other, its in members if its.index % its.entry_tp == place.index % place.entry_tp}
            alike = stage not in mixed_stages and (place.entry_tp, place.entry_dp) == (place.exit_tp, place.exit_dp)
            if alike and (step is None or len(step.groups) <= 1):
                found = set(step.groups[0].ranks) if step and step.groups else {program.rank}
                covers = step is None or not step.groups or (step.groups[0].first, step.groups[0].last) == (place.first, place.last)
                if found != same or not covers:
                    text = f"stage {stage}: ranks {sorted(same)} hold the same weights of ops {place.first}:{place.last}, "
                    yield Problem(program.rank, at, text + (f"but {sorted(found)} reduce them" if step else "but do not reduce them"))
            elif stage not in mixed_stages and step is None and len(members) > place.entry_tp * place.entry_dp:
                yield Problem(program.rank, -1, f"stage {stage} is on several replicas, but its gradients are not reduced")


def _group_problems(
    rank: int, at: int, stage: int, group: i.ReduceGroup, starts: dict[tuple[int, int], tuple[int, i.ReduceStart | i.StepStage]]
) -> Iterator[Problem]:
    if rank not in group.ranks or len(set(group.ranks)) < len(group.ranks):
        yield Problem(rank, at, f"a group of ranks {list(group.ranks)} must have rank {rank}, and each rank once")
    for other in group.ranks:
        if other != rank and ((other, stage) not in starts or group not in starts[other, stage][1].groups):
            yield Problem(rank, at, f"reduces ops {group.first}:{group.last} of stage {stage} with rank {other}, which does not")


def _tied_problems(programs: Sequence[i.Program]) -> Iterator[Problem]:
    """Checks that what one end of a shared weight sends, the other receives."""
    sent: dict[tuple[str, int, int, int, int], list[int | None]] = defaultdict(list)
    got: dict[tuple[str, int, int, int, int], list[int | None]] = defaultdict(list)
    at: dict[tuple[str, int], int] = {}
    for program in programs:
        for index, step in enumerate(program.instructions):
            if not isinstance(step, i.SyncTied):
                continue
            at[step.op, program.rank] = index
            for end in step.sends:
                sent[step.op, end.own, program.rank, end.stage, end.peer].append(_count(end))
            for end in step.receives:
                got[step.op, end.stage, end.peer, end.own, program.rank].append(_count(end))
    for key in sent.keys() | got.keys():
        if sent.get(key) != got.get(key):
            op, stage, rank, other, peer = key
            where = rank if (op, rank) in at else peer
            text = f"'{op}' from stage {stage} (rank {rank}) to stage {other} (rank {peer}): sent and received rows differ"
            yield Problem(where, at[op, where], text)


def _count(end: i.TiedRows) -> int | None:
    return None if end.rows is None else end.rows[1] - end.rows[0]
