"""Rules that need the plan and the model: every tensor as the model has it, every part where it belongs, every weight kept equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.plans.ranks import seats_of
from penstock.programs import instructions as i
from penstock.programs.exchange import Transfer, matched
from penstock.programs.problems import Problem
from penstock.programs.routing import Carried, Interval, Side, TensorLayout, carried, entry_side, exit_side, needs_of, shard
from penstock.programs.sharing import reduce_groups, sync_tied
from penstock.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["content_problems"]


def content_problems(programs: Sequence[i.Program], plan: Plan, model: Model) -> Iterator[Problem]:
    """Everything in which the programs contradict the plan or the model."""
    placed = list(_place_problems(programs, plan))
    yield from placed
    if not placed:
        yield from _Content(programs, plan, model).problems()


def _place_problems(programs: Sequence[i.Program], plan: Plan) -> Iterator[Problem]:
    """Every rank has the stages that the plan gives it."""
    sides = [(entry_side(stage), exit_side(stage)) for stage in plan.stages]
    wanted: dict[int, list[tuple[int, i.Place]]] = defaultdict(list)
    for rank, seats in seats_of(plan).items():
        for seat in seats:
            stage, (entry, leaving) = plan.stages[seat.stage], sides[seat.stage]
            place = i.Place(seat.stage, stage.first, stage.last, seat.index, entry.tp, entry.dp, leaving.tp, leaving.dp)
            wanted[rank].append((seat.replica, place))
    have = {program.rank: [(program.replica, place) for place in program.places] for program in programs}
    for rank in sorted(wanted.keys() | have.keys()):
        if wanted.get(rank, []) != have.get(rank, []):
            shown = [place.stage for _, place in wanted.get(rank, [])]
            yield Problem(rank, -1, f"the plan gives it stages {shown}; its program has other stages, ops, degrees or another replica")


class _Content:
    """The programs of one iteration beside what the plan and the model say should be in them."""

    def __init__(self, programs: Sequence[i.Program], plan: Plan, model: Model) -> None:
        self.programs, self.plan, self.model = programs, plan, model
        self.by_rank = {program.rank: program for program in programs}
        self.entries, self.exits = [entry_side(stage) for stage in plan.stages], [exit_side(stage) for stage in plan.stages]
        self.carries = [{tensor.name: tensor for tensor in carried(model, stage.first)} for stage in plan.stages]
        """What enters each stage."""
        self.needs = [needs_of(model, stage.first, stage.last) for stage in plan.stages]
        self.layouts: dict[tuple[int, int, Side], TensorLayout] = {}

    def layout(self, replica: int, m: int, side: Side) -> TensorLayout:
        key = (replica, m, side)
        if key not in self.layouts:
            table = next(program for program in self.programs if program.replica == replica).micro_batches
            self.layouts[key] = TensorLayout(side, table[m])
        return self.layouts[key]

    def problems(self) -> Iterator[Problem]:
        for program in self.programs:
            yield from self._step_problems(program)
            yield from self._update_problems(program)
        received: dict[tuple[int, int, int, str], list[Transfer]] = defaultdict(list)
        for transfer in matched(self.programs):
            yield from self._transfer_problems(transfer)
            step = transfer.receive
            received[transfer.receiver, step.cut, step.micro_batch, step.what].append(transfer)
        for (rank, cut, _, what), transfers in received.items():
            yield from self._complete(rank, cut, what == "gradient", transfers)
        yield from self._sum_problems(received)
        yield from self._weight_problems()

    def _step_problems(self, program: i.Program) -> Iterator[Problem]:
        """Results, loads and patterns are those of the stage."""
        for at, step in enumerate(program.instructions):
            if isinstance(step, i.Forward):
                patterns = max(1, len(self.plan.stages[step.stage].recompute))
                if step.pattern >= patterns:
                    yield Problem(program.rank, at, f"stage {step.stage} has {patterns} recomputation patterns, not number {step.pattern}")
                carry = self.carries[step.stage + 1] if step.stage + 1 < len(self.carries) else {}
                yield from self._result_problems(program, at, step, self.exits[step.stage], list(carry.values()))
            elif isinstance(step, i.Backward | i.BackwardInput):
                carry = self.carries[step.stage] if step.stage else {}
                gradients = [tensor for tensor in carry.values() if tensor.differentiable]
                yield from self._result_problems(program, at, step, self.entries[step.stage], gradients)
            elif isinstance(step, i.Load):
                stage = self.plan.stages[step.stage]
                if set(step.needs) != set(needs_of(self.model, stage.first, stage.last)):
                    yield Problem(
                        program.rank, at, f"stage {step.stage} needs {needs_of(self.model, stage.first, stage.last)}, not {step.needs}"
                    )

    def _update_problems(self, program: i.Program) -> Iterator[Problem]:
        """Stages update by themselves under an asynchronous schedule, and under no other."""
        asynchronous = SCHEDULES[self.plan.schedule].asynchronous and program.training
        at = next((at for at, step in enumerate(program.instructions) if isinstance(step, i.StepStage)), -1)
        if (at >= 0) != (asynchronous and bool(program.micro_batches)):
            does = "updates stages by themselves" if at >= 0 else "does not update stages by themselves"
            yield Problem(program.rank, at, f"{does}, but the schedule is '{self.plan.schedule}'")
        if program.ends and not asynchronous:
            text = f"has {program.num_batches} global batches without an update between them, but the schedule is '{self.plan.schedule}'"
            yield Problem(program.rank, -1, text)

    def _result_problems(
        self, program: i.Program, at: int, step: i.Forward | i.Backward | i.BackwardInput, side: Side, carry: Sequence[Carried]
    ) -> Iterator[Problem]:
        layout = self.layout(program.replica, step.micro_batch, side)
        wanted = layout.tensors(carry, program.place(step.stage).index)
        if set(step.tensors) != set(wanted):
            yield Problem(program.rank, at, f"stage {step.stage} hands on {_shown(step.tensors)}, the model {_shown(wanted)}")

    def _transfer_problems(self, transfer: Transfer) -> Iterator[Problem]:
        """Checks that what leaves one tensor enters the other: the same rows and columns of the whole."""
        send, cut, m = transfer.send, transfer.send.cut, transfer.send.micro_batch
        gradient = send.what == "gradient"
        sides = (self.entries[cut + 1], self.exits[cut]) if gradient else (self.exits[cut], self.entries[cut + 1])
        stages = (cut + 1, cut) if gradient else (cut, cut + 1)
        ends = []
        for rank, stage, side in zip((transfer.sender, transfer.receiver), stages, sides, strict=True):
            program = self.by_rank[rank]
            ends.append((self.layout(program.replica, m, side), program.place(stage).index))
        for part, other in zip(send.parts, transfer.receive.parts, strict=False):
            tensor = self.carries[cut + 1].get(part.name)
            if tensor is None or (gradient and not tensor.differentiable):
                yield Problem(transfer.sender, transfer.send_at, f"'{part.name}' does not cross cut {cut} as {send.what}")
                continue
            regions = []
            for (layout, index), own in zip(ends, (part, other), strict=True):
                shape = layout.shape(tensor, *divmod(index, layout.side.tp))
                if (own.dtype, own.shape) != (tensor.dtype, shape):
                    rank, at = (transfer.sender, transfer.send_at) if own is part else (transfer.receiver, transfer.receive_at)
                    yield Problem(rank, at, f"'{part.name}' is {own.dtype} {own.shape}, in the model {tensor.dtype} {shape}")
                regions.append(_region(tensor, layout, index, own))
            if regions[0] != regions[1]:
                text = f"rows and columns {regions[0]} of '{part.name}' are sent, {regions[1]} are expected"
                yield Problem(transfer.receiver, transfer.receive_at, text)

    def _complete(self, rank: int, cut: int, gradient: bool, transfers: Sequence[Transfer]) -> Iterator[Problem]:
        """All tensors arrive; those without rows may have no gradient here."""
        tensors = self.carries[cut + 1].values()
        wanted = {tensor.name for tensor in tensors if not gradient or (tensor.differentiable and tensor.feature)}
        missing = wanted - {part.name for transfer in transfers for part in transfer.receive.parts}
        if missing:
            yield Problem(rank, transfers[0].receive_at, f"receives nothing of {sorted(missing)}")

    def _sum_problems(self, received: dict[tuple[int, int, int, str], list[Transfer]]) -> Iterator[Problem]:
        """The gradient of a tensor without rows is a sum over shares: each sending share's goes to one receiving share, whole."""
        for cut, after in enumerate(self.plan.stages[1:]):
            tables = [tensor for tensor in self.carries[cut + 1].values() if not tensor.feature and tensor.differentiable]
            if not tables or after.devices == self.plan.stages[cut].devices:
                continue
            for replica, ranks in enumerate(self.plan.stages[cut].devices):
                program = self.by_rank[ranks[0]]
                if not program.training:
                    continue
                for micro in program.micro_batches:
                    live = set(self.layout(replica, micro.index, self.entries[cut + 1]).live)
                    for tensor in tables:
                        yield from self._share_problems(cut, micro.index, tensor, ranks, live, received)

    def _share_problems(
        self, cut: int, m: int, tensor: Carried, ranks: Sequence[int], live: set[int],
        received: dict[tuple[int, int, int, str], list[Transfer]],
    ) -> Iterator[Problem]:  # fmt: skip
        tp = self.exits[cut].tp
        for place in range(tp):
            shares: list[int] = []
            for rank in ranks[place::tp]:
                for transfer in received.get((rank, cut, m, "gradient"), ()):
                    if any(part.name == tensor.name for part in transfer.receive.parts):
                        shares.append(self.by_rank[transfer.sender].place(cut + 1).entry_share)
            if set(shares) != live or (not tensor.widths and len(shares) != len(live)):
                text = f"the gradients of '{tensor.name}' of micro-batch {m} over cut {cut} come from shares {sorted(shares)}"
                yield Problem(ranks[place], -1, f"{text}, not from each of {sorted(live)} once")

    def _weight_problems(self) -> Iterator[Problem]:
        """Reductions are those of the plan; a weight that several stages share is kept equal on all of them."""
        tied = sync_tied(self.model, self.plan)
        for program in self.programs:
            if program.training:
                yield from self._reduction_problems(program)
                yield from self._tied_problems(program, tied.get(program.rank, []))

    def _reduction_problems(self, program: i.Program) -> Iterator[Problem]:
        """Each stage is reduced once, or, where it updates by itself, with every update."""
        kind: type[i.ReduceStart | i.StepStage] = i.StepStage if SCHEDULES[self.plan.schedule].asynchronous else i.ReduceStart
        starts: dict[int, list[tuple[int, i.ReduceStart | i.StepStage]]] = defaultdict(list)
        for at, step in enumerate(program.instructions):
            if isinstance(step, kind):
                starts[step.stage].append((at, step))
        for place in program.places:
            wanted = _as_sets(reduce_groups(self.plan.stages[place.stage], place.index))
            for at, groups in [(at, step.groups) for at, step in starts[place.stage]] or [(-1, ())]:
                if _as_sets(groups) != wanted:
                    told = [sorted(ranks) for _, _, ranks in wanted]
                    yield Problem(program.rank, at, f"stage {place.stage} must be reduced in groups {told}")

    def _tied_problems(self, program: i.Program, expected: Sequence[i.SyncTied]) -> Iterator[Problem]:
        found = {step.op: (at, step) for at, step in enumerate(program.instructions) if isinstance(step, i.SyncTied)}
        wanted = {step.op: step for step in expected}
        for op in wanted.keys() - found.keys():
            yield Problem(program.rank, -1, f"'{op}' must be kept equal with other stages")
        for op, (at, step) in found.items():
            if op not in wanted:
                yield Problem(program.rank, at, f"'{op}' is not shared with another stage")
            elif set(wanted[op].receives) != set(step.receives):
                yield Problem(program.rank, at, f"'{op}' must receive {wanted[op].receives}")


