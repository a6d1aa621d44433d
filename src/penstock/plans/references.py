"""The model and the cluster a plan speaks of: found again from the plan, and put into one so that it stands alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["cluster_of", "cluster_reference", "model_mapping", "model_of", "model_reference", "with_precision"]

_PRECISIONS = ("bf16", "fp16", "fp32")


def model_of(plan: Plan) -> Model:
    """The model of a plan, in the plan's precision."""
    from penstock.models.catalog import model_from_mapping, resolve_model
    from penstock.plans.plan import Plan

    if not isinstance(plan, Plan):
        raise InputError(f"a Plan was expected, as find_plans or Plan.read(path) gives it, and {type(plan).__name__} was given.")
    if isinstance(plan.model, str):
        return with_precision(resolve_model(plan.model), plan.precision)
    return with_precision(model_from_mapping({**plan.model, "dtype": plan.precision}, "field 'model'", "model"), plan.precision)


def with_precision(model: Model, precision: str) -> Model:
    """The same model trained in another precision; a traced one has only its own."""
    from penstock.models.catalog import FAMILIES

    if model.dtype == precision:
        return model
    if precision not in _PRECISIONS:
        raise InputError(f"precision is {precision!r}. {near_misses(precision, _PRECISIONS)}")
    if model.config.get("origin"):
        from penstock.models.modules.cutting.describing import describe_origin

        described = describe_origin(str(model.config["origin"]), precision)
        return dataclasses.replace(described, open_dtype=model.open_dtype, notes=model.notes)
    if model.family not in FAMILIES:
        raise InputError(f"precision is {precision}, but model '{model.name}' was traced in {model.dtype}. Trace it in {precision}.")
    _, config, build = FAMILIES[model.family].parts()
    built = build(config(**{**model.config, "dtype": precision}), model.name)
    return dataclasses.replace(built, open_dtype=model.open_dtype, notes=model.notes)


def cluster_of(plan: Plan) -> Cluster:
    """The cluster of a plan."""
    from penstock.clusters import cluster_from_dict, resolve_cluster

    if isinstance(plan.cluster, str):
        return resolve_cluster(plan.cluster)
    return cluster_from_dict(dict(plan.cluster), "field 'cluster'")


def model_reference(text: str, model: Model | None = None) -> str | dict[str, Any]:
    """What to write as a plan's model: a name as it is, a file's content, so that the plan can be read elsewhere.

    `model` is what `text` means in the plan's precision, where that is known already.
    """
    from penstock.models.catalog import FAMILIES, model_names, resolve_model

    if text in model_names():
        return text
    model = model or resolve_model(text)
    if model.family not in FAMILIES and text.endswith(".json"):  # the file is the description
        return text
    return model_mapping(model)


def model_mapping(model: Model) -> dict[str, Any]:
    """A model by its content, as a plan has it."""
    from penstock.models.catalog import FAMILIES, TRACED

    if model.family not in FAMILIES:
        from penstock.models.description import model_to_description

        return {"family": TRACED, "name": model.name, "description": model_to_description(model)}
    sizes = {key: list(value) if isinstance(value, tuple) else value for key, value in model.config.items()}
    return {"family": model.family, "name": model.name, **sizes}


def cluster_reference(text: str) -> str | dict[str, Any]:
    """What to write as a plan's cluster: a shorthand as it is, `local` and files by their content."""
    from penstock.clusters import cluster_to_dict, resolve_cluster

    cluster = resolve_cluster(text)
    local_or_file = text.strip().lower() == "local" or "/" in text or Path(text.strip()).is_file()
    return cluster_to_dict(cluster) if local_or_file else text
