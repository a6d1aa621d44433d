"""From plan, micro-batches and schedules to the programs of all ranks.

All ranks derive the order of their transfers from one timeline (`timeline.LoweringTimeline`), on which a transfer has one moment: when its
sender is done and its receiver has a buffer for it. At both ends it is begun between the actions around that moment, or earlier:

    sender      │ F0 │ F1 ├─ SendStart 1 ──│ F2 │─ SendWait 1, Free ─      waited for when its buffer is needed again
    moment                ●
    receiver    │ F0      ├──│ B0 │──│ F1      │
                 └ ReceiveStart 1    └ ReceiveWait 1                       begun when its sender begins, if a buffer is free

Every wait then stands after the moment of what it waits for, on every rank, and the transfers of a pair of ranks are begun in the order
of their moments at both ends. So nothing can wait in a circle, whether sends complete at once or only with their receive.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import InputError, plural
from penstock.models.ops import Model
from penstock.plans.plan import Plan
from penstock.programs import instructions as i
from penstock.programs.durations import durations_of, stage_weights
from penstock.programs.routing import Cut, Message, Side, TensorLayout, carried, cut_of, entry_side, exit_side, needs_of
from penstock.programs.sharing import reduce_groups, sync_tied
from penstock.programs.timeline import LoweringTimeline
from penstock.programs.work import ReplicaWork, dp_degrees
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from penstock.schedules.rules import SCHEDULES

__all__ = ["lower"]

_Key = tuple[i.Transferred, int, int]
"""What, cut, micro-batch."""


def lower(
    plan: Plan, model: Model, work: Sequence[ReplicaWork], iteration: int = 0, *, training: bool = True, depth: int = 2
) -> tuple[i.Program, ...]:
    """The programs of one iteration, or of those that the work has, from this one on; in the order of ranks, for a valid plan.

    `depth` is how many buffers a stage has for each kind of transfer (activations in, out, gradients in, out): with more, transfers
    begin earlier and are waited for later; with 1 memory is least. `training` False makes programs of forward passes alone.
    """
    if len(work) != plan.num_replicas:
        raise InputError(f"lower: work for {plural(len(work), 'replica')} was given, the plan has {plan.num_replicas}.")
    if depth < 1:
        raise InputError(f"lower: depth is {depth}, at least one buffer is needed.")
    common = _Common(plan, model, training, depth)
    totals = _totals(work)
    programs = [program for replica, own in enumerate(work) for program in _Replica(common, replica, own).programs(iteration, *totals)]
    return tuple(sorted(programs, key=lambda program: program.rank))


def _totals(work: Sequence[ReplicaWork]) -> tuple[int, int]:
    """(positions that count in the loss, samples) of the global batch."""
    micro_batches = [micro for own in work for micro in own.micro_batches]
    tokens, samples = sum(micro.loss_tokens() for micro in micro_batches), sum(len(micro.samples) for micro in micro_batches)
    if not tokens or not samples:
        raise InputError(
            f"lower: the global batch has {plural(samples, 'sample')} with {plural(tokens, 'position')} that count in the loss; none to "
            "train on."
        )
    return tokens, samples


class _Common:
    """Facts that all replicas share: cuts, sides, what each stage reads."""

    def __init__(self, plan: Plan, model: Model, training: bool, depth: int) -> None:
        self.plan, self.model, self.training, self.depth = plan, model, training, depth
        stages = plan.stages
        self.entries, self.exits = [entry_side(stage) for stage in stages], [exit_side(stage) for stage in stages]
        self.cuts = [None if a.devices == b.devices else cut_of(model, a, b) for a, b in pairwise(stages)]
        self.carries = [carried(model, stage.first) for stage in stages[1:]]
        self.gradients = [tuple(tensor for tensor in carry if tensor.differentiable) for carry in self.carries]
        for index, cut in enumerate(self.cuts):
            if cut is None and self.exits[index] != self.entries[index + 1]:
                raise InputError(f"stages {index} and {index + 1} are on the same devices, but hand the carry over with other degrees.")
        self.needs = [needs_of(model, stage.first, stage.last) for stage in stages]
        self.tied = sync_tied(model, plan) if training else {}
        self.weights = stage_weights(model, plan)
        self.asynchronous = SCHEDULES[plan.schedule].asynchronous


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The messages of one micro-batch over one cut in one direction."""

    moment: float
    """When all that it needs is there."""
    early: float
    """When a receiver may begin."""
    what: i.Transferred
    cut: int
    micro_batch: int
    sender: int
    """Stage."""
    receiver: int
    """Stage."""
    needed: int
    """The action of the sender's device before which its buffer should be free again."""
    messages: tuple[Message, ...]


