"""Devices and links that are slower than their kind: factors on the times of every rank's classes of ops, and on pairs of ranks."""

from __future__ import annotations

from enum import StrEnum

from penstock.models.ops import Op

__all__ = ["OpClass", "class_of"]


class OpClass(StrEnum):
    """Ops that a foreign load on the same device slows down alike."""

    MATMUL = "matmul"
    """Bound by arithmetic: linear layers and convolutions."""
    ATTENTION = "attention"
    MEMORY = "memory"
    """Bound by memory: norms, activations, embeddings, pooling, losses."""


_ARITHMETIC = frozenset({"linear", "pooler", "logits", "conv", "fc", "downsample"})


def class_of(op: Op) -> OpClass:
    """The class of an op; kinds that Penstock does not know (traced ones) count as arithmetic."""
    if op.kind == "attention":
        return OpClass.ATTENTION
    known = {"embedding", "norm", "activation", "loss", "batch_norm", "relu", "max_pool", "avg_pool", "class_loss"}
    return OpClass.MEMORY if op.kind in known else OpClass.MATMUL
