"""FASOP's models, node kinds and experiments, as its JSON files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.models.shapes import Form, Quantity

__all__ = ["OUTER_LAYERS", "FasopModel", "NodeKind", "Setting"]

OUTER_LAYERS = ("embedding_layer", "post_process")
_BLOCK_EXTRA_PARAMETERS = 20800
"""Biases and norms of a block, as FASOP counts them."""


@dataclass(frozen=True)
class FasopModel:
    """Dimensions and the ordered list of layers, embedding and head included."""

    hidden_size: int
    sequence_length: int
    vocab_size: int
    num_attention_heads: int
    global_batch_size: int
    layer_types: tuple[str, ...]
    scaling: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    """Times of `.npy` files at larger micro-batches: GPU → layer type → {micro-batch: times that of one sample}."""

    def scaled(self, gpu: str, layer: str, micro_batch: int) -> float:
        """How much longer a layer takes for so many samples than for one: what is known of the next smaller number, linearly beyond all."""
        known = {1: 1.0, **self.scaling.get(gpu, {}).get(layer, {})}
        if len(known) == 1:
            return float(micro_batch)
        below = max(size for size in known if size <= micro_batch)
        return known[below] * (micro_batch / below if below == max(known) else 1.0)

    def parameters(self, layer: str) -> float:
        """Weights of one entry of the list before any split."""
        if layer in OUTER_LAYERS:
            return self.hidden_size * self.vocab_size
        return 12 * self.hidden_size**2 + _BLOCK_EXTRA_PARAMETERS

    def kept_bytes(self, layer: str) -> Quantity:
        """What one entry keeps of a micro-batch, by FASOP's formulas."""
        tokens, hidden = self.sequence_length, self.hidden_size
        if layer == "embedding_layer":
            return Quantity(split=Form.of(samples=tokens * hidden))
        if layer == "post_process":
            return Quantity(split=Form.of(samples=4 * tokens * (hidden + self.vocab_size)))
        squares = 5 * self.num_attention_heads * tokens**2
        return Quantity(Form.of(samples=10 * tokens * hidden), Form.of(samples=24 * tokens * hidden + squares))


@dataclass(frozen=True)
class NodeKind:
    """A machine kind of one of FASOP's node tables, in the units of the file."""

    instance: str
    gpu: str
    gpus_per_node: int
    intra_bits_per_s: float
    inter_bits_per_s: float
    usable_mem_gib: float
    usd_per_hour: float


@dataclass(frozen=True)
class Setting:
    """One of FASOP's experiments."""

    model: str
    node_table: str
    nodes: str
    """A letter per node (`ABBB`), or a sentence for the one that tries every cluster."""
    total_steps: int