class _Replica:
    """Lowers one replica."""

    def __init__(self, common: _Common, replica: int, work: ReplicaWork) -> None:
        self.common, self.replica, self.work = common, replica, work
        plan = common.plan
        durations_s = work.durations_s if work.durations_s is not None else durations_of(common.weights, work.micro_batches)
        self.timeline = LoweringTimeline(work.schedule, durations_s)
        self.groups = [stage.devices[replica] for stage in plan.stages]
        self._check()
        self._layouts: dict[tuple[Side, int], TensorLayout] = {}
        self.ranks: dict[int, _Rank] = {}
        for stage, ranks in enumerate(self.groups):
            for index, rank in enumerate(ranks):
                device = self.timeline.device.get(stage)
                if rank not in self.ranks:
                    self.ranks[rank] = _Rank(self, rank, device)
                elif self.ranks[rank].device != device:
                    raise InputError(f"lower: rank {rank} has stages that the schedule runs on different devices.")
                self.ranks[rank].indices[stage] = index

    def _check(self) -> None:
        """Every stage passes every micro-batch once, and all shares are known."""
        stages, micro_batches = self.common.plan.num_stages, self.work.micro_batches
        where = f"lower: replica {self.replica}"
        if [micro.index for micro in micro_batches] != list(range(len(micro_batches))):
            raise InputError(f"{where} has micro-batches numbered {[micro.index for micro in micro_batches]}; number them from 0.")
        passes = len(micro_batches) * stages
        forward = sum(action.kind == FORWARD for action in self.timeline.position)
        weights = sum(action.kind == WEIGHT_GRAD for action in self.timeline.position)
        halves = sum(action.kind == INPUT_GRAD for action in self.timeline.position)
        backward = len(self.timeline.backward)
        wanted = passes if self.common.training else 0
        if (forward, backward, weights) != (passes, wanted, halves):
            raise InputError(
                f"{where}: the schedule has {forward} forward and {backward} backward passes ({halves} split, {weights} second halves); "
                f"{plural(len(micro_batches), 'micro-batch')} on {plural(stages, 'stage')} need {passes} and {wanted}."
            )
        mixed = {run.dp for stage in self.common.plan.stages for run in stage.runs}
        mixed |= {stage.degrees.dp for stage in self.common.plan.stages if stage.runs}
        for micro in micro_batches:
            for dp in dp_degrees(self.common.plan):
                if dp not in micro.bounds:
                    raise InputError(f"{where}: micro-batch {micro.index} has no bounds for dp {dp}.")
                if dp in mixed and any(first == last for first, last in (micro.share(dp, index) for index in range(dp))):
                    raise InputError(
                        f"{where}: micro-batch {micro.index} ({plural(len(micro.samples), 'sample')}) leaves a rank of dp {dp} without "
                        "any, in a stage whose ops have different degrees. Give each rank a sample, or the stage one dp."
                    )

    def programs(self, iteration: int, loss_tokens: int, num_samples: int) -> list[i.Program]:
        """The program of each rank."""
        last: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in self._transfers():
            self._begin(transfer, last)
        plan = self.common.plan
        return [
            i.Program(
                rank, iteration, self.replica, plan.num_replicas, plan.num_stages, loss_tokens, num_samples, own.places(),
                self.work.micro_batches, tuple(own.emit()), self.common.training, self.work.ends,
            )
            for rank, own in self.ranks.items()
        ]  # fmt: skip

    def _transfers(self) -> list[_Transfer]:
        """All transfers in the order of their moments."""
        found = []
        for index, cut in enumerate(self.common.cuts):
            if cut is None or not self.work.micro_batches:
                continue
            found += self._transfers_over(index, cut, False)
            if self.common.training:
                found += self._transfers_over(index, cut, True)
        return sorted(found, key=lambda transfer: (transfer.moment, transfer.what, transfer.cut, transfer.micro_batch))

    def _transfers_over(self, index: int, cut: Cut, gradient: bool) -> list[_Transfer]:
        timeline, depth = self.timeline, self.common.depth
        sender, receiver = (index + 1, index) if gradient else (index, index + 1)
        what: i.Transferred = "gradient" if gradient else "activation"
        count = range(len(self.work.micro_batches))
        made = [timeline.backward[sender, m] if gradient else Action(sender, FORWARD, m) for m in count]
        used = [timeline.backward[receiver, m] if gradient else Action(receiver, FORWARD, m) for m in count]
        ends = [timeline.ends[timeline.device[receiver]][timeline.position[action]] for action in used]
        # The receiver has `depth` buffers: a message finds room once the one that came `depth` uses before it has been used.
        in_use = sorted(count, key=ends.__getitem__)
        free = [0.0] * len(count)
        for place, m in enumerate(in_use[depth:]):
            free[m] = ends[in_use[place]]
        positions = [timeline.position[action] for action in made]
        # So has the sender: a send has to be over before the pass that makes the message `depth` further on.
        in_making = sorted(count, key=positions.__getitem__)
        needed = [len(timeline.starts[timeline.device[sender]])] * len(count)
        for place, m in enumerate(in_making[: max(0, len(count) - depth)]):
            needed[m] = positions[in_making[place + depth]]
        return [
            _Transfer(
                max(timeline.end(made[m]), free[m]), max(timeline.start(made[m]), free[m]), what, index, m, sender, receiver, needed[m],
                cut.messages(self.layout(cut.before, m), self.layout(cut.after, m), gradient),
            )
            for m in count
        ]  # fmt: skip

    def layout(self, side: Side, m: int) -> TensorLayout:
        """A micro-batch as the ranks of a side divide it."""
        found = self._layouts.get((side, m))
        if found is None:
            found = self._layouts[side, m] = TensorLayout(side, self.work.micro_batches[m])
        return found

    def tensors(self, stage: int, m: int, index: int, forward: bool) -> tuple[i.Tensor, ...]:
        """The tensors that a pass of a stage hands on: the carry that leaves it, or the gradient of the one that entered."""
        common = self.common
        if forward:
            return self.layout(common.exits[stage], m).tensors(common.carries[stage], index)
        return self.layout(common.entries[stage], m).tensors(common.gradients[stage - 1], index)

    def _begin(self, transfer: _Transfer, last: dict[tuple[int, int], int]) -> None:
        """Puts both ends of each message among the instructions of their ranks."""
        timeline, what, cut, m = self.timeline, transfer.what, transfer.cut, transfer.micro_batch
        sends, receives = timeline.device[transfer.sender], timeline.device[transfer.receiver]
        moment = bisect_right(timeline.ends[sends], transfer.moment)
        done = bisect_left(timeline.starts[sends], transfer.moment)
        early = bisect_right(timeline.ends[receives], transfer.early)
        senders, receivers = self.groups[transfer.sender], self.groups[transfer.receiver]
        wait = max(done, min(transfer.needed, moment + 2 * self.common.depth))
        out: _Key = (what, cut, m)
        for sender, receiver, sent, got in transfer.messages:
            a, b = senders[sender], receivers[receiver]
            # Never before an earlier transfer of the pair: both ends have to begin all of theirs in one order.
            at = last[a, b] = max(last[a, b], moment)
            self.ranks[a].starts[at].append((False, out, b, sent))
            self.ranks[a].sends[out].append(b)
            self.ranks[a].wait_at[out] = max(wait, at, self.ranks[a].wait_at.get(out, 0))
            at = last[b, a] = max(last[b, a], early)
            self.ranks[b].starts[at].append((True, out, a, got))
            self.ranks[b].receives[out].append(a)


