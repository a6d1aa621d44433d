"""One rank of a plan: its stages, buffers, transfers, gradients and update, as the handlers of an executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model
from penstock.models.stored import shared_weights
from penstock.plans.degrees import Axis, parts_of
from penstock.plans.plan import Plan, Stage
from penstock.plans.ranks import Seat, seats_of
from penstock.programs import instructions as i
from penstock.runtime.checkpoints.layout import WEIGHTS, stored_shapes
from penstock.runtime.executor import Executor
from penstock.runtime.optimizing.update import StepResult, Update
from penstock.runtime.parallel.accuracy import count_correct
from penstock.runtime.parallel.gradients import Gradients, gradients_of
from penstock.runtime.parallel.module_chain import CutModule, cut_module
from penstock.runtime.parallel.rounds import rounds_of
from penstock.runtime.parallel.stage import ModuleKey, StageModule, module_key
from penstock.runtime.parallel.stashing import WeightStash
from penstock.runtime.parallel.tied import sync_tied
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.source import Source, load_share
from penstock.runtime.transport.process_groups import make_transport
from penstock.runtime.transport.slices import Landing, outgoing, prepare
from penstock.runtime.transport.transport import Pending
from penstock.runtime.transport.world import ProcessGroups, World
from penstock.schedules.rules import SCHEDULES

__all__ = ["Evaluated", "Rank"]

_PROBE_SIZE, _PROBE_PRODUCTS = 256, 8
_Transfer = tuple[str, int, int, int]
"""What, cut, micro-batch, peer."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Loss and accuracy of an evaluation, the same on every rank."""

    loss: float
    accuracy: float
    """Share of the counted labels that were the most likely ones."""


