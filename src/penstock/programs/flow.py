"""One rank's program followed step by step: what each buffer holds, what is done, what is under way.

buffer      empty ─ Load ────────────────────────────► batch    ─ Forward ─ Free ─► empty
            empty ─ ReceiveStart … ReceiveWait ──────► received ─ Forward, Backward ─ Free ─► empty
            empty ─ Forward, Backward ───────────────► result   ─ SendStart … SendWait ─ Free ─► empty

stage and micro-batch     nothing ─ Forward ─► forward ─ Backward ─► done
                                               forward ─ BackwardInput ─► half ─ BackwardWeight ─► done
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.programs import instructions as i
from penstock.programs.problems import Problem

__all__ = ["follow"]

_Key = tuple[i.Transferred, int, int]
"""What, cut, micro-batch."""


@dataclass(slots=True)
class _Buffer:
    """The content of a buffer."""

    kind: str
    """`batch`, `received` or `result`."""
    key: tuple[Any, ...]
    """(stage, micro-batch) of a batch, else what, cut and micro-batch."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """dtype and shape of each."""
    pending: set[int] = field(default_factory=set)
    """Peers of transfers that were begun and not waited for."""
    begun: set[int] = field(default_factory=set)
    """Peers of all transfers that were begun."""
    parts: list[tuple[int, i.Part]] = field(default_factory=list)
    """What was received, and from whom."""


def follow(program: i.Program) -> list[Problem]:
    """Follows one rank's program instruction by instruction; everything that is wrong in it by itself."""
    return _Flow(program).run()


