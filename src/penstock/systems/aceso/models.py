"""The model families of Aceso's tables, and how their rows make a chain.

A transformer's op table holds one layer, a Wide-ResNet's every op:

    GPT     0 embedding | 1..13 layer × L | 14.. tail
    T5      0 embedding | 1..13 encoder × L | 14 norm | 15 embedding | 16..36 decoder × L | 37.. tail
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import InputError, plural
from penstock.models.ops import Block, Op

__all__ = ["FAMILIES", "SAME_TABLE", "AcesoFamily", "layer_runs", "residual_runs"]

SAME_TABLE = {("t5", "22B"): "11B"}
"""Sizes that reuse the ops of another one."""


@dataclass(frozen=True)
class AcesoFamily:
    """What the op tables of a model family do not say themselves."""

    dtype: str
    layers: Mapping[str, int]
    """Number of layers by size; empty where the table holds every op."""
    runs: tuple[tuple[str, int, bool], ...] = ()
    """(block, rows of the table, whether it repeats once per layer) in order; the rest is the tail."""
    seq_length: int = 0
    dec_length: int = 0


FAMILIES = {
    "gpt": AcesoFamily(
        "fp16", {"350M": 24, "1_3B": 24, "2_6B": 32, "6_7B": 32, "13B": 40}, (("encoder-embedding", 1, False), ("layers", 13, True)), 2048
    ),
    "t5": AcesoFamily(
        "fp16",
        {"770M": 24, "3B": 24, "6B": 24, "11B": 24, "22B": 48},
        (("encoder-embedding", 1, False), ("encoder", 13, True), ("enc-final-layernorm", 1, False),
         ("decoder-embedding", 1, False), ("decoder", 21, True)),
        2048, 512,
    ),
    "resnet": AcesoFamily("fp32", {}),
}  # fmt: skip


def layer_runs(ops: Sequence[Op], family: AcesoFamily, layers: int, path: Path) -> tuple[tuple[Block, int], ...]:
    """A transformer: its repeated rows once per layer, the rows after them once."""
    expected = sum(count for _, count, _ in family.runs)
    if len(ops) <= expected:
        raise InputError(f"table '{path}' has {plural(len(ops), 'op')}; expected {expected} for the layers and at least one after them.")
    runs, at = [], 0
    for name, count, repeats in family.runs:
        runs.append((Block(name, tuple(ops[at : at + count])), layers if repeats else 1))
        at += count
    return (*runs, (Block("tail", tuple(ops[at:])), 1))


def residual_runs(ops: Sequence[Op]) -> tuple[tuple[Block, int], ...]:
    """A Wide-ResNet: a block for each residual block, single ops around them."""
    runs: list[tuple[Block, int]] = []
    for op in ops:
        prefix, _, name = op.name.rpartition("-")
        op = replace(op, name=name)
        if prefix and runs and runs[-1][0].name == prefix:
            runs[-1] = (Block(prefix, (*runs[-1][0].ops, op)), 1)
        else:
            runs.append((Block(prefix or name, (op,)), 1))
    return tuple(runs)
