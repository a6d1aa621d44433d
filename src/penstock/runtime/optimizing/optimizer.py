"""AdamW, LAMB and SGD for weights in any precision: half-precision ones have fp32 masters, worked through in pieces of bounded size.

The fp32 copy of one piece's gradients is the most extra memory that a step takes; AdamW on a GPU takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from penstock.costs.memory import OPTIMIZER_CHUNK
from penstock.models.modules.fused import has_triton
from penstock.runtime.optimizing.update_rules import AdamWRule, LambRule, UpdateRule, update_rule
from penstock.runtime.settings import OptimizerSettings

__all__ = ["MASTER", "MasterAdamW", "Optimizer", "make_adamw", "make_optimizer", "make_own", "squared_norms"]

MASTER = "master"
"""What an optimizer calls the fp32 copy that a half-precision weight is rounded from, beside `exp_avg` and the like."""

_USUAL_DECAY = 0.01
"""As torch's AdamW has it."""
_SMALL = 2**17
"""Values below which weights are updated together: the GPU reads and writes their state in about two microseconds."""

Make = Callable[[list[nn.Parameter]], UpdateRule]
"""The update rule over fp32 weights."""


@dataclass
class _Piece:
    """A run of weights that one fused step updates, spread over parts of some parameters."""

    spans: list[tuple[nn.Parameter, int, int]]
    master: nn.Parameter
    optimizer: UpdateRule
    num_steps: int | None = None
    """Steps so far, as the host knows them; None: as the optimizer's state says."""

    def views(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of `tensors` (weights or gradients, one per span) that belong to this piece."""
        return [tensor.view(-1)[start:stop] for tensor, (_, start, stop) in zip(tensors, self.spans, strict=True)]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat fp32 tensor of this piece cut like its spans."""
        return list(flat.split([stop - start for _, start, stop in self.spans]))


class Optimizer:
    """Updates some weights from their gradients; its state can be read and set weight by weight, so that it can move."""

    parameters: list[nn.Parameter]

    def _inner(self) -> list[UpdateRule]:
        raise TypeError(f"{type(self).__name__} has no rules inside")

    def set_rate(self, lr: float) -> None:
        """The learning rate of the steps to come."""
        for rule in self._inner():
            rule.lr = lr

    def step(self, factor: torch.Tensor | None = None, only: Sequence[nn.Parameter] | None = None) -> None:
        """One update from the gradients in place, multiplied by `factor` in fp32; of some ops' weights `only`, if given."""
        raise TypeError(f"{type(self).__name__} has no step")

    def advance(self, factor: torch.Tensor | None) -> torch.Tensor:
        """(weights, 2) LAMB's first half: gradients taken in; squared norms of this rank's part of each weight and of where it goes."""
        raise TypeError(f"{type(self).__name__} has no two halves")

    def move(self, ratios: torch.Tensor) -> None:
        """LAMB's second half: every weight goes there, its step multiplied by its ratio."""
        raise TypeError(f"{type(self).__name__} has no two halves")

    def zero_grad(self) -> None:
        """Sets the gradients to zero in place: their memory stays."""
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The optimizer's state of one weight, in its shape (`master`, `exp_avg`, …), and the count of its steps (`step`)."""
        raise TypeError(f"{type(self).__name__} has no state")

    def load_state(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        """Sets what `state` gave; a weight without `master` in it (another precision) starts its master from itself."""
        raise TypeError(f"{type(self).__name__} has no state")


class _Masters(Optimizer):
    """Keeps an fp32 master of every weight, and the update rule's state for it. Weights and gradients stay in their own dtype."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Make, chunk: int = OPTIMIZER_CHUNK, op_of: Mapping[int, int] | None = None,
        undecayed: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`undecayed`: ids of the weights without decay.

        `op_of`: the op of each weight, by its id. On a processor no piece then spans two ops: what vector instructions round, they round
        by a value's place in its piece, and that must not change when ops around it move to another device."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self._pieces = [
            self._piece(spans, make, undecayed) for run in _runs(self.parameters, op_of or {}, undecayed) for spans in _spans(run, chunk)
        ]

    def _piece(self, spans: list[tuple[nn.Parameter, int, int]], make: Make, undecayed: Collection[int]) -> _Piece:
        master = nn.Parameter(torch.cat([p.detach().view(-1)[start:stop].float() for p, start, stop in spans]))
        return _Piece(spans, master, _decaying(make([master]), id(spans[0][0]) not in undecayed))

    def _inner(self) -> list[UpdateRule]:
        return [piece.optimizer for piece in self._pieces]

    @torch.no_grad()
    def step(self, factor: torch.Tensor | None = None, only: Sequence[nn.Parameter] | None = None) -> None:
        chosen = None if only is None else {id(one) for one in only}
        for piece in self._pieces:
            if chosen is not None and id(piece.spans[0][0]) not in chosen:
                continue
            missing = next((p for p, _, _ in piece.spans if p.grad is None), None)
            if missing is not None:
                raise RuntimeError(f"a weight of shape {tuple(missing.shape)} has no gradient; was the backward pass run?")
            if isinstance(piece.optimizer, AdamWRule) and piece.master.is_cuda and has_triton() and not _is_small(piece.spans[0][0]):
                _adamw_at_once(piece, factor)
            else:
                _step_by_copies(piece, factor)

    @torch.no_grad()
    def advance(self, factor: torch.Tensor | None) -> torch.Tensor:
        squares = torch.zeros(len(self.parameters), 2, dtype=torch.float64, device=_device(self.parameters))
        places = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        for piece in self._pieces:
            piece.master.grad = _gradients(piece, factor)
            rule = _lamb(piece.optimizer)
            rule.advance()
            piece.master.grad = None
            parts = [*piece.split(piece.master.detach()), *piece.split(rule.direction(piece.master))]
            found = squared_norms(parts).view(2, -1).T
            squares.index_add_(0, torch.tensor([places[id(own)] for own, _, _ in piece.spans], device=squares.device), found)
        return squares

    @torch.no_grad()
    def move(self, ratios: torch.Tensor) -> None:
        places = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        for piece in self._pieces:
            counts = torch.tensor([stop - start for _, start, stop in piece.spans], device=ratios.device)
            own = ratios[torch.tensor([places[id(parameter)] for parameter, _, _ in piece.spans], device=ratios.device)]
            _lamb(piece.optimizer).move(piece.master, own.repeat_interleave(counts))
            _round_to_weights(piece)

    def _flats(self, parameter: nn.Parameter) -> Iterator[tuple[_Piece, int, int, int]]:
        """(piece, place in its flat tensors, start, stop) of each part of a weight."""
        for piece in self._pieces:
            at = 0
            for own, start, stop in piece.spans:
                if own is parameter:
                    yield piece, at, start, stop
                at += stop - start

    @torch.no_grad()
    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {}
        steps: dict[str, torch.Tensor] = {}
        for piece, at, start, stop in self._flats(parameter):
            for name, value in ({"master": piece.master, **piece.optimizer.state[piece.master]}).items():
                if value is None:
                    continue
                if value.dim() == 0:
                    steps[name] = value
                else:
                    found.setdefault(name, []).append(value.detach()[at : at + stop - start])
        # What lies in one place is not copied: whoever saves or moves a rank would hold its state twice.
        whole = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}
        return {name: value.view(parameter.shape) for name, value in whole.items()} | steps

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        given = {"master": parameter.detach().float(), **state}
        for piece, at, start, stop in self._flats(parameter):
            piece.num_steps = None
            kept = piece.optimizer.state[piece.master]
            for name, value in given.items():
                if value.dim() == 0 and (name == "step" or (name != "master" and parameter.dim())):  # moments of one number are moments
                    kept[name] = value.clone()
                    continue
                if name != "master" and kept.get(name) is None:
                    kept[name] = torch.zeros_like(piece.master)
                target = piece.master.detach() if name == "master" else kept[name]
                target[at : at + stop - start].copy_(value.reshape(-1)[start:stop])
        parameter.copy_(given["master"])


def _step_by_copies(piece: _Piece, factor: torch.Tensor | None) -> None:
    """The update rule on the masters, with copies of gradients and weights before and after."""
    piece.master.grad = _gradients(piece, factor)
    piece.optimizer.step()
    piece.master.grad = None
    _round_to_weights(piece)


def _gradients(piece: _Piece, factor: torch.Tensor | None) -> torch.Tensor:
    """A piece's gradients in fp32, multiplied by `factor`."""
    scratch = torch.empty_like(piece.master)
    torch._foreach_copy_(piece.split(scratch), piece.views(p.grad for p, _, _ in piece.spans if p.grad is not None))
    return scratch if factor is None else scratch.mul_(factor)


def _round_to_weights(piece: _Piece) -> None:
    torch._foreach_copy_(piece.views(p.detach() for p, _, _ in piece.spans), piece.split(piece.master.detach()))


def _lamb(rule: UpdateRule) -> LambRule:
    assert isinstance(rule, LambRule)
    return rule


def _device(parameters: Sequence[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _decaying(rule: UpdateRule, decays: bool) -> UpdateRule:
    """The rule, without weight decay unless its weights decay."""
    if not decays:
        rule.settings = replace(rule.settings, weight_decay=0.0)
    return rule


def _adamw_at_once(piece: _Piece, factor: torch.Tensor | None) -> None:
    """AdamW with fp32 masters in one pass over gradients, state and weights (a Triton kernel)."""
    from penstock.models.modules import triton_kernels

    master, state, rule = piece.master.detach(), piece.optimizer.state[piece.master], piece.optimizer.settings
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    if piece.num_steps is None:
        piece.num_steps = int(state["step"])
    piece.num_steps += 1
    state["step"] += 1
    factor = torch.ones((), device=master.device) if factor is None else factor
    at = 0
    for parameter, start, stop in piece.spans:
        assert parameter.grad is not None
        triton_kernels.adamw(
            parameter.detach().view(-1)[start:stop], parameter.grad.view(-1)[start:stop], master, state["exp_avg"], state["exp_avg_sq"], at,
            factor, lr=piece.optimizer.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, step=piece.num_steps,
        )  # fmt: skip
        at += stop - start


class MasterAdamW(_Masters):
    """AdamW with fp32 masters and moments."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, chunk: int = OPTIMIZER_CHUNK) -> None:
        super().__init__(parameters, lambda own: update_rule(OptimizerSettings(weight_decay=weight_decay), own, lr), chunk)


class _Plain(Optimizer):
    """The update rule directly on fp32 weights; one for those that decay, one for those that do not."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Make, undecayed: Collection[int] = ()) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._rules: list[tuple[set[int], UpdateRule]] = []
        for decays in (True, False):
            if own := [p for p in self.parameters if (id(p) not in undecayed) == decays]:
                self._rules.append(({id(p) for p in own}, _decaying(make(own), decays)))

    def _inner(self) -> list[UpdateRule]:
        return [rule for _, rule in self._rules]

    def _rule(self, parameter: nn.Parameter) -> UpdateRule:
        return next(rule for own, rule in self._rules if id(parameter) in own)

    def step(self, factor: torch.Tensor | None = None, only: Sequence[nn.Parameter] | None = None) -> None:
        self._multiply(self.parameters if only is None else only, factor)
        for own, rule in self._rules:
            if only is None:  # as somebody's own rule can, too
                rule.step()
            elif chosen := [p for p in only if id(p) in own]:
                rule.step(chosen)

    def _multiply(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor | None) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def advance(self, factor: torch.Tensor | None) -> torch.Tensor:
        self._multiply(self.parameters, factor)
        for rule in self._inner():
            _lamb(rule).advance()
        if not self.parameters:
            return torch.zeros(0, 2, dtype=torch.float64)
        return torch.stack([squared_norms([p.detach(), _lamb(self._rule(p)).direction(p)]) for p in self.parameters])

    @torch.no_grad()
    def move(self, ratios: torch.Tensor) -> None:
        for parameter, ratio in zip(self.parameters, ratios, strict=True):
            _lamb(self._rule(parameter)).move(parameter, ratio)

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self._rule(parameter).state[parameter].items() if value is not None}

    def load_state(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        if "master" in state:
            with torch.no_grad():
                parameter.copy_(state["master"])
        kept: dict[str, Any] = {name: value.to(parameter.device).clone() for name, value in state.items() if name != "master"}
        self._rule(parameter).state[parameter].update(kept)


def squared_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """(gradients,) the squared norm of each, in fp64."""
    return torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).double().square()


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, lr: float = 1e-4, op_of: Mapping[int, int] | None = None,
    undecayed: Collection[int] = (),
) -> Optimizer:  # fmt: skip
    """The optimizer as the weights' dtype needs it: with fp32 masters for half precision, plain for fp32. For the rest see `_Masters`."""
    own = list(parameters)
    if not own or own[0].dtype == torch.float32:
        return _Plain(own, lambda inner: update_rule(settings, inner, lr), undecayed)
    return _Masters(own, lambda inner: update_rule(settings, inner, lr), op_of=op_of, undecayed=undecayed)


def make_own(parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], Any], op_of: Mapping[int, int]) -> Optimizer:
    """An optimizer by somebody's own rule: what `make` returns for fp32 weights steps and keeps `state` as torch's optimizers do."""
    own = list(parameters)
    return _Plain(own, make) if not own or own[0].dtype == torch.float32 else _Masters(own, make, op_of=op_of)


