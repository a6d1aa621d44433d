"""DynaPipe's configurations and what it assumes of the network, as its JSON file holds them; sizes of its two models."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "RECOMPUTE", "TABLES", "Dimensions", "DynaPipeLinks", "PlannerConfig"]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class DynaPipeLinks:
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
        """The limit of memory in bytes."""
        return self.mem * 1e6


@dataclass(frozen=True)
class Dimensions:
    """What the cost tables do not say about their model."""

    layers: int
    """On each side."""
    hidden: int
    has_decoder: bool


MODELS = {"gpt_6.7b": Dimensions(32, 4096, False), "t5_11b": Dimensions(24, 1024, True)}
TABLES = {"gpt": "gpt_6.7b", "t5": "t5_11b"}
"""The tables of the model that a configuration names."""
