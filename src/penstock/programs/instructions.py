"""What one rank does in one iteration, step by step, with every shape already in it.

A stage of a pipeline, from one rank's point of view (m is a micro-batch):

    Load m ──────────────┐                                                  stage s - 1          stage s          stage s + 1
    ReceiveStart ─ ReceiveWait ─ Forward ─ SendStart ─ SendWait ─ Free         │ activation, cut s-1 │ activation, cut s │
    ReceiveStart ─ ReceiveWait ─ Backward ─ SendStart ─ SendWait ─ Free        │ ◄─────── gradient   │ ◄────── gradient  │
    ReduceStart (before the last Backward) ─ ReduceWait ─ SyncTied ─ Step      cut c lies between stage c and stage c + 1

*Buffers* are numbered places that hold tensors between instructions. An instruction that makes something names the buffer it goes
into, one that needs something names where it lies; `Free` empties buffers, after which their numbers are used again. Dropping a
buffer drops a reference only: what autograd saved in a forward pass lives on until its backward pass.

*Micro-batches* are numbered within a replica. A stage's `dp` splits the samples of each at fixed bounds (`MicroBatch.share`), its
`tp` splits the last dimension of carry tensors that are `split`; under sequence parallelism the rows of the others are split among
the tp ranks instead. `Place` says which part is this rank's.

*Slices.* Neighbouring stages may have other degrees, so a transfer names, for each tensor, the tensor as this rank holds it
(`shape`) and the part of it that travels (`rows` of the first dimension, `columns` of the last; None means all). Both are counted
in this rank's own tensor: nothing needs to be computed to cut or to place a part. The parts of one transfer travel in the order
given, the same at both ends; a part without elements is only allocated.

    activations   Each receiver gets every row and column of its tensors exactly once. A tensor that several sending ranks hold
                  alike comes from one of them.
    gradients     The same, backwards: the gradient of a tensor that is whole under tp is whole and equal on all tp ranks, so a
                  receiver takes each row from one of them. Tensors without rows (tables of position biases) are used by all
                  samples: each part of the samples has a gradient of its own, and those that reach one receiver are added
                  (`add`), in the order of the waits. A tensor that no part of any transfer names has gradient zero: another rank
                  of the same weights has it.

*Loss.* Every counted position weighs 1 / `loss_tokens`, every sample (classification, next-sentence task) 1 / `num_samples`, both
counted over the global batch: gradients are then summed over replicas and dp, never averaged. (`StepStage` is the exception.)
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Literal, TypeAlias

import msgspec

from penstock.models.micro_batch import Count, Degree, MicroBatch

__all__ = [
    "INSTRUCTIONS", "Backward", "BackwardInput", "BackwardWeight", "Dtype", "Forward", "Free", "Instruction", "Load", "MicroBatch",
    "Need", "Part", "Place", "Program", "ReceiveStart", "ReceiveWait", "ReduceGroup", "ReduceStart", "ReduceWait", "SendStart",
    "SendWait", "Step", "StepStage", "SyncTied", "Tensor", "TiedRows", "Transferred", "stage_of",
]  # fmt: skip

Word: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]*\Z")]
"""A name without spaces: of a carry tensor or an op."""
Dtype: TypeAlias = Literal["bf16", "fp16", "fp32", "int64"]
Transferred: TypeAlias = Literal["activation", "gradient"]
Need: TypeAlias = Literal["inputs", "dec_inputs", "labels"]
Range: TypeAlias = tuple[Count, Count]
"""[first, last): `last` is one past the end."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the carry, or its gradient, as this rank holds it."""

    name: Word
    dtype: Dtype
    shape: tuple[Count, ...]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Which rows and columns of one tensor a transfer carries."""

    name: Word
    dtype: Dtype
    shape: tuple[Count, ...]
    """Of the whole tensor on this rank; a receiver allocates that, once for all parts of the buffer."""
    rows: Range | None = None
    """Of the first dimension; None: all."""
    columns: Range | None = None
    """Of the last dimension; None: all."""
    add: bool = False
    """Receiver: add it to what another transfer brought, instead of writing it."""

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what travels, equal at both ends."""
        sizes = list(self.shape)
        if self.columns is not None:
            sizes[-1] = self.columns[1] - self.columns[0]
        if self.rows is not None:
            sizes[0] = self.rows[1] - self.rows[0]
        return tuple(sizes)


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Bring what a stage reads of a micro-batch besides the carry: lengths always, tokens and labels where needed.

    Of the samples it takes the rank's share at the stage's entry, and where ops inside have another dp, the share of those too.
    """

    stage: Count
    micro_batch: Count
    buffer: Count
    needs: tuple[Need, ...] = ()
    """`inputs`: token ids or images. `dec_inputs`: the decoder's token ids. `labels`: labels and loss weights."""