def make_adamw(parameters: Iterable[nn.Parameter], *, lr: float = 1e-4) -> Optimizer:
    """AdamW as the weights' dtype needs it."""
    own = list(parameters)
    if own and own[0].dtype == torch.float32:
        return _Plain(own, lambda inner: update_rule(OptimizerSettings(weight_decay=_USUAL_DECAY), inner, lr))
    return MasterAdamW(own, lr=lr, weight_decay=_USUAL_DECAY)


def _is_small(parameter: nn.Parameter) -> bool:
    """Whether a kernel of its own would take the host longer to start than the GPU to run: norms, biases."""
    return parameter.numel() < _SMALL


def _runs(parameters: list[nn.Parameter], op_of: Mapping[int, int], undecayed: Collection[int]) -> Iterator[list[nn.Parameter]]:
    """Weights whose pieces may run into each other. On a processor, those of one op after the other; on a GPU the small ones, which are
    updated together in a few launches, and the others, with a launch each."""
    on_gpu = bool(parameters) and parameters[0].is_cuda
    ordered = sorted(parameters, key=lambda p: (_is_small(p), id(p) in undecayed)) if on_gpu else parameters
    for _, run in groupby(ordered, key=lambda p: (_is_small(p) if on_gpu else op_of.get(id(p)), id(p) in undecayed)):
        yield list(run)


def _spans(parameters: list[nn.Parameter], chunk: int) -> Iterator[list[tuple[nn.Parameter, int, int]]]:
    """Cuts the concatenation of all parameters into runs of at most `chunk` elements."""
    spans: list[tuple[nn.Parameter, int, int]] = []
    room = chunk
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + room)
            spans.append((parameter, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield spans
                spans, room = [], chunk
    if spans:
        yield spans
