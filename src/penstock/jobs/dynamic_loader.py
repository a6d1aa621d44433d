"""`penstock.DynamicLoader`: global batches of one's own samples, cut into micro-batches for a plan, in a loop of one's own."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from penstock.data.batches import GlobalBatches
from penstock.data.filled import sample_limits
from penstock.data.forms import form_of
from penstock.data.planning import ProgramPlanner
from penstock.data.samples import LoadedProgram, Samples
from penstock.errors import InputError, plural
from penstock.jobs.finding import open_samples
from penstock.plans.plan import Plan
from penstock.plans.ranks import wrongly_started
from penstock.plans.references import model_of

__all__ = ["DynamicLoader"]

_AHEAD = 2
"""Batches that are planned and read ahead, in a thread."""
_NOT_COUNTED = -100
"""The label that torch's and transformers' losses leave out."""


class DynamicLoader:
    """Iterating yields `(step, batch)` until the samples have been gone through: what `Parallel.step` takes on this rank.

    Every rank makes one, with the same samples, plan and seed; which samples run together is decided for each batch from its lengths, ahead
    of training. `.dicts()` yields plain tensors for other loops.

    >>> for step, batch in DynamicLoader(rows, plan): ...   # doctest: +SKIP
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, lengths: Sequence[int] | None = None, seed: int = 0, epochs: float = 1.0,
        tokenizer: str | None = None, rank: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            dataset: A prepared folder, a JSONL, CSV or text file, or a sequence of dicts with `input_ids` or of lists of token ids.
            plan: As `find_plans` gives it.
            lengths: Tokens of each sample of a sequence; with them, samples are read only when they are trained on.
            seed: Of the order of samples.
            epochs: How often the samples are gone through.
            tokenizer: Of text files: a file or folder.
            rank: Of this process; what torchrun says, if not given.
        """
        self._model = model_of(plan)
        self.plan, self.rank = plan, _rank(plan, rank)
        if not (epochs > 0 and math.isfinite(epochs)):
            raise InputError(f"epochs is {epochs}; a number above 0 was expected.")
        named = plan.model if isinstance(plan.model, str) else "the plan's model"
        prepared = open_samples(
            dataset, self._model, named, lengths=lengths, tokenizer=tokenizer, over_long="truncate", keeps_weights=True
        )  # fmt: skip
        self._data, form = prepared.data, form_of(self._model, prepared.data)
        if len(self._data) < plan.global_batch:
            raise InputError(
                f"the data has {plural(len(self._data), 'sample')}, fewer than the plan's global batch of {plan.global_batch:,}. Use "
                "more, or a plan for a smaller batch (tokens_per_batch)."
            )
        costs = None
        if plan.micro_batching.policy == "dynamic":
            from penstock.batching.planner import costs_for

            costs = costs_for(plan, plan.seq_length, plan.dec_length)
        self._planner = ProgramPlanner(plan, self._model, costs, form, seed=seed)
        limits = sample_limits(form, plan.seq_length, plan.dec_length)
        self._batches: GlobalBatches = self._data.batches(plan.global_batch, limits=limits, seed=seed)
        self._samples = Samples(self._data, form, limits)
        self._num_steps = max(1, math.ceil(epochs * len(self._data) / plan.global_batch))
        self._seed = seed
        self.step = 0
        """The step that comes next."""

    def __len__(self) -> int:
        """Steps in all."""
        return self._num_steps

    def __iter__(self) -> Iterator[tuple[int, LoadedProgram]]:
        """From the next step to the last."""
        waiting: deque[Future[LoadedProgram]] = deque()
        with ThreadPoolExecutor(1, "loader") as thread:
            try:
                ahead = self.step
                while self.step < self._num_steps:
                    while ahead < min(self._num_steps, self.step + 1 + _AHEAD):
                        waiting.append(thread.submit(self._loaded, ahead))
                        ahead += 1
                    found = waiting.popleft().result()
                    self.step += 1
                    yield self.step - 1, found
            finally:
                for future in waiting:
                    future.cancel()

    def dicts(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """(step, micro-batches of this rank) as models of transformers take them: `model(**one).loss`.

        `num_items_in_batch` is that of the global batch, so that losses and gradients of all micro-batches and ranks are to be summed, not
        averaged; ranks may have different numbers of micro-batches. Packed ones are one row whose `position_ids` begin anew with each
        sample. Labels are those of each position itself (`shift_labels`): they are not shifted again.
        """
        from penstock.plans.telling import short_name

        if self.plan.num_stages > 1 or any(stage.degrees.tp > 1 for stage in self.plan.stages) or self._planner.form.kind != "decoder":
            raise InputError(
                f"the plan divides the model ({short_name(self.plan)}), or the model is no decoder: plain tensors would not do. Iterate "
                "over the loader itself, with penstock.parallelize."
            )
        for step, loaded in self:
            yield step, [found for micro in loaded.program.micro_batches if (found := self._dict(loaded, micro))]

    def state_dict(self) -> dict[str, int]:
        """State for a checkpoint: the next step, and which batches these are."""
        return self._batches.state(self.step)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where a loader of the same samples and seed was."""
        self._batches.restore(state)
        self.step = int(state["step"])

    def _loaded(self, step: int) -> LoadedProgram:
        programs = self._planner.programs(self._data, self._batches[step])
        return self._samples.load(next(program for program in programs if program.rank == self.rank), self.plan)

    def _dict(self, loaded: LoadedProgram, micro: Any) -> dict[str, Any]:
        """The share that this rank has of a micro-batch; empty where it has none."""
        import torch

        from penstock.runtime.source import load_share

        place = loaded.program.places[0]
        bounds = micro.share(place.entry_dp, place.entry_share)
        if bounds[0] == bounds[1]:
            return {}
        batch = load_share(loaded, loaded.program, micro, bounds, ("inputs", "labels"), torch.device("cpu"), self._seed)
        own = batch.side("own")
        assert batch.labels is not None and batch.weights is not None
        labels = batch.labels.masked_fill(batch.weights == 0, _NOT_COUNTED)
        rows = (1, -1) if own.layout == "packed" else (own.num_rows, own.row_length)
        found = {"input_ids": own.ids, "position_ids": own.positions, "labels": labels, "shift_labels": labels}
        found = {name: tensor.reshape(rows) for name, tensor in found.items()}
        if own.layout == "padded":
            found["attention_mask"] = own.key_padding().long()
        # With a cache, models of transformers take a packed row for one long text.
        return {**found, "num_items_in_batch": torch.tensor(loaded.program.loss_tokens), "use_cache": False}


def _rank(plan: Plan, given: int | None) -> int:
    """The plan's rank of this process, if there is a process for each."""
    if given is None:
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != len(plan.ranks):
            raise wrongly_started(plan, started)
        given = int(os.environ.get("RANK", "0"))
    if not 0 <= given < len(plan.ranks):
        raise InputError(f"rank is {given}, but the plan has {plural(len(plan.ranks), 'rank')}, counted from 0.")
    return plan.ranks[given]