class Forward(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Run a stage on a micro-batch."""

    stage: Count
    micro_batch: Count
    pattern: Count
    """Which of the stage's recomputation patterns."""
    batch: Count
    """Buffer of the loaded micro-batch."""
    source: Count | None = None
    """Buffer of the carry that enters; None in the first stage. Another stage's result if both are on the same ranks."""
    result: Count | None = None
    """Buffer for the carry that leaves; None in the last stage, whose loss the executor adds up."""
    tensors: tuple[Tensor, ...] = ()
    """What the result holds."""


class Backward(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Run a stage's whole backward pass on a micro-batch: gradients of its input and of its weights (added up)."""

    stage: Count
    micro_batch: Count
    source: Count | None = None
    """Buffer of the gradient of the carry that left; None in the last stage, which starts from the loss."""
    result: Count | None = None
    """Buffer for the gradient of the carry that entered; None in the first stage."""
    tensors: tuple[Tensor, ...] = ()
    """What the result holds: the differentiable tensors of the carry that entered."""


class BackwardInput(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The first half of a split backward pass: the gradient of the input, and what the second half needs is put aside."""

    stage: Count
    micro_batch: Count
    source: Count | None = None
    result: Count | None = None
    tensors: tuple[Tensor, ...] = ()


class BackwardWeight(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The second half of a split backward pass: gradients of the weights, added up."""

    stage: Count
    micro_batch: Count


class SendStart(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Begin to send parts of a buffer to another rank of the replica; does not wait."""

    what: Transferred
    cut: Count
    """Between stage `cut` and stage `cut + 1`; activations go up, gradients down."""
    micro_batch: Count
    peer: Count
    buffer: Count
    parts: tuple[Part, ...]


class SendWait(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Wait until a send is done, so that its buffer may be freed."""

    what: Transferred
    cut: Count
    micro_batch: Count
    peer: Count


class ReceiveStart(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Begin to receive parts of a buffer from another rank; the first one into an empty buffer allocates it. Does not wait.

    The transfers of a pair of ranks are begun in the same order at both ends, both directions together.
    """

    what: Transferred
    cut: Count
    micro_batch: Count
    peer: Count
    buffer: Count
    parts: tuple[Part, ...]


class ReceiveWait(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Wait until the parts have arrived; those marked `add` are then added."""

    what: Transferred
    cut: Count
    micro_batch: Count
    peer: Count


class Free(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Empty buffers; their numbers may be used again."""

    buffers: tuple[Count, ...]


class ReduceGroup(msgspec.Struct, frozen=True, array_like=True):
    """Ops [first, last) whose weights all these ranks hold."""

    first: Count
    last: Count
    ranks: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]


class ReduceStart(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Begin to sum a stage's gradients over all ranks that hold the same weights (replicas and dp).

    A rank's stages begin in falling order, the same on all ranks of a group, whatever their schedules are.
    """

    stage: Count
    groups: tuple[ReduceGroup, ...]
    micro_batch: Count | None = None
    """The one backward pass (or its second half) still to come: gradients it completes may be summed while it runs. None: all done."""


class ReduceWait(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Wait until a stage's gradients are summed."""

    stage: Count


class TiedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a shared weight's gradient that one end gives another; counted in this rank's own shard."""

    own: Count
    """The stage of this rank's end."""
    stage: Count
    """The stage of the other end."""
    peer: Count
    """Its rank; this rank itself where it holds both ends."""
    rows: Range | None = None
    """None: all."""


class SyncTied(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Sum the gradient of a weight that ops of several stages share, after each stage has reduced its own.

    A stage with several ops of the weight adds theirs first. All sends and receives are then begun at once, with the gradients as they
    are. Each end gets, besides its own, the gradients of all other ends, row by row; it adds them in the order of stages (its own in
    its place), so that all ends have equal sums.
    """

    op: Word
    """Name of the op that owns the weight (`Op.tied_to` of the others), or of the weight, where it is one of a module's unit."""
    sends: tuple[TiedRows, ...] = ()
    receives: tuple[TiedRows, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Update the weights: clip, optimizer, learning rate; then forget the gradients."""


class StepStage(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Asynchronous schedules: update one stage from the gradients of one micro-batch, then forget them.

    Its loss is then that of the micro-batch alone. Micro-batches whose forward pass has run keep the weights that it used until their
    backward pass. The `Step` at the end of such a program updates nothing.
    """

    stage: Count
    micro_batch: Count
    groups: tuple[ReduceGroup, ...] = ()
    """Ranks with the same weights, over which the gradients are summed first."""


Instruction: TypeAlias = (
    Load | Forward | Backward | BackwardInput | BackwardWeight | SendStart | SendWait | ReceiveStart | ReceiveWait | Free
    | ReduceStart | ReduceWait | SyncTied | Step | StepStage
)  # fmt: skip

INSTRUCTIONS: tuple[type[Instruction], ...] = (
    Load, Forward, Backward, BackwardInput, BackwardWeight, SendStart, SendWait, ReceiveStart, ReceiveWait, Free, ReduceStart, ReduceWait,
    SyncTied, Step, StepStage,
)  # fmt: skip
"""Every kind; an executor must have a handler for each."""


def stage_of(step: Instruction) -> int:
    """The stage that an instruction belongs to, of a transfer the one at this end; -1: none."""
    stage: int = getattr(step, "stage", -1)
    if stage >= 0:
        return stage
    cut: int = getattr(step, "cut", -1)
    if cut < 0:
        return -1
    receives, upwards = isinstance(step, ReceiveStart | ReceiveWait), getattr(step, "what", "") == "activation"
    return cut + (receives == upwards)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A stage on this rank, and which part of it. Entry and exit degrees differ only where the stage's runs say so."""

    stage: Count
    first: Count
    last: Count
    """Ops [first, last)."""
    index: Count
    """Position among the stage's ranks of this replica; those of one tp group are neighbours."""
    entry_tp: Degree
    entry_dp: Degree
    exit_tp: Degree
    exit_dp: Degree

    @property
    def entry_share(self) -> int:
        """Which of `entry_dp` parts of the samples enters here."""
        return self.index // self.entry_tp

    @property
    def exit_share(self) -> int:
        """Which of `exit_dp` parts of the samples leaves here."""
        return self.index // self.exit_tp


class Program(msgspec.Struct, frozen=True, array_like=True):
    """The instructions of one rank for one iteration, or, under an asynchronous schedule, for several without a break between them."""

    rank: Count
    iteration: Count
    """The first."""
    replica: Count
    num_replicas: Degree
    num_stages: Degree
    loss_tokens: Degree
    """Counted positions of the global batch: each weighs 1 / this. Of several batches, all of theirs."""
    num_samples: Degree
    """Samples of the global batch, or of all."""
    places: tuple[Place, ...]
    """The stages on this rank, in order."""
    micro_batches: tuple[MicroBatch, ...]
    """Those of this rank's replica, in order of their number."""
    instructions: tuple[Instruction, ...]
    training: bool = True
    """False: forward passes only, for evaluation; no gradients and no step."""
    ends: tuple[Count, ...] = ()
    """Of several global batches, one for each iteration: how many micro-batches there are up to the end of each. None: there is one."""

    @property
    def num_batches(self) -> int:
        """Global batches, and so iterations."""
        return len(self.ends) or 1

    def iteration_of(self, micro_batch: int) -> int:
        """The iteration that a micro-batch belongs to."""
        return self.iteration + bisect_right(self.ends, micro_batch)

    def of_batch(self, number: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one of the global batches."""
        return self.micro_batches[self.ends[number - 1] if number else 0 : self.ends[number]] if self.ends else self.micro_batches

    def place(self, stage: int) -> Place:
        """This rank's part of a stage."""
        return next(place for place in self.places if place.stage == stage)
