"""The end of an iteration: the global norm, the loss scale, the update, and what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.runtime.optimizing.optimizer import make_optimizer, squared_norms
from penstock.runtime.parallel.gradients import Gradients
from penstock.runtime.parallel.held import Held
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.moments import Moment, moment
from penstock.runtime.telemetry.phases import GATHERED, SHARING
from penstock.runtime.transport.world import World

__all__ = ["LossScale", "StepResult", "Update"]


@dataclass
class LossScale:
    """fp16's gradients are small: the loss is scaled up, less after an overflow, more after a while without."""

    value: float = 2.0**16
    factor: float = 2.0
    patience: int = 2000
    good_steps: int = 0

    def after(self, overflowed: bool) -> None:
        """Adapts to what the step found."""
        if overflowed:
            self.value, self.good_steps = max(1.0, self.value / self.factor), 0
            return
        self.good_steps += 1
        if self.good_steps == self.patience:
            self.value, self.good_steps = min(2.0**24, self.value * self.factor), 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one iteration, the same on every rank."""

    loss: torch.Tensor
    """Of the global batch; a tensor, so that the device is not waited for until someone reads it."""
    norm: torch.Tensor | None
    """Of the gradients before clipping."""
    rate: float
    tokens: torch.Tensor
    """Of the global batch, both sides, padding left out; samples where there are no tokens."""
    shares: torch.Tensor
    """(ranks, …) of each rank: the squared norms of its gradients op by op (none under asynchronous updates), its tokens, its loss."""
    skipped: bool = False
    """The weights stayed as they were: fp16's gradients overflowed, or what is not finite is to be skipped."""


