"""Passes of a stage as CUDA graphs, where the host and not the GPU is what a step waits for.

A small micro-batch keeps a GPU busy for less time than its host takes to issue one kernel after the other. Where micro-batches of the same
shape come again and again, their passes are recorded, and all of their kernels issued at once:

    the first four times    run as ever, which compiles and loads every kernel
    the fifth               recorded, forward and backward pass; a recording computes nothing
    from then on            the micro-batch is copied to where the recording reads it, and the recording is played

A recording has its tensors at fixed places, so that one micro-batch at a time can be in it. Those that are between their forward and
backward pass at the same time are in different *slots*; the recordings of a slot, one for each shape, share its memory.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from penstock.models.modules.base import Carry
from penstock.models.modules.batch import Batch, Sequences
from penstock.models.modules.build import Chain
from penstock.timing.recorded import FewShapes

__all__ = ["Recordings"]

_RUNS_BEFORE = 4
"""A recording takes about as long as so many passes, and a shape that came so often will come again."""
_MOST = 128
"""Recordings of one slot: each keeps its kernels' arguments, and what it takes in and gives out."""
_MOST_SHAPES = 4096
"""Of which it is known how often they came; then all are forgotten."""

Run = Callable[[Batch, Carry, list[int]], tuple[Carry, Callable[[Carry], Carry]]]
"""A forward pass: its results, and its backward pass, from gradients of results to those of what entered."""


@dataclass(slots=True)
class _Recording:
    """One shape's passes, and the tensors that they read and write."""

    batch: Batch
    carry: Carry
    gradients: Carry
    results: Carry
    entered: Carry
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


@dataclass(slots=True)
class _Slot:
    pool: tuple[int, int]
    recordings: dict[Hashable, _Recording] = field(default_factory=dict)
    micro_batch: int | None = None


