"""What DynaPipe's cost models describe: their op chains (layers of one or two sides, then the head) and the planner's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.models.ops import Block, TensorSpec
from penstock.models.shapes import Quantity
from penstock.systems.tables import imported_op, split_quantity

__all__ = ["MODELS", "RECOMPUTE", "Dimensions", "Links", "PlannerConfig", "layer_runs"]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Links:
    """What DynaPipe assumes of the network."""

    gpus_per_node: int = 8
    intra_node_gbit_per_s: float = 4800.0
    inter_node_gbit_per_s: float = 100.0
    intra_node_latency_us: float = 0.0
    inter_node_latency_us: float = 4000.0
    round_seqlen_multiple: int = 8
    extra_decoder_tokens: int = 2


@dataclass(frozen=True)
class PlannerConfig:
    """A configuration under which DynaPipe's planner was measured."""

    model: str
    layers: int
    """For T5 this many on each side."""
    tp: int
    pp: int
    dp: int
    mem: float
    """Memory limit of a device in 1e6 bytes, model state included."""
    zero: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage, for T5 those of the encoder first; empty for equal stages."""
    gpus_per_node: int = 0
    """0 for what the links say."""
    sched: str = ""
    """The only schedule allowed; empty for the best of all."""
    noperm: bool = False
    notsp: bool = False
    rc: tuple[str, ...] = RECOMPUTE
    note: str = ""

    @property
    def memory_limit_bytes(self) -> float:
        """The same limit in bytes."""
        return self.mem * 1e6


@dataclass(frozen=True)
class Dimensions:
    """What the cost tables do not say about their model."""

    layers: int
    """On each side."""
    hidden: int
    has_decoder: bool


MODELS = {"gpt_6.7b": Dimensions(32, 4096, False), "t5_11b": Dimensions(24, 1024, True)}


def layer_runs(
    table: str, layers: int, sides: Sequence[str], hidden: int, weights: Sequence[Mapping[str, float]], tp_limit: int
) -> tuple[tuple[Block, int], ...]:
    """`weights` holds, for tp 1 and (if known) 2, the elements of a layer of each side and of an embedding."""
    runs: list[tuple[Block, int]] = []
    for side in sides:
        carry = _carry(side, hidden)
        layer, embedding = _amount(weights, side), _amount(weights, "embedding")
        first = imported_op(f"{side}-first", table, f"{side}-first", carry, parameters=layer + embedding, tp_limit=tp_limit)
        runs.append((Block(f"{side}-first", (first,)), 1))
        if layers > 1:
            rest = imported_op("layer", table, side, carry, parameters=layer, tp_limit=tp_limit)
            runs.append((Block(side, (rest,)), layers - 1))
    head = imported_op("head", table, "postprocess", (), parameters=Quantity(), tp_limit=tp_limit)
    return (*runs, (Block("head", (head,)), 1))


def _carry(side: str, hidden: int) -> tuple[TensorSpec, ...]:
    """A decoder layer passes the encoder's output on beside its own."""
    own = TensorSpec("hidden", ("tokens", hidden))
    return (own,) if side == "encoder" else (TensorSpec("hidden", ("dec_tokens", hidden)), TensorSpec("encoder_output", ("tokens", hidden)))


def _amount(weights: Sequence[Mapping[str, float]], part: str) -> Quantity:
    return split_quantity("one", weights[0][part], weights[1][part] if len(weights) > 1 else None)
