"""`penstock.find_plans`: the best plans for a model and one's own data, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.files import describe_validation_error, write_json
from penstock.jobs.cache import cache_folder, digest, made_once
from penstock.jobs.job_file import DataGroup, PlanGroup
from penstock.jobs.measuring import chosen_costs
from penstock.jobs.models import first_weights
from penstock.jobs.planning import PlanQuestion, batch_of, job_cluster, plans_for
from penstock.jobs.raw_data import PreparedData, fitted, prepare_raw, sample_lengths
from penstock.jobs.rows import data_of_rows, is_path
from penstock.models.catalog import resolve_model
from penstock.models.huggingface import found_source
from penstock.models.ops import Model
from penstock.plans.plan import Plan
from penstock.plans.precision import chosen_precision

__all__ = ["find_plans", "named_model", "open_samples"]


def find_plans(
    model: Any, cluster: str = "local", *, data: Any, tokens_per_batch: int | None = None, lengths: Sequence[int] | None = None,
    tokenizer: str | None = None, costs: str = "auto", precision: str | None = None, memory_limit_gb: float | None = None,
    time_budget_s: float | None = None, over_long: str = "refuse", top: int = 5, tp_plan: Mapping[str, str] | None = None,
    native: bool = True,
) -> list[Plan]:  # fmt: skip
    """The best plans for training a model on these samples, best first; the same on every process that asks.

    Args:
        model: A name of the catalogue, a YAML file, `hf:FOLDER`, `module:FILE.py:FUNCTION`, a torch module, or a function that makes one;
            of the last two `penstock.parallelize` trains the plan.
        cluster: `local`, a cluster file, or a shorthand such as `4xa100-40gb`. Under torchrun `local` has a device for each process.
        data: What is trained on: a prepared folder, a JSONL, CSV or text file (or several), a `datasets.Dataset` or any other sequence of
            dicts with `input_ids` or of lists of token ids.
        tokens_per_batch: Tokens of a global batch, on average; 65,536 or all that there are, if not given.
        lengths: Tokens of each sample of a sequence, where reading them all would take long.
        tokenizer: A file or folder; the model's own if not given.
        costs: `roofline`, `profile:FILE`, `measure`, or `auto`: measured on a GPU, once, in at most a minute.
        precision: `bf16`, `fp16` or `fp32`; what model and devices suggest, if not given.
        memory_limit_gb: Use at most this many GB of each device.
        time_budget_s: Search for at most this long.
        over_long: `refuse` or `truncate` samples that are longer than the model's positions.
        top: How many plans.
        tp_plan: How tensor parallelism divides a torch module, see `penstock.parallelize`.
        native: Whether an `hf:` model of a family that Penstock has itself is planned as its ops; otherwise as transformers' own module.

    >>> plan = find_plans("gpt-tiny", "2xcpu", data="data", tokens_per_batch=4096)[0]   # doctest: +SKIP
    >>> print(plan)   # doctest: +SKIP
    """
    if top < 1:
        raise InputError(f"top is {top}; 1 or more was expected.")
    _require_valid(over_long, tokens_per_batch, memory_limit_gb, time_budget_s)
    source, place = found_source(_described(model, tp_plan), native), job_cluster(cluster)
    devices = resolve_cluster(place)
    described, _ = chosen_precision(resolve_model(source), devices, precision)
    prepared = open_samples(data, described, source, lengths=lengths, tokenizer=tokenizer, over_long=over_long)
    positions = [max(1, length) for length in prepared.filled.own.tolist()]
    batch = batch_of(tokens_per_batch, positions, bool(described.seq_length))
    found_costs, _ = chosen_costs(costs, described, devices, source)
    question = PlanQuestion(
        described, source, place, found_costs, batch, max(8, max(positions)), precision, memory_limit_gb, time_budget_s
    )  # fmt: skip
    return plans_for(question, sample_lengths(prepared)).plans()[:top]


def _require_valid(over_long: Any, tokens_per_batch: Any, memory_limit_gb: Any, time_budget_s: Any) -> None:
    """Refuses what fields of a job of these names could not have."""
    try:
        DataGroup(path=["data"], over_long=over_long)
        PlanGroup(tokens_per_batch=tokens_per_batch, memory_limit_gb=memory_limit_gb, time_budget_s=time_budget_s)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, "what find_plans was given")) from None


def open_samples(
    data: Any, model: Model, source: str, *, lengths: Sequence[int] | None, tokenizer: str | None, over_long: str,
    keeps_weights: bool | None = None,
) -> PreparedData:  # fmt: skip
    """Samples of any kind that is taken, as a model sees them."""
    keeps = bool(first_weights(source, "auto")) if keeps_weights is None else keeps_weights
    if is_path(data):
        paths = [str(data)] if isinstance(data, (str, Path)) else [str(one) for one in data]
        return prepare_raw(paths, model, source, tokenizer=tokenizer, over_long=over_long, keeps_weights=keeps)
    return fitted(data_of_rows(data, lengths), model, over_long)


def named_model(model: Any) -> str:
    """The text that names a model."""
    if isinstance(model, str):
        return model
    raise InputError(
        f"a model is named by text, and {type(model).__name__} was given. Put a function that makes it into a file, and name that: "
        "module:FILE.py:FUNCTION."
    )


def _described(model: Any, tp_plan: Mapping[str, str] | None) -> str:
    """The text that names a model, or the file of a description of a module that only this process has."""
    if not callable(model):
        if tp_plan is not None:
            raise InputError(f"tp_plan was given for '{named_model(model)}', but goes with a torch module. Others bring their own.")
        return named_model(model)
    from torch import nn

    from penstock.models.description import model_to_description
    from penstock.models.modules.cutting.describing import describe
    from penstock.models.modules.cutting.origins import made_of

    made = model if isinstance(model, nn.Module) else model()
    module, example, loss = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model makes a {type(module).__name__}; a torch module was expected, and perhaps an example of inputs and a loss behind."
        )
    found = model_to_description(describe(replace(made_of(module, example, loss), tp_plan=tp_plan)))
    path = cache_folder("models") / f"{digest(found)}.json"
    made_once(path, lambda path: write_json(path, found))
    return str(path)