class Update:
    """Updates the weights of all stages on this rank."""

    def __init__(
        self, gradients: Sequence[Gradients], world: World, settings: TrainingSettings, num_ops: int, precision: str,
        tensors: Sequence[str], phase: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`tensors`: the names of all weights of the model, in the same order on every rank; needed for LAMB alone. `phase` is told where
        in an update this rank is."""
        self._phase = phase
        self.gradients, self.world, self.settings = gradients, world, settings
        updated = [held for own in gradients for held in own.updated_here() if held.parameter.requires_grad]
        op_of = {id(held.parameter): held.place.index for held in updated}
        undecayed = {id(held.parameter) for held in updated if not self._decays(held)}
        self.optimizer = make_optimizer([held.parameter for held in updated], settings.optimizer, settings.rate.at(0), op_of, undecayed)
        self.scale = LossScale() if precision == "fp16" else None
        self._counted = [held for own in gradients for held in own.counted_here()]
        self._places = torch.tensor([held.place.index for held in self._counted], dtype=torch.int64, device=world.device)
        self._num_ops = num_ops
        self._num_tensors = len(tensors)
        numbers = {name: number for number, name in enumerate(tensors)}
        named = [numbers[held.stored_name] for held in updated if tensors]
        self._tensor_of = torch.tensor(named, dtype=torch.int64, device=world.device)
        self.exchanges: list[tuple[Moment, Moment]] = []
        """From when to when the last update gave to other ranks, and waited for what they gave."""
        self.keeps: list[torch.nn.Parameter] = []
        """Weights of which the gradients of the next update are kept, as they were before it."""
        self.kept: dict[int, torch.Tensor] = {}
        """These gradients, by the id of their weight."""
        self.last: tuple[float, torch.Tensor | None, bool] | None = None
        """The last update: its rate, what gradients were multiplied by, if anything, and whether it was dropped."""

    @torch.no_grad()
    def step_alone(self, iteration: int) -> None:
        """One update from this rank's gradients, of which no other rank knows."""
        self.optimizer.set_rate(self.settings.rate.at(iteration))
        self.optimizer.step()
        self._zero()

    @torch.no_grad()
    def results(self, iteration: int, losses: torch.Tensor, tokens: Sequence[int]) -> tuple[StepResult, ...]:
        """Results of the iterations from this one on, whose stages updated by themselves; given this rank's shares of their losses and
        tokens."""
        gathered = self._gathered(torch.stack([torch.tensor(tokens, dtype=torch.float64, device=self.world.device), losses], dim=1))
        rates = [self.settings.rate.at(iteration + number) for number in range(len(tokens))]
        return tuple(
            StepResult(own[:, 1].sum(), None, rate, own[:, 0].sum(), own) for own, rate in zip(gathered.unbind(1), rates, strict=True)
        )

    def _gathered(self, shares: torch.Tensor) -> torch.Tensor:
        """The shares of all ranks."""
        start, gathered = moment(self.world.device), self.world.gather(shares)
        self.exchanges = [(start, moment(self.world.device))]
        self._phase(GATHERED)
        return gathered

    @torch.no_grad()
    def step(self, iteration: int, loss: torch.Tensor, tokens: int) -> StepResult:
        """One update; `loss` and `tokens` are this rank's shares of them."""
        shares = torch.zeros(self._num_ops + 2, dtype=torch.float64, device=self.world.device)
        shares[-2:-1].fill_(tokens)  # `shares[-2] = tokens` would wait for the GPU
        shares[-1] = loss
        self._add_squares(shares)  # also where nothing is clipped: a norm that is not finite ends the run
        # Added rank by rank, then op by op: the sum depends on nothing but the plan.
        gathered = self._gathered(shares)
        total = gathered.sum(0)
        rate = self.settings.rate.at(iteration)
        norm = total[:-2].sum().sqrt() / self._scale_value()
        factor = self.factor(norm, self.settings.clip_norm)
        self.kept = {id(one): one.grad.clone() for one in self.keeps if one.grad is not None}
        dropped = self.is_dropped(norm, total[-1])
        self.last = rate, factor, dropped
        if dropped:
            self._zero()
            return StepResult(total[-1], norm, rate, total[-2], gathered, skipped=True)
        self.optimizer.set_rate(rate)
        if self.settings.optimizer.kind == "lamb":
            self.optimizer.move(self._ratios(self.optimizer.advance(factor)))
        else:
            self.optimizer.step(factor)
        start = moment(self.world.device)
        self._phase(SHARING)
        for own in self.gradients:
            own.share_updates()
        self.exchanges.append((start, moment(self.world.device)))
        self._zero()
        return StepResult(total[-1], norm, rate, total[-2], gathered)

    @torch.no_grad()
    def replay(self, parameters: Sequence[torch.nn.Parameter], rate: float, factor: float | None) -> None:
        """Makes an update of some weights that another rank has made, from the same gradients, which are in place."""
        self.optimizer.set_rate(rate)
        self.optimizer.step(None if factor is None else torch.tensor(factor, device=self.world.device), parameters)
        self._zero()

    def _decays(self, held: Held) -> bool:
        return self.settings.optimizer.decays(held.stored_name, len(held.module.whole_shapes[held.name]))

    def _ratios(self, squares: torch.Tensor) -> torch.Tensor:
        """LAMB's ratio of each weight updated here: the norm of the whole tensor by that of where it goes, whoever has parts of them.

        Ranks that hold the same parts count them again, all parts of a tensor as often, and in both norms, so that the ratio is the same.
        """
        parts = torch.zeros(self._num_tensors, 2, dtype=torch.float64, device=self.world.device)
        parts.index_add_(0, self._tensor_of, squares.to(parts.device))
        weight, step = self.world.gather(parts).sum(0).sqrt().unbind(1)
        ratio = torch.where((weight > 0) & (step > 0), weight / step, 1.0)
        return ratio[self._tensor_of].float()

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The global norm: of all gradients of all ranks, which ask together, without fp16's scale."""
        shares = torch.zeros(self._num_ops, dtype=torch.float64, device=self.world.device)
        self._add_squares(shares)
        return self.world.gather(shares).sum(0).sum().sqrt() / self._scale_value()

    def is_dropped(self, norm: torch.Tensor, loss: torch.Tensor) -> bool:
        """Whether the weights are to stay as they are, to which fp16's scale adapts. Only those who must know it now wait for the device
        here: a run that stops at what is not finite learns of it when it reads the loss, and never saves the weights."""
        if self.scale is None and self.settings.on_nan == "stop":
            return False
        found_norm, found_loss = torch.stack([norm, loss]).tolist()
        if self.scale is not None:
            self.scale.after(not math.isfinite(found_norm))
        return not (math.isfinite(found_norm) and math.isfinite(found_loss))

    def factor(self, norm: torch.Tensor, clip_norm: float | None) -> torch.Tensor | None:
        """The factor of gradients before the update: fp16's scale is taken off, and a `norm` above `clip_norm`. None: nothing to
        do."""
        factor = torch.full((), 1.0 / self._scale_value(), device=self.world.device)
        if clip_norm is not None:
            factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
        return None if factor.device.type == "cpu" and factor.item() == 1.0 else factor

    def _scale_value(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def _add_squares(self, shares: torch.Tensor) -> None:
        """Adds to each op's place the squared norm of its gradients that are counted here."""
        grads = [held.parameter.grad for held in self._counted if held.parameter.grad is not None]
        if not grads:
            return
        shares.index_add_(0, self._places, squared_norms(grads))

    def _zero(self) -> None:
        for own in self.gradients:
            own.zero()