class Recordings:
    """The recorded passes of a run of ops on this rank."""

    def __init__(self, run: Run, chain: Chain, shapes: FewShapes, device: torch.device) -> None:
        self.shapes, self._run, self._chain = shapes, run, chain
        self._may_record = True
        self._stream = torch.cuda.Stream(device)
        self._slots: list[_Slot] = []
        self._in_slot: dict[int, tuple[_Slot, _Recording]] = {}
        self._seen: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        """Micro-batches between forward and backward pass."""
        return len(self._in_slot)

    def __contains__(self, micro_batch: int) -> bool:
        return micro_batch in self._in_slot

    def forward(self, micro_batch: int, batch: Batch, carry: Carry, recompute: list[int], *, alone: bool) -> Carry | None:
        """Replays the pass, or records it; None where it has to run as ever, for example because somebody watches an op.

        `alone`: no pass that ran as ever waits for its backward pass. Its graph would tie the weights' gradients to a stream that
        is not the recording's.
        """
        if not batch.at_once or any(op._forward_pre_hooks for op in self._chain.ops):
            return None
        key = (_shape_key(batch), tuple((name, one.shape, one.dtype) for name, one in carry.items()), tuple(recompute))
        self._count(key)
        if self._seen[key] <= _RUNS_BEFORE:
            return None
        slot = next((one for one in self._slots if one.micro_batch is None), None)
        if slot is None or key not in slot.recordings:
            if not alone or not self._may_record or (slot is not None and len(slot.recordings) >= _MOST):
                return None
            if slot is None:
                slot = _Slot(torch.cuda.graph_pool_handle())
                self._slots.append(slot)
            if not self._record(slot, key, batch, carry, recompute):
                return None
        recording = slot.recordings[key]
        slot.micro_batch, self._in_slot[micro_batch] = micro_batch, (slot, recording)
        _fill(recording, batch, carry)
        recording.forward.replay()
        return {name: one.clone() if name == "loss" else one for name, one in recording.results.items()}  # losses are read after the step

    def backward(self, micro_batch: int, gradients: Carry) -> Carry:
        """The gradients of what entered."""
        slot, recording = self._in_slot.pop(micro_batch)
        for name, one in recording.gradients.items():
            if name in gradients:
                one.copy_(gradients[name])
            else:
                one.zero_()
        recording.backward.replay()
        slot.micro_batch = None
        # The next micro-batch of this slot may come before they are sent.
        return {name: one.clone() for name, one in recording.entered.items()}

    def abandon(self) -> None:
        """Forgets the micro-batches that are between their passes."""
        self._in_slot.clear()
        for slot in self._slots:
            slot.micro_batch = None

    def _count(self, key: Hashable) -> None:
        if len(self._seen) > _MOST_SHAPES:
            self._seen.clear()
        self._seen[key] += 1

    def _record(self, slot: _Slot, key: Hashable, batch: Batch, carry: Carry, recompute: list[int]) -> bool:
        """Whether passes of the shape are recorded now. If not, for want of memory or because a kernel cannot be, none will be any more."""
        self._may_record = _has_room()
        if not self._may_record:
            return False
        own, entering = _own_batch(batch), {name: one.clone() for name, one in carry.items()}
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), torch.enable_grad():
                with _recording(forward, slot):
                    results, go_back = self._run(own, entering, recompute)
                gradients = {name: torch.zeros_like(one) for name, one in results.items()}
                with _recording(backward, slot):
                    entered = go_back(gradients)
        except RuntimeError as error:  # nothing was computed, so that nothing is lost
            warnings.warn(f"passes are issued one by one, since they could not be recorded: {error}", stacklevel=2)
            self._may_record = False
            return False
        slot.recordings[key] = _Recording(own, entering, gradients, results, entered, forward, backward)
        return True


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, slot: _Slot) -> Iterator[None]:
    """Records what is issued inside as a CUDA graph, in the slot's memory. Other threads may do as they like."""
    graph.capture_begin(slot.pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def _has_room() -> bool:
    """Whether twice the memory that passes and updates took so far is free: recordings keep theirs, and other shapes run as ever."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes > 2 * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())


_SAMPLES = ("bounds", "samples", "_sizes")
"""What tells one sample from another: kernels for packed micro-batches that are recorded read of each token where its sample lies."""


def _parts(batch: Batch) -> Iterator[tuple[Batch | Sequences, list[tuple[str, torch.Tensor]]]]:
    """A micro-batch and its sides, each with all that passes read of it, by name."""
    for side in (batch, batch.own, batch.decoder):
        if side is not None:
            unread: Collection[str] = ()
            if isinstance(side, Sequences) and side.layout == "padded":
                unread = ("bounds",)  # of which a row without padding has fewer
            elif isinstance(side, Sequences):
                unread = _SAMPLES if batch.next_sentence is not None else (*_SAMPLES, "first_tokens")
            yield side, [(name, one) for name, one in vars(side).items() if isinstance(one, torch.Tensor) and name not in unread]


def _shape_key(batch: Batch) -> Hashable:
    """All that a pass's kernels depend on but the values that tensors hold."""
    found: list[Hashable] = [batch.repeats]
    for side, tensors in _parts(batch):
        if isinstance(side, Sequences):
            found += [side.layout, side.row_length, side.full] if side.layout == "padded" else [side.layout]
        found += [(name, one.shape, one.dtype) for name, one in tensors]
    return tuple(found)


def _own_batch(batch: Batch) -> Batch:
    """A micro-batch of the same shape with tensors of its own."""
    own = copy.copy(batch)
    own.own, own.decoder = copy.copy(batch.own), copy.copy(batch.decoder)
    for side, tensors in _parts(own):
        for name, one in tensors:
            setattr(side, name, one.clone())
        if isinstance(side, Sequences):
            side._memo = {}
    return own


def _fill(recording: _Recording, batch: Batch, carry: Carry) -> None:
    """Puts a micro-batch where the recording reads it."""
    here = [one for _, tensors in _parts(recording.batch) for _, one in tensors]
    given = [one for _, tensors in _parts(batch) for _, one in tensors]
    torch._foreach_copy_([*here, *recording.carry.values()], [*given, *(carry[name] for name in recording.carry)])