def _as_sets(groups: Sequence[i.ReduceGroup]) -> set[tuple[int, int, frozenset[int]]]:
    return {(group.first, group.last, frozenset(group.ranks)) for group in groups}


def _shown(tensors: Sequence[i.Tensor]) -> str:
    return ", ".join(f"{tensor.name}:{tensor.dtype}{list(tensor.shape)}" for tensor in tensors) or "nothing"


def _region(tensor: Carried, layout: TensorLayout, index: int, part: i.Part) -> tuple[Interval, tuple[Interval, ...]]:
    """Rows and columns of the whole micro-batch's tensor that a part is."""
    share, place = divmod(index, layout.side.tp)
    first, last = layout.held(tensor, share, place)
    rows = (first, last) if part.rows is None else (first + part.rows[0], first + part.rows[1])
    if rows[0] == rows[1]:
        rows = (0, 0)
    if not tensor.widths:
        return rows, (part.columns or (0, tensor.dims[-1] if tensor.dims else 1),)
    return rows, tuple(_global_columns(tensor.widths, layout.side.tp, place, part.columns))


def _global_columns(widths: Sequence[int], tp: int, place: int, columns: Interval | None) -> Iterator[Interval]:
    """Columns of the whole tensor that a rank's own columns are, each width's by itself."""
    local = start = 0
    for width in widths:
        first, last = shard(width, tp, place)
        size = last - first
        low, high = (0, size) if columns is None else (max(0, columns[0] - local), min(size, columns[1] - local))
        if low < high:
            yield start + first + low, start + first + high
        local += size
        start += width