class _Flow:
    """A program as far as it was followed. A method for each kind of instruction says what is wrong with it, and notes what it did."""

    def __init__(self, program: i.Program) -> None:
        self.program = program
        self.places = {place.stage: place for place in program.places}
        self.last_stage = program.num_stages - 1
        self.problems: list[Problem] = []
        self.at = -1
        self.buffers: dict[int, _Buffer] = {}
        self.where: dict[tuple[bool, _Key], int] = {}
        """The buffer of each transfer that was begun: (receives, key)."""
        self.waited: set[tuple[bool, _Key, int]] = set()
        self.state: dict[tuple[int, int], str] = {}
        """What is done of each stage and micro-batch."""
        self.entered: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...]]]] = {}
        self.left: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...]]]] = {}
        self.reducing: dict[int, int | None] = {}
        self.reduced: set[int] = set()
        self.tied: set[str] = set()
        self.stepped = False
        self.updated: set[tuple[int, int]] = set()
        """Stage and micro-batch of each update by itself."""
        count = len(program.micro_batches)
        self.owed = {
            (place.stage, m)
            for place in program.places
            for m in range(count)
            if self._has_samples(program.micro_batches[m], place)
        }  # fmt: skip

    @staticmethod
    def _has_samples(micro: i.MicroBatch, place: i.Place) -> bool:
        shares = ((place.entry_dp, place.entry_share), (place.exit_dp, place.exit_share))
        return any(first < last for first, last in (micro.share(*share) for share in shares))

    def run(self) -> list[Problem]:
        handlers: dict[type, Callable[[Any], None]] = {
            i.Load: self.load, i.Forward: self.forward, i.Backward: self.backward, i.BackwardInput: self.backward,
            i.BackwardWeight: self.backward_weight, i.SendStart: self.send_start, i.SendWait: self.wait, i.ReceiveStart: self.receive_start,
            i.ReceiveWait: self.wait, i.Free: self.free, i.ReduceStart: self.reduce_start, i.ReduceWait: self.reduce_wait,
            i.SyncTied: self.sync_tied, i.Step: self.step, i.StepStage: self.step_stage,
        }  # fmt: skip
        for at, step in enumerate(self.program.instructions):
            self.at = at
            if self.stepped:
                self.wrong("comes after the step")
                break
            if not self.program.training and not isinstance(step, _EVALUATION):
                self.wrong("trains, but the program is for evaluation")
            handlers[type(step)](step)
        self.at = -1
        self._finish()
        return self.problems

    def wrong(self, text: str) -> None:
        self.problems.append(Problem(self.program.rank, self.at, text))

    def _finish(self) -> None:
        """Reports what is missing at the end."""
        final = "done" if self.program.training else "forward"
        for stage, m in sorted(self.owed):
            if self.state.get((stage, m)) != final:
                self.wrong(f"stage {stage} does not complete micro-batch {m}: {self.state.get((stage, m), 'nothing')} is done, not {final}")
        for number, buffer in sorted(self.buffers.items()):
            self.wrong(f"buffer {number} ({buffer.kind} {buffer.key}) is never freed")
            for peer in buffer.pending:
                self.wrong(f"the transfer {buffer.key} with rank {peer} is never waited for")
        for stage in sorted(set(self.reducing) - self.reduced):
            self.wrong(f"the reduction of stage {stage} is never waited for")
        if self.program.training and not self.stepped:
            self.wrong("has no step")
        for stage, m in sorted(self.owed - self.updated) if self.updated else ():
            self.wrong(f"stage {stage} updates its weights after each micro-batch, but not after micro-batch {m}")

    # Buffers

    def known(self, stage: int, m: int) -> bool:
        """Whether the rank has the stage and the replica the micro-batch."""
        if stage not in self.places:
            self.wrong(f"stage {stage} is not on this rank, which has {sorted(self.places)}")
        elif m >= len(self.program.micro_batches):
            self.wrong(f"there is no micro-batch {m}, only {len(self.program.micro_batches)}")
        else:
            return True
        return False

    def fill(self, number: int, buffer: _Buffer) -> None:
        if number in self.buffers:
            old = self.buffers[number]
            self.wrong(f"buffer {number} still holds {old.kind} {old.key}")
        self.buffers[number] = buffer

    def holds(self, number: int | None, kind: str, key: tuple[Any, ...]) -> _Buffer | None:
        """The buffer, if it holds what is needed."""
        buffer = None if number is None else self.buffers.get(number)
        if buffer is None:
            self.wrong(
                f"needs {kind} {key}, but buffer {number} is empty" if number is not None else f"needs {kind} {key}, names no buffer"
            )
        elif (buffer.kind, buffer.key) != (kind, key):
            self.wrong(f"needs {kind} {key}, but buffer {number} holds {buffer.kind} {buffer.key}")
        else:
            return buffer
        return None

    def source(self, number: int | None, key: _Key) -> _Buffer | None:
        """The content that was received for a pass, or handed over by a neighbouring stage on this rank, complete."""
        found = None if number is None else self.buffers.get(number)
        if found is not None and found.kind == "result" and found.key == key and self._handed_over(key):
            return found
        buffer = self.holds(number, "received", key)
        if buffer is None:
            return None
        if buffer.pending:
            self.wrong(f"uses buffer {number} before the receive from rank {sorted(buffer.pending)} was waited for")
        for name, (_, shape) in buffer.tensors.items():
            if not _tiles(shape, [part for _, part in buffer.parts if part.name == name and not part.add]):
                self.wrong(f"the parts received of '{name}' do not cover its shape {shape} exactly once")
        return buffer

    def _handed_over(self, key: _Key) -> bool:
        return key[1] in self.places and key[1] + 1 in self.places

    # Instructions

    def load(self, step: i.Load) -> None:
        if not self.known(step.stage, step.micro_batch):
            return
        if self.state.get((step.stage, step.micro_batch)):
            self.wrong(f"stage {step.stage} has already run micro-batch {step.micro_batch}")
        if step.stage == 0 and "inputs" not in step.needs:
            self.wrong("the first stage needs 'inputs'")
        if step.stage == self.last_stage and "labels" not in step.needs:
            self.wrong("the last stage needs 'labels'")
        self.fill(step.buffer, _Buffer("batch", (step.stage, step.micro_batch), {}))

    def forward(self, step: i.Forward) -> None:
        stage, m = step.stage, step.micro_batch
        if not self.known(stage, m):
            return
        if self.state.get((stage, m)):
            self.wrong(f"stage {stage} has already run micro-batch {m}")
        self.state[stage, m] = "forward"
        self.holds(step.batch, "batch", (stage, m))
        if stage == 0:
            if step.source is not None:
                self.wrong("the first stage has no carry that enters")
        else:
            buffer = self.source(step.source, ("activation", stage - 1, m))
            if buffer is not None:
                self.entered[stage, m] = dict(buffer.tensors)
        self.left[stage, m] = {tensor.name: (tensor.dtype, tensor.shape) for tensor in step.tensors}
        self.produce(step.result, ("activation", stage, m), step.tensors, stage < self.last_stage)

    def produce(self, number: int | None, key: _Key, tensors: tuple[i.Tensor, ...], wanted: bool) -> None:
        if wanted != (number is not None) or wanted != bool(tensors):
            self.wrong("hands something on, but no stage follows" if not wanted else "hands nothing on, but a stage follows")
        if number is not None:
            made = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
            if len(made) < len(tensors):
                self.wrong("names a tensor twice")
            self.fill(number, _Buffer("result", key, dict(made)))

    def backward(self, step: i.Backward | i.BackwardInput) -> None:
        stage, m = step.stage, step.micro_batch
        if not self.known(stage, m):
            return
        state = self.state.get((stage, m), "nothing")
        if state != "forward":
            self.wrong(f"stage {stage} cannot run backward on micro-batch {m}: {state} is done of it")
        self.state[stage, m] = "half" if isinstance(step, i.BackwardInput) else "done"
        self.after_reduction(stage, m, isinstance(step, i.Backward))
        if stage == self.last_stage:
            if step.source is not None:
                self.wrong("the last stage starts from the loss, not from a gradient")
        else:
            buffer = self.source(step.source, ("gradient", stage, m))
            if buffer is not None:
                self.same(buffer.tensors, self.left.get((stage, m), {}), "gradient", "carry that left")
        self.produce(step.result, ("gradient", stage - 1, m), step.tensors, stage > 0)
        made = {tensor.name: (tensor.dtype, tensor.shape) for tensor in step.tensors}
        if (stage, m) in self.entered:
            self.same(made, self.entered[stage, m], "gradient", "carry that entered")

    def same(self, some: Mapping[str, Any], all_: Mapping[str, Any], one: str, other: str) -> None:
        for name, found in some.items():
            if all_.get(name) != found:
                self.wrong(f"the {one} of '{name}' is {found}, that of the {other} {all_.get(name)}")

    def backward_weight(self, step: i.BackwardWeight) -> None:
        if not self.known(step.stage, step.micro_batch):
            return
        key = (step.stage, step.micro_batch)
        if self.state.get(key) != "half":
            self.wrong(f"stage {step.stage} has no first half of a backward pass of micro-batch {step.micro_batch} to complete")
        self.state[key] = "done"
        self.after_reduction(*key, True)

    def after_reduction(self, stage: int, m: int, completes: bool) -> None:
        """A pass after the reduction has begun must be the announced one."""
        if stage not in self.reducing:
            return
        if self.reducing[stage] != m or not completes or stage in self.reduced:
            self.wrong(f"adds gradients to stage {stage}, which is already being reduced")
        self.reducing[stage] = None

    def send_start(self, step: i.SendStart) -> None:
        key: _Key = (step.what, step.cut, step.micro_batch)
        stage = step.cut if step.what == "activation" else step.cut + 1
        if not self.known(stage, step.micro_batch):
            return
        buffer = self.holds(step.buffer, "result", key)
        if buffer is None:
            return
        if step.peer in buffer.begun:
            self.wrong(f"sends {key} to rank {step.peer} twice")
        buffer.begun.add(step.peer)
        buffer.pending.add(step.peer)
        self.where[False, key] = step.buffer
        self.transfer(step)
        for part in step.parts:
            if buffer.tensors.get(part.name) != (part.dtype, part.shape):
                self.wrong(f"sends {part.dtype} {part.shape} of '{part.name}', but the buffer has {buffer.tensors.get(part.name)}")
            if part.add:
                self.wrong(f"'{part.name}' is marked to be added, which only a receiver does")

    def receive_start(self, step: i.ReceiveStart) -> None:
        key: _Key = (step.what, step.cut, step.micro_batch)
        stage = step.cut + 1 if step.what == "activation" else step.cut
        if not self.known(stage, step.micro_batch):
            return
        buffer = self.buffers.get(step.buffer)
        if buffer is None or (buffer.kind, buffer.key) != ("received", key):
            buffer = _Buffer("received", key, {})
            self.fill(step.buffer, buffer)
            if (True, key) in self.where:
                self.wrong(f"receives {key} into buffer {step.buffer}, other parts of it into {self.where[True, key]} or long ago")
        self.where[True, key] = step.buffer
        if step.peer in buffer.begun:
            self.wrong(f"receives {key} from rank {step.peer} twice")
        buffer.begun.add(step.peer)
        buffer.pending.add(step.peer)
        self.transfer(step)
        for part in step.parts:
            if part.name not in buffer.tensors:
                buffer.tensors[part.name] = (part.dtype, part.shape)
            elif buffer.tensors[part.name] != (part.dtype, part.shape):
                self.wrong(f"receives {part.dtype} {part.shape} of '{part.name}', other parts are of {buffer.tensors[part.name]}")
        buffer.parts += [(step.peer, part) for part in step.parts]

    def transfer(self, step: i.SendStart | i.ReceiveStart) -> None:
        if step.peer == self.program.rank:
            self.wrong("a transfer with itself")
        if not step.parts:
            self.wrong("a transfer of nothing")
        for part in step.parts:
            for limits, dim in ((part.rows, 0), (part.columns, -1)):
                if limits is not None and not (part.shape and limits[0] <= limits[1] <= part.shape[dim]):
                    self.wrong(f"'{part.name}' has shape {part.shape}, of which there is no {limits[0]}:{limits[1]}")

    def wait(self, step: i.SendWait | i.ReceiveWait) -> None:
        receives = isinstance(step, i.ReceiveWait)
        key: _Key = (step.what, step.cut, step.micro_batch)
        number = self.where.get((receives, key))
        buffer = None if number is None else self.buffers.get(number)
        if buffer is None or step.peer not in buffer.pending or buffer.key != key:
            self.wrong(f"waits for {key} with rank {step.peer}, which is not under way")
            return
        buffer.pending.discard(step.peer)
        arrived = {part.name for peer, part in buffer.parts if not part.add and peer not in buffer.pending}
        for name in {part.name for peer, part in buffer.parts if part.add and peer == step.peer} - arrived:
            self.wrong(f"adds to '{name}' before anything of it has arrived")

    def free(self, step: i.Free) -> None:
        for number in step.buffers:
            buffer = self.buffers.pop(number, None)
            if buffer is None:
                self.wrong(f"buffer {number} is already empty")
                continue
            if buffer.pending:
                self.wrong(f"frees buffer {number} while {buffer.key} with rank {sorted(buffer.pending)} is under way")

    def reduce_start(self, step: i.ReduceStart) -> None:
        stage = step.stage
        if stage not in self.places:
            self.wrong(f"stage {stage} is not on this rank")
            return
        if stage in self.reducing:
            self.wrong(f"stage {stage} is reduced twice")
        if any(stage > other for other in self.reducing):
            self.wrong(f"stage {stage} is reduced after stage {min(self.reducing)}; ranks agree on falling order")
        self.reducing[stage] = step.micro_batch
        missing = sorted(m for own, m in self.owed if own == stage and self.state.get((own, m)) != "done")
        if missing != ([] if step.micro_batch is None else [step.micro_batch]):
            last = "nothing" if step.micro_batch is None else f"micro-batch {step.micro_batch}"
            self.wrong(f"stage {stage} is reduced with {last} to come, but the backward passes of {missing} are missing")

    def reduce_wait(self, step: i.ReduceWait) -> None:
        if step.stage not in self.reducing or step.stage in self.reduced:
            self.wrong(f"waits for a reduction of stage {step.stage}, which is not under way")
        elif self.reducing[step.stage] is not None:
            self.wrong(f"waits for stage {step.stage}, whose last backward pass is still to come")
        self.reduced.add(step.stage)

    def sync_tied(self, step: i.SyncTied) -> None:
        if step.op in self.tied:
            self.wrong(f"'{step.op}' is shared twice")
        self.tied.add(step.op)
        for stage in sorted({end.own for end in (*step.sends, *step.receives)}):
            if stage not in self.places:
                self.wrong(f"stage {stage} is not on this rank")
            if stage in self.reducing and stage not in self.reduced:
                self.wrong(f"'{step.op}' is shared before the reduction of stage {stage} was waited for")
            if any(self.state.get(key) != "done" for key in self.owed if key[0] == stage):
                self.wrong(f"'{step.op}' is shared before the backward passes of stage {stage} are done")

    def step(self, step: i.Step) -> None:
        self.stepped = True
        if set(self.reducing) - self.reduced:
            self.wrong(f"steps before the reduction of stage {sorted(set(self.reducing) - self.reduced)} was waited for")
        if any(self.state.get(key) != "done" for key in self.owed):
            self.wrong("steps before all backward passes are done")

    def step_stage(self, step: i.StepStage) -> None:
        if not self.known(step.stage, step.micro_batch):
            return
        key = (step.stage, step.micro_batch)
        if key in self.owed and self.state.get(key) != "done":
            self.wrong(f"stage {step.stage} updates its weights before the backward pass of micro-batch {step.micro_batch} is done")
        if key in self.updated:
            self.wrong(f"stage {step.stage} updates its weights twice for micro-batch {step.micro_batch}")
        waiting = [m for stage, m in self.owed if stage == step.stage and self.state.get((stage, m)) in ("half", "done")]
        if set(waiting) - {m for stage, m in self.updated if stage == step.stage} - {step.micro_batch}:
            self.wrong(f"stage {step.stage} updates its weights from the gradients of several micro-batches at once")
        if self.reducing or self.tied:
            self.wrong(f"stage {step.stage} updates its weights by itself, but shares gradients with other ranks")
        self.updated.add(key)


_EVALUATION = (i.Load, i.Forward, i.SendStart, i.SendWait, i.ReceiveStart, i.ReceiveWait, i.Free)


def _tiles(shape: tuple[int, ...], parts: list[i.Part]) -> bool:
    """Whether the parts cover the tensor exactly once."""
    if len(parts) == 1 and parts[0].rows is None and parts[0].columns is None:
        return True
    rows, columns = (shape[0], shape[-1] if len(shape) > 1 else 1) if shape else (1, 1)
    areas = [(*(part.rows or (0, rows)), *(part.columns or (0, columns))) for part in parts]
    if sum((b - a) * (d - c) for a, b, c, d in areas) != rows * columns:
        return False
    return not any(
        max(one[0], two[0]) < min(one[1], two[1]) and max(one[2], two[2]) < min(one[3], two[3])
        for place, one in enumerate(areas)
        for two in areas[:place]
    )