class _Rank:
    """One rank: what lies between its actions, and the instructions that come of it."""

    def __init__(self, replica: _Replica, rank: int, device: int | None) -> None:
        self.replica, self.rank, self.device = replica, rank, device
        self.indices: dict[int, int] = {}
        """Position among the ranks of each of its stages."""
        self.starts: dict[int, list[tuple[bool, _Key, int, tuple[i.Part, ...]]]] = defaultdict(list)
        """Before each action: (receives, transfer, peer, parts)."""
        self.sends: dict[_Key, list[int]] = defaultdict(list)
        """The peers of each transfer."""
        self.receives: dict[_Key, list[int]] = defaultdict(list)
        self.wait_at: dict[_Key, int] = {}
        """The action before which the sends of a transfer are waited for."""
        self.steps: list[i.Instruction] = []
        self._free: list[int] = []
        self._used = 0
        self._buffers: dict[tuple[object, ...], int] = {}

    def places(self) -> tuple[i.Place, ...]:
        """The stages of this rank."""
        common, found = self.replica.common, []
        for stage, index in sorted(self.indices.items()):
            own, entry, leaving = common.plan.stages[stage], common.entries[stage], common.exits[stage]
            found.append(i.Place(stage, own.first, own.last, index, entry.tp, entry.dp, leaving.tp, leaving.dp))
        return tuple(found)

    def emit(self) -> list[i.Instruction]:
        """All instructions in order."""
        replica, timeline = self.replica, self.replica.timeline
        actions = () if self.device is None else timeline.schedule[self.device]
        waits: dict[int, list[_Key]] = defaultdict(list)
        for key, position in self.wait_at.items():
            waits[position].append(key)
        live = [self._is_live(action) for action in actions]
        reductions = self._reductions(actions, live)
        update: list[i.StepStage] = []
        for position, action in enumerate(actions):
            self._between(position, waits.get(position, ()))
            self.steps += update  # after the gradient is on its way, before the next pass
            update = []
            for ahead in (position, position + 1) if not position else (position + 1,):  # one action ahead, to be there in time
                if ahead < len(actions) and live[ahead] and actions[ahead].kind == FORWARD:
                    self._load(actions[ahead])
            self.steps += reductions.get(position, ())
            if live[position]:
                self._run(action)
            if replica.common.asynchronous and action.kind == BACKWARD:  # with samples or not: those with the same weights wait for it
                groups = reduce_groups(replica.common.plan.stages[action.stage], self.indices[action.stage])
                update = [i.StepStage(action.stage, action.micro_batch, groups)]
        self._between(len(actions), waits.get(len(actions), ()), last=True)
        self.steps += update
        self.steps += reductions.get(len(actions), ())
        self.steps += [i.ReduceWait(step.stage) for step in self.steps if isinstance(step, i.ReduceStart)]
        self.steps += replica.common.tied.get(self.rank, ())
        if replica.common.training:
            self.steps.append(i.Step())
        return self.steps

    def _is_live(self, action: Action) -> bool:
        """Whether this rank has samples of the action's micro-batch."""
        common = self.replica.common
        entry, leaving = common.entries[action.stage], common.exits[action.stage]
        if entry.dp == leaving.dp == 1 or common.plan.stages[action.stage].runs:
            return True
        first, last = self.replica.work.micro_batches[action.micro_batch].share(entry.dp, self.indices[action.stage] // entry.tp)
        return first < last

    def _reductions(self, actions: Sequence[Action], live: Sequence[bool]) -> dict[int, list[i.ReduceStart]]:
        """Before which action each stage begins to reduce: its last one, but stages in falling order, the same on every rank."""
        if not self.replica.common.training or self.replica.common.asynchronous:
            return {}
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            if live[position] and action.kind in (BACKWARD, WEIGHT_GRAD):
                last[action.stage] = position
        found: dict[int, list[i.ReduceStart]] = defaultdict(list)
        reached = 0
        for stage in sorted(self.indices, reverse=True):
            groups = reduce_groups(self.replica.common.plan.stages[stage], self.indices[stage])
            if not groups:
                continue
            own = last.get(stage, -1)
            during = actions[own].micro_batch if own >= reached else None
            reached = max(reached, own)
            found[reached].append(i.ReduceStart(stage, groups, during))
        return found

    def _between(self, position: int, waits: Sequence[_Key], last: bool = False) -> None:
        """The instructions before an action: sends to wait for that were begun before, transfers to begin, other sends to wait for."""
        begun = {key for receives, key, _, _ in self.starts.get(position, ()) if not receives}
        later = waits if last else [key for key in waits if key in begun]
        for key in waits:
            if key not in later:
                self._wait_sent(key)
        for receives, key, peer, parts in self.starts.get(position, ()):
            if receives:
                buffer = self._buffers.get(("in", *key))
                self.steps.append(i.ReceiveStart(*key, peer, self._take(("in", *key)) if buffer is None else buffer, parts))
            else:
                self.steps.append(i.SendStart(*key, peer, self._buffers["out", *key], parts))
        for key in later:
            self._wait_sent(key)

    def _wait_sent(self, key: _Key) -> None:
        self.steps += [i.SendWait(*key, peer) for peer in self.sends[key]]
        self._empty(self._buffers.pop(("out", *key)))

    def _load(self, action: Action) -> None:
        stage, _, m = action
        self.steps.append(i.Load(stage, m, self._take(("batch", stage, m)), self.replica.common.needs[stage]))

    def _run(self, action: Action) -> None:
        stage, kind, m = action
        if kind == WEIGHT_GRAD:
            self.steps.append(i.BackwardWeight(stage, m))
            return
        cuts = self.replica.common.cuts
        forward = kind == FORWARD
        entering, leaving = (stage - 1, stage) if forward else (stage, stage - 1)
        what: i.Transferred = "activation" if forward else "gradient"
        inside, outside = (what, entering, m), (what, leaving, m)
        self.steps += [i.ReceiveWait(*inside, peer) for peer in self.receives.get(inside, ())]
        source, result = self._buffers.pop(("in", *inside), None), None
        tensors: tuple[i.Tensor, ...] = ()
        handed_over = 0 <= leaving < len(cuts) and cuts[leaving] is None
        if 0 <= leaving < len(cuts):
            result = self._take(("in" if handed_over else "out", *outside))
            tensors = self.replica.tensors(stage, m, self.indices[stage], forward)
        if forward:
            batch = self._buffers.pop(("batch", stage, m))
            self.steps.append(i.Forward(stage, m, self.replica.work.pattern(m, stage), batch, source, result, tensors))
            self._empty(batch, source)
        else:
            self.steps.append((i.Backward if kind == BACKWARD else i.BackwardInput)(stage, m, source, result, tensors))
            self._empty(source)
        if result is not None and not handed_over and outside not in self.sends:  # no rank takes this lane's copy
            self._empty(self._buffers.pop(("out", *outside)))

    def _take(self, name: tuple[object, ...]) -> int:
        """The lowest free buffer, kept under a name."""
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number, self._used = self._used, self._used + 1
        self._buffers[name] = number
        return number

    def _empty(self, *buffers: int | None) -> None:
        """Frees those that are given."""
        numbers = tuple(buffer for buffer in buffers if buffer is not None)
        if numbers:
            self.steps.append(i.Free(numbers))
        for number in numbers:
            heapq.heappush(self._free, number)
