"""FASOP's models, node kinds and experiments, as its JSON files hold them."""

from __future__ import annotations

from dataclasses import dataclass

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
