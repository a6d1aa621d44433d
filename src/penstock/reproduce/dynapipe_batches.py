"""Batches that DynaPipe's figures are made of, and how they are planned by its cost tables; the data set it used is not ours to ship."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.batching.baselines import packed_rows, run_baseline
from penstock.batching.costs import PipelineCosts
from penstock.batching.lengths import read_lengths
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.search import usual_steps
from penstock.errors import InfeasibleError
from penstock.reproduce.figures import Evidence
from penstock.systems.dynapipe.rules import dynapipe_costs
from penstock.systems.dynapipe.tables import open_configuration

__all__ = ["SYSTEMS", "TOKENS", "LengthBatch", "costs_of", "drawn_batch", "plan_dynamic", "plan_packed", "seeded_lengths", "shared_batch"]

SYSTEMS = {"gptA": "GPT 6.7B, 8 GPUs", "t5D": "T5 11B, 8 GPUs"}
"""The configurations that DynaPipe found best, by their names in its tables' folder."""
TOKENS = 65_536
"""Of a usual global batch."""
_FILES = {"gptA": "gpt", "t5D": "t5", "t5C": "t5"}


@dataclass(frozen=True)
class LengthBatch:
    """A global batch, and how long samples of its data may be."""

    samples: list[SampleLengths]
    longest: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, in encoder and decoder."""
        return sum(sample.length + sample.dec_length for sample in self.samples)

    def tokens_per_s(self, plan: BatchPlan | None) -> float | None:
        """Throughput of a plan for it."""
        return None if plan is None else self.num_tokens / plan.predicted_s

    def first(self, tokens: int) -> LengthBatch:
        """The first samples of so many tokens in all, one at least."""
        total = np.cumsum([sample.length + sample.dec_length for sample in self.samples])
        return LengthBatch(self.samples[: max(1, int(np.searchsorted(total, tokens, side="right")))], self.longest)


def seeded_lengths(count: int, has_decoder: bool, seed: int = 0, longest: int = 2048) -> list[SampleLengths]:
    """Lengths like those of a mixture of instruction tasks: log-normal, decoders short and weakly correlated."""
    numbers = np.random.default_rng(seed)
    first, second = numbers.standard_normal((2, count))
    if not has_decoder:
        return [SampleLengths(i, int(n)) for i, n in enumerate(np.clip(np.exp(np.log(120) + 1.14 * first), 8, longest))]
    enc = np.clip(np.exp(np.log(105) + 1.14 * first), 8, longest)
    dec = np.clip(np.exp(np.log(16) + 1.25 * (0.3 * first + 0.954 * second)), 1, longest)
    return [SampleLengths(i, int(n), int(m)) for i, (n, m) in enumerate(zip(enc, dec, strict=True))]


def drawn_batch(has_decoder: bool, longest: int, tokens: int, seed: int = 0) -> LengthBatch:
    """A batch of seeded lengths."""
    return LengthBatch(seeded_lengths(tokens // 40, has_decoder, seed, longest), longest).first(tokens)


def shared_batch(evidence: Evidence, name: str, size: str) -> LengthBatch:
    """The batch of a size that DynaPipe's own planner was run on, for the model of a configuration."""
    return LengthBatch(read_lengths(evidence.folder / "inputs" / f"{_FILES[name]}_{size}.csv"), int(size.partition("_max")[2]))


def costs_of(evidence: Evidence, name: str) -> PipelineCosts:
    """What micro-batches cost under a configuration of DynaPipe, by its tables."""
    return evidence.once(f"costs {name}", lambda: dynapipe_costs(*open_configuration(evidence.folder / name)))


def plan_dynamic(evidence: Evidence, costs: PipelineCosts, batch: LengthBatch) -> BatchPlan:
    """With the usual search, or a tenth of it in the short form."""
    steps = usual_steps(costs, len(batch.samples)) // (10 if evidence.quick else 1)
    return plan_batch(batch.samples, costs, steps=steps)


def plan_packed(costs: PipelineCosts, batch: LengthBatch, sizes: Sequence[int] = (1, 2, 4, 8)) -> BatchPlan | None:
    """DynaPipe's baseline: rows as long as samples may be, in encoder and decoder, a token between neighbours, attention over whole rows;
    the best number of rows and mode of recomputation."""
    found = []
    for rows in sizes:
        try:
            found.append(run_baseline(packed_rows(batch.samples, costs, rows, batch.longest, "across", separator=1), costs, f"{rows} rows"))
        except InfeasibleError:
            break
    return min(found, key=lambda plan: plan.predicted_s, default=None)
