"""What a plan trains in and on unless it is told: the precision that all devices have, and a length that memory is made for.

asked for            on devices that all have it        on a V100 or T4, without bf16
nothing              the model's own, or bf16           fp16 in place of bf16, with a note
--precision bf16     bf16                               refused: torch would emulate it at the rate of fp32
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import InputError, near_misses
from penstock.plans.references import with_precision

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["PRECISIONS", "chosen_gradients", "chosen_lengths", "chosen_precision", "described_training"]

PRECISIONS = ("bf16", "fp16", "fp32")
MAX_USUAL_LENGTH = 4096
"""Models may take 131,072 positions and more; few samples are that long."""

Notes = tuple[str, ...]


def chosen_precision(model: Model, cluster: Cluster, asked: str | None = None) -> tuple[Model, Notes]:
    """The model in the precision that was asked for, or in its own if the devices have that, else in the next that they have."""
    if asked is not None and asked not in PRECISIONS:
        raise InputError(f"precision is '{asked}'. {near_misses(asked, PRECISIONS)}")
    wanted = asked or ("bf16" if model.open_dtype else model.dtype)
    lacking = [device.name for device, _ in cluster.kinds if not device.supports(wanted)]
    if not lacking:
        unsaid = model.open_dtype and not asked
        return with_precision(model, wanted), (f"planned in {wanted}: the config names no dtype, see --precision.",) if unsaid else ()
    other = next(one for one in ("fp16", "fp32") if all(device.supports(one) for device, _ in cluster.kinds))
    cause = f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no {wanted}"
    if asked:
        raise InputError(f"precision is {asked}, but {cause}; it would be emulated no faster than fp32. Use --precision {other}.")
    return with_precision(model, other), (f"planned in {other}, since {cause}.",)


def chosen_gradients(asked: str | None, precision: str) -> str:
    """The dtype in which gradients are summed: fp32 unless it was said otherwise."""
    if asked not in (None, "fp32", precision):
        wanted = f"fp32 or {precision}" if precision != "fp32" else "fp32"
        raise InputError(f"gradients is '{asked}', but weights are {precision}. Use {wanted}.")
    return asked or "fp32"


def chosen_lengths(model: Model, seq_length: int | None) -> tuple[int, int, Notes]:
    """Tokens of a sample, and on the decoder's side: as asked, or the model's usual ones up to `MAX_USUAL_LENGTH`."""
    dec_length = min(model.dec_length, MAX_USUAL_LENGTH)
    if seq_length is not None:
        return seq_length, dec_length, ()
    usual = min(model.seq_length, MAX_USUAL_LENGTH)
    if usual == model.seq_length:
        return usual, dec_length, ()
    return usual, dec_length, (f"planned for samples of {usual:,} tokens; the model takes {model.seq_length:,}, see --seq-length.",)


def described_training(plan: Plan) -> str:
    """What a plan trains on and in, in a few words: '2,048 tokens, bf16 (gradients in fp32)'."""
    lengths = [f"{length:,}" for length in (plan.seq_length, plan.dec_length) if length]
    most = "up to " if plan.micro_batching.policy == "dynamic" else ""
    samples = f"{most}{' and '.join(lengths)} tokens" if lengths else "images"
    gradients = plan.gradients or plan.precision
    return f"{samples}, {plan.precision}{'' if gradients == plan.precision else f' (gradients in {gradients})'}"