class Rank:
    """Trains what the plan in force gives to this process.

    `adopt` puts a plan in force, the first as any later one, between two programs or after one that failed. Each plan has a generation of
    process groups of its own; stages, gradients, optimizer and transport belong to the plan.
    """

    def __init__(
        self, model: Model, groups: ProcessGroups, settings: TrainingSettings | None = None, cut: CutModule | None = None
    ) -> None:  # fmt: skip
        """`cut`: the module to train where it is not one of ours; one that its description names is made here."""
        self.model, self.groups = model, groups
        self.settings = settings or TrainingSettings()
        self.cut = cut or cut_module(model, groups.device, self.settings.seed)
        self.executor = self._executor()
        self.phase: Callable[[str], None] = lambda phase: None
        """Told where in an update, or a move, this process is: a fault may have been asked for there."""
        self.results: tuple[StepResult, ...] = ()
        """Of the last program, one for each of its iterations."""
        self.losses: list[tuple[int, int, torch.Tensor]] = []
        """Stage, micro-batch and loss of the passes of the last program that end here; nobody waits for the device until they are read."""
        self.stages: dict[int, StageModule] = {}
        self.gradients: dict[int, Gradients] = {}
        self.stashes: dict[int, WeightStash] = {}
        self._has_plan = False
        self._buffers: dict[int, Any] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Running statistics, and what they were before a step that may be dropped."""
        self._sends: dict[_Transfer, Pending] = {}
        self._receives: dict[_Transfer, tuple[Pending, list[Landing]]] = {}
        self._split: set[int] = set()
        self._summed_with: dict[int, int | None] = {}
        """The micro-batch of each stage during whose backward pass gradients are summed."""
        self._joins: list[list[bool]] = []
        """Passes of other ranks, backward or not, to join after each of this rank's own that are left."""
        self._source: Source | None = None
        self._prepared: tuple[i.Program, i.Load, dict[int, Batch]] | None = None
        """The first micro-batch of the program that comes next, as its instruction will want it."""
        self._loss = torch.zeros(1, dtype=torch.float64, device=groups.device)
        """Of each iteration of a program, this rank's share."""
        self._correct = torch.zeros(2, dtype=torch.float64, device=groups.device)

    def adopt(self, plan: Plan, *, keep: bool = False, members: Sequence[int] | None = None) -> None:
        """Runs `plan` from the next program on; every process of the job calls it, between the same two programs, or every one of those
        that go on (`members`).

        All that belonged to the plan before is let go, a program that failed half-way included, and the process groups are made anew.
        Weights are initial ones. With `keep`, ops that stay here, divided alike, keep their modules: they and their weights are not made
        again. That is for `rank_state`, which fills all weights and the optimizer's state afterwards.
        """
        self.abandon()
        kept = self._kept_modules() if keep else {}
        self.stages, self.gradients, self.stashes = {}, {}, {}
        if self._has_plan:
            self.groups.renew(members)
        self._has_plan = True
        self.plan, self.world = plan, World(plan, self.groups)
        self.asynchronous = SCHEDULES[plan.schedule].asynchronous
        self.transport = make_transport(self.world)
        seats = seats_of(plan).get(self.world.rank, ())
        if self.cut is not None:
            self.cut.hold({op: tp for seat in seats for op, tp in self._divisions(plan.stages[seat.stage], seat)}, filled=keep)
        for seat in seats:
            self.stages[seat.stage] = StageModule(
                self.model, plan.stages[seat.stage], seat.stage, seat.replica, self.world, self.transport, seed=self.settings.seed,
                kept=kept, cut=self.cut,
            )  # fmt: skip
        self.gradients = {number: gradients_of(stage, self.world) for number, stage in self.stages.items()}
        tensors = [key.removeprefix(f"{WEIGHTS}/") for key in stored_shapes(self.model)] if self.settings.optimizer.kind == "lamb" else []
        self.update = Update(
            list(self.gradients.values()), self.world, self.settings, self.model.num_ops, plan.precision, tensors, self.phase
        )  # fmt: skip
        self.stashes = {
            number: WeightStash([held.parameter for held in stage.held if held.parameter.requires_grad])
            for number, stage in self.stages.items()
            if self.asynchronous
        }
        self.transport.warm_up()

    def _divisions(self, stage: Stage, seat: Seat) -> Iterator[tuple[int, TensorParallel]]:
        """This rank's place among those that divide each op of a stage."""
        for part in parts_of(stage):
            tp = self.world.tensor_parallel(part.degrees.group(Axis.TP, seat.index, stage.devices[seat.replica]))
            yield from ((op, tp) for op in range(part.first, part.last))

    def share_out(self, plan: Plan) -> None:
        """Runs `plan` from the next program on, which differs from the one in force by its micro-batches alone: all else stays."""
        self.plan = self.world.plan = plan

    def abandon(self) -> None:
        """Lets go of a program that did not come to its end: buffers, transfers, micro-batches and sums under way, versions of weights.

        Weights and statistics are those before the step, unless it failed while it updated them. Messages of it may still be on their way:
        before the next program the process groups have to be made anew, which `adopt` does.
        """
        for held in (self._buffers, self._sends, self._receives, self._joins, self._split):
            held.clear()  # type: ignore[attr-defined]
        self._prepared = None
        for stage in self.stages.values():
            stage.abandon()
        for own in self.gradients.values():
            own.abandon()
        for stash in self.stashes.values():
            stash.abandon()
        for statistics, before in self._before:
            statistics.copy_(before)
        self._before.clear()

    def _kept_modules(self) -> dict[ModuleKey, OpModule]:
        """Ops that another plan may leave where they are. Weights that ops share, and those that ZeRO divides, are made anew."""
        found = {}
        shared = {op for ops in shared_weights(self.model).values() for op in ops}
        for stage in self.stages.values():
            for place, module in zip(self.model.ops[stage.stage.first : stage.stage.last], stage.modules(), strict=True):
                if stage.weights is None and place.index not in shared:
                    for parameter in module.parameters():
                        parameter.grad = None
                    found[module_key(place, module)] = module
        return found

    def _executor(self) -> Executor:
        handlers = {
            i.Load: self.load, i.Forward: self.forward, i.Backward: self.backward, i.BackwardInput: self.backward_input,
            i.BackwardWeight: self.backward_weight, i.SendStart: self.send_start, i.SendWait: self.send_wait,
            i.ReceiveStart: self.receive_start, i.ReceiveWait: self.receive_wait, i.Free: self.free, i.ReduceStart: self.reduce_start,
            i.ReduceWait: self.reduce_wait, i.SyncTied: self.sync_tied, i.Step: self.step,
            i.StepStage: self.step_stage,
        }  # fmt: skip
        executor = Executor()
        for kind, handler in handlers.items():
            executor.register(kind, handler)
        return executor

    def train(self, program: i.Program, source: Source) -> StepResult:
        """Runs a program on samples of `source`; what its last iteration did."""
        self._begin(program, source)
        self.executor.run(program)
        self._end(program)
        return self.results[-1]

    def prepare(self, program: i.Program, source: Source) -> None:
        """Brings the first micro-batch of a program that comes later: while the device still works on the one before, nobody waits for it.
        If another is trained instead, it is dropped."""
        step = next((step for step in program.instructions if isinstance(step, i.Load)), None)
        self._prepared = None if step is None else (program, step, self._loaded(program, step, source))

    def evaluate(self, program: i.Program, source: Source) -> Evaluated:
        """Runs forward passes alone, on samples of `source`."""
        self._begin(program, source)
        self.executor.run(program)
        self._end(program)
        loss, correct, counted = self.world.gather(torch.cat([self._loss, self._correct])).sum(0).tolist()
        return Evaluated(loss, correct / max(1.0, counted))

    def probe_s(self, step: int) -> float:
        """Times a fixed piece of work on this process' device, between two steps: it tells whether one without work is slow."""
        values = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=self.groups.device)
        values.sum().item()
        begun_s = time.perf_counter()
        for _ in range(_PROBE_PRODUCTS):
            values = values @ values / _PROBE_SIZE
        values.sum().item()  # a GPU is waited for
        return time.perf_counter() - begun_s

    def _begin(self, program: i.Program, source: Source) -> None:
        self._source = source
        if program.rank != self.world.rank:
            raise ValueError(f"a program of rank {program.rank} was given to rank {self.world.rank}")
        if program.training and self._prepared is not None and self._prepared[0] is not program:
            self._prepared = None
        self.transport.begin(program)
        self._loss, self._correct = self._loss.new_zeros(program.num_batches), torch.zeros_like(self._correct)
        self._counted = [sum(micro.loss_tokens() for micro in program.of_batch(number)) for number in range(program.num_batches)]
        self.losses = []
        self._before = [(own, own.clone()) for own in self._statistics()] if program.training else []
        self._split = {step.stage for step in program.instructions if isinstance(step, i.BackwardInput)}
        self._summed_with = {step.stage: step.micro_batch for step in program.instructions if isinstance(step, i.ReduceStart)}
        if any(stage.weights is not None for stage in self.stages.values()):
            self._joins = rounds_of(program, self.world)[::-1]
            self._join()

    def _end(self, program: i.Program) -> None:
        left = [number for number, value in self._buffers.items() if value is not None]
        running = [stage.number for stage in self.stages.values() if stage.num_running]
        if left or running or self._sends or self._receives:
            raise ValueError(
                f"rank {program.rank} ended iteration {program.iteration} with buffers {left}, micro-batches of stages {running} and "
                f"{len(self._sends) + len(self._receives)} transfers that nobody waited for; the program was not complete"
            )
        self.transport.end()

    def _statistics(self) -> Iterator[torch.Tensor]:
        return (own for stage in self.stages.values() for piece in stage.pieces for op in piece.chain.ops for own in op.buffers())

    def _join(self) -> None:
        """Enters the ZeRO collectives of passes for which this rank has no micro-batch, up to its own next pass."""
        for backward in self._joins.pop() if self._joins else ():
            for stage in self.stages.values():
                if stage.weights is not None:
                    stage.weights.join(backward)

    # Micro-batches and passes --------------------------------------------------------------------------------------------------

    def load(self, step: i.Load) -> None:
        """Brings a micro-batch, unless it is here already."""
        assert self._source is not None
        if self._prepared is not None and self._prepared[0] is self._program and self._prepared[1] is step:
            self._buffers[step.buffer], self._prepared = self._prepared[2], None
        else:
            self._buffers[step.buffer] = self._loaded(self._program, step, self._source)

    def _loaded(self, program: i.Program, step: i.Load, source: Source) -> dict[int, Batch]:
        """The tensors that an instruction of a program loads, by this rank's dp shares of the micro-batch."""
        micro, stage = program.micro_batches[step.micro_batch], self.stages[step.stage]
        at_once = program.training and stage.is_recorded(micro)
        return {
            dp: load_share(
                source, program, stage.as_recorded(micro, dp) if at_once else micro, micro.share(dp, stage.share(dp)), step.needs,
                self.world.device, self.settings.seed, alone=self.asynchronous, usual_length=self.plan.seq_length, at_once=at_once,
            )
            for dp in stage.dp_degrees
        }  # fmt: skip

    def forward(self, step: i.Forward) -> None:
        """Runs a stage."""
        program, stage = self._program, self.stages[step.stage]
        micro = program.micro_batches[step.micro_batch]
        batches: dict[int, Batch] = self._buffers[step.batch]
        carry: Carry = {} if step.source is None else self._buffers[step.source]
        if stage.is_last and not program.training:
            result = count_correct(stage, micro, batches, carry, self._correct)
        else:
            result = stage.forward(
                micro, batches, carry, step.pattern, training=program.training, split=step.stage in self._split,
                watched=self._summed_with.get(step.stage) == step.micro_batch,
            )  # fmt: skip
        if step.result is not None:
            self._buffers[step.result] = result
        elif "loss" in result and stage.pieces[-1].tp.rank == 0:
            self.losses.append((step.stage, step.micro_batch, result["loss"].detach()))
            number = program.iteration_of(step.micro_batch) - program.iteration
            self._loss[number] += result["loss"].double() * (micro.loss_tokens() / self._counted[number] if self.asynchronous else 1.0)
        if program.training and step.stage in self.stashes:
            self.stashes[step.stage].use(step.micro_batch)
        self._join()

    def backward(self, step: i.Backward) -> None:
        """Runs a stage's backward pass."""
        self.backward_input(step)
        self.gradients[step.stage].passed(step.micro_batch)
        self._join()

    def backward_input(self, step: i.Backward | i.BackwardInput) -> None:
        """Runs the first half of a split backward pass, or all of one that is not split."""
        if step.source is not None:
            gradients: Carry = self._buffers[step.source]
        else:
            scale = self.update.scale
            gradients = {"loss": torch.full((), 1.0 if scale is None else scale.value, device=self.world.device)}
        stash = self.stashes.get(step.stage)
        with nullcontext() if stash is None else stash.restored(step.micro_batch):
            result = self.stages[step.stage].backward(step.micro_batch, gradients)
        if step.result is not None:
            self._buffers[step.result] = result

    def backward_weight(self, step: i.BackwardWeight) -> None:
        """Runs the second half of a split backward pass: gradients of the weights."""
        own = self.gradients[step.stage]
        self.stages[step.stage].backward_weights(step.micro_batch, own.completed)
        own.passed(step.micro_batch)

    # Transfers -----------------------------------------------------------------------------------------------------------------

    def beside(self, step: i.SendStart | i.ReceiveStart) -> list[torch.Tensor]:
        """Further tensors that travel with a message; the other end has as many."""
        return []

    def send_start(self, step: i.SendStart) -> None:
        """Begins to send a buffer's tensors."""
        tensors = [*outgoing(self._buffers[step.buffer], step.parts), *self.beside(step)]
        self._sends[step.what, step.cut, step.micro_batch, step.peer] = self.transport.send(tensors, step.peer)

    def send_wait(self, step: i.SendWait) -> None:
        """Waits until a send has ended."""
        self._sends.pop((step.what, step.cut, step.micro_batch, step.peer)).wait()

    def receive_start(self, step: i.ReceiveStart) -> None:
        """Begins to receive."""
        buffer = self._buffers.get(step.buffer)
        if buffer is None:
            buffer = self._buffers[step.buffer] = {}
        landings = prepare(buffer, step.parts, self.world.device)
        pending = self.transport.receive([*(landing.arrives for landing in landings), *self.beside(step)], step.peer)
        self._receives[step.what, step.cut, step.micro_batch, step.peer] = (pending, landings)

    def receive_wait(self, step: i.ReceiveWait) -> None:
        """Waits until tensors have arrived, and puts them in place."""
        pending, landings = self._receives.pop((step.what, step.cut, step.micro_batch, step.peer))
        pending.wait()
        for landing in landings:
            landing.finish()

    def free(self, step: i.Free) -> None:
        """Empties buffers."""
        for number in step.buffers:
            self._buffers.pop(number, None)

    # The end of an iteration ---------------------------------------------------------------------------------------------------

    def reduce_start(self, step: i.ReduceStart) -> None:
        """Begins to sum a stage's gradients over the ranks that hold the same weights."""
        self.gradients[step.stage].start(step)

    def reduce_wait(self, step: i.ReduceWait) -> None:
        """Waits for the sums."""
        self.gradients[step.stage].wait()

    def sync_tied(self, step: i.SyncTied) -> None:
        """Sums a shared weight's gradients, for all stages of this rank that hold it."""
        sync_tied(step, self.stages, self.world.rank, self.transport)

    @property
    def leads_replica(self) -> bool:
        """Whether this is the one rank of its replica that counts what it trains on."""
        return 0 in self.stages and self.stages[0].index == 0

    def step(self, step: i.Step) -> None:
        """Updates the weights, unless stages have done that by themselves, and tells what became of each iteration."""
        program = self._program
        tokens = [_useful_tokens(program.of_batch(number)) if self.leads_replica else 0 for number in range(program.num_batches)]
        if self.asynchronous:
            self.results = self.update.results(program.iteration, self._loss, tokens)
        else:
            self.results = (self.update.step(program.iteration, self._loss[0], tokens[0]),)
        if self.results[-1].skipped:  # the forward passes of a step that is dropped have changed running statistics too
            for own, before in self._before:
                own.copy_(before)
        self._before.clear()

    def step_stage(self, step: i.StepStage) -> None:
        """Updates the weights of one stage from one micro-batch."""
        self.gradients[step.stage].sum_now()
        with self.stashes[step.stage].updating():
            self.update.step_alone(self._program.iteration_of(step.micro_batch))

    @property
    def _program(self) -> i.Program:
        assert self.executor.program is not None
        return self.executor.program


def _useful_tokens(micro_batches: Sequence[i.MicroBatch]) -> int:
    """Tokens of a replica's micro-batches, padding left out; images count as one each."""
    return sum(sum(micro.lengths) + sum(micro.dec_lengths) or len(micro.samples) for micro in micro_batches)
