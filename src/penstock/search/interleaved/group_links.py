"""What the groups of an interleaved pipeline send over the links between the very devices they lie on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from penstock.costs.collectives import BUCKET_BYTES, sync_gradients_s
from penstock.costs.memory import bytes_per_parameter
from penstock.costs.table import Floats
from penstock.models.ops import carried_bytes
from penstock.plans.plan import Degrees, Stage
from penstock.search.space.families import PlanFamily
from penstock.search.space.stage_costs import Ints, StageOption
from penstock.search.space.update_prices import step_s_per_weight
from penstock.timing.messages import cut_times_s, gradient_sharing, tied_s

__all__ = ["GroupLinks", "links_of"]

_SEEN = 8
"""Replicas whose messages are taken to share a network."""


@dataclass(frozen=True)
class GroupLinks:
    """Times that no plan with its groups at these places is below, those of messages being the first replica's."""

    enter: Floats
    """[G, N + 1] of the message that a chunk of each group gets before an op."""
    leave: Floats
    """[G, N + 1] of the one that it gets back from the chunk which begins at an op."""
    weights: Floats
    """[N + 1] weights of one rank in the ops before each."""
    after_s: Floats
    """[G] per weight, of gradient sync and optimizer step."""
    tied_s: Floats
    """[G] of gradients that the first and the last group share."""

    def like(self, other: GroupLinks) -> bool:
        """Whether all times are the same."""
        pairs = ((self.enter, other.enter), (self.leave, other.leave), (self.after_s, other.after_s), (self.tied_s, other.tied_s))
        return all(np.allclose(own, its, rtol=1e-12, atol=0.0) for own, its in pairs)

    def messages_s(self, cuts: Ints) -> tuple[Floats, Floats]:
        """[chunks] of the message that each gets, and of the one that it gets back."""
        group = np.arange(len(cuts) - 1) % len(self.enter)
        return self.enter[group, cuts[:-1]], self.leave[group, cuts[1:]]

    def least_after_s(self, cuts: Ints) -> float:
        """What follows the last micro-batch at least."""
        group = np.arange(len(cuts) - 1) % len(self.enter)
        return float((np.bincount(group, np.diff(self.weights[cuts])) * self.after_s + self.tied_s).max())


def links_of(family: PlanFamily, option: StageOption, groups: int, together: bool, first: int, last: int) -> GroupLinks:
    """The links of groups in one of both orders of ranks. Ops before `first` are always in the first chunk, those from `last` on always in
    the last."""
    stages = [
        Stage(0, 1, family.ranks(option, group * option.num_devices, together), Degrees(option.tp, option.dp)) for group in range(groups)
    ]
    enter, leave = _messages_s(family, option, stages)
    shared, tied = _tied(family, stages, first, last)
    return GroupLinks(enter, leave, _weights(family, option, shared), _after_s(family, option, stages), tied)


def _messages_s(family: PlanFamily, option: StageOption, stages: list[Stage]) -> tuple[Floats, Floats]:
    """A message takes a latency and a time per byte, so two cuts with messages of unequal size tell those of all."""
    model, frame = family.request.estimator.model_under(option.sequence), family.request.frame
    cluster, num_ops, shape = family.request.estimator.cluster, family.request.model.num_ops, family.prices.tables.of(option)[1]
    ends = [replace(stage, devices=stage.devices[:_SEEN]) for stage in stages]

    def gradient_bytes(op: int) -> float:
        return carried_bytes(tuple(spec for spec in model.carry_before(op) if spec.differentiable), model.dtype).at(shape, option.tp)

    @cache
    def hops_s(cut: int) -> Floats:
        """[G, 2] of messages there and back between each group and the next, if they are cut here."""
        found = []
        for sender, receiver in zip(ends, [*ends[1:], ends[0]], strict=True):
            pair = (replace(sender, last=cut), replace(receiver, first=cut, last=num_ops))
            found.append(cut_times_s(lambda *_: model, cluster, replace(frame, stages=pair), family.samples, 0)[0])
        return np.array(found)

    def times_s(size_of: Callable[[int], float], way: int) -> Floats:
        """[G, N + 1] of messages there (0) or back (1) at every cut."""
        sizes = np.array([size_of(op) for op in range(1, num_ops)])
        least, most = (hops_s(1 + int(at))[:, way, None] for at in (sizes.argmin(), sizes.argmax()))
        slope = (most - least) / max(float(np.ptp(sizes)), 1.0)
        return np.pad(least + slope * (sizes - sizes.min()), ((0, 0), (1, 1)))

    return np.roll(times_s(lambda op: model.boundary_bytes(op).at(shape, option.tp), 0), 1, axis=0), times_s(gradient_bytes, 1)


def _after_s(family: PlanFamily, option: StageOption, stages: list[Stage]) -> Floats:
    """[G] a bucket takes the least time per weight if it is full."""
    frame, estimator, holders = family.request.frame, family.request.estimator, family.replicas * option.dp
    device = family.kinds[option.pool].device.name
    step_s = step_s_per_weight(family.request, device) / (holders if option.zero else 1)
    if holders == 1:
        return np.full(len(stages), step_s)
    weight, gradient, _, _ = bytes_per_parameter(frame.precision, frame.optimizer, frame.gradients)
    size, share = BUCKET_BYTES, weight / gradient
    sharing = gradient_sharing(estimator.cluster, replace(frame, stages=tuple(stages)))
    lanes = [[ranks[at] for ranks in stage.devices for at in range(0, len(ranks), option.tp)] for stage in stages]
    return np.array([
        step_s + gradient / size * sync_gradients_s(size, estimator.cluster, ranks, zero=option.zero, sharing=together, weight_share=share)
        for ranks, together in zip(lanes, sharing, strict=True)
    ])  # fmt: skip


def _tied(family: PlanFamily, stages: list[Stage], first: int, last: int) -> tuple[set[int], Floats]:
    """The ops that share weights with another which is always in another group, and [G] the time to add up these gradients."""
    model, found = family.request.model, np.zeros(len(stages))
    owners = {place.name: place.index for place in model.ops}
    pairs = [(owners[place.op.tied_to], place.index) for place in model.ops if place.op.tied_to in owners]
    if not pairs or any(owner >= first or op < last for owner, op in pairs):
        return set(), found
    ends = (replace(stages[0], last=last), replace(stages[-1], first=last, last=model.num_ops))
    plan = replace(family.request.frame, stages=ends, num_replicas=family.replicas)
    found[[0, -1]] = tied_s(model, family.request.estimator.cluster, plan)
    return {op for _, op in pairs}, found


def _weights(family: PlanFamily, option: StageOption, shared: set[int]) -> Floats:
    """[N + 1] in the ops before each; what an op shares counts only where the other is in another stage."""
    table, model = family.prices.tables.of(option)[0], family.request.model
    counts = np.zeros(model.num_ops + 1)
    for place in model.ops:
        whole = float(table.parameters[table.chain[place.index], 0, 0])
        own = whole if place.index in shared or not place.op.tied_to else float(place.op.config.get("untied_parameters", 0)) / option.tp
        counts[place.index + 1] = min(whole, own) if place.op.trainable else 0.0
    return np.cumsum(counts)
