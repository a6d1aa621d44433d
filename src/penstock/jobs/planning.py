"""The best plans for a model, devices and the lengths of the samples that are there; found once for the same question."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.clusters import cluster_to_dict, resolve_cluster
from penstock.errors import InfeasibleError, InputError, plural
from penstock.files import read_json, write_json
from penstock.jobs.cache import cache_folder, digest, digest_of_files, made_once
from penstock.jobs.job_file import absolute_source
from penstock.plans.plan import Plan
from penstock.plans.schema import plan_from_dict, plan_to_dict
from penstock.search import Request, search, search_for_lengths, short_name
from penstock.search.lengths import fixed_padded_s

if TYPE_CHECKING:
    from penstock.batching.plan import SampleLengths
    from penstock.models.ops import Model

__all__ = ["FoundPlan", "FoundPlans", "PlanQuestion", "differences", "job_cluster", "plans_for", "require_plan_of"]

_TRIED = 12
"""Plans that are asked for, where only those are wanted that use every process."""
_USUAL_TOKENS, _USUAL_IMAGES = 65_536, 256
_RECIPE = 1
"""Raised when the same question would get another answer."""


@dataclass(frozen=True)
class FoundPlan:
    """A plan, and what its steps take on average for the lengths that it was found for."""

    plan: Plan
    time_s: float
    tokens: float
    """Of a step, padding left out; images where there are no tokens."""
    num_micro_batches: float
    padding_share: float
    peak_bytes: float
    limit_bytes: float
    """Memory of a device."""
    bound_s: float
    """No way to cut the same batches is faster on the same devices and stages; 0 for all but the best, of which alone it is shown."""

    @property
    def gap(self) -> float:
        """Its distance above that at most, as a share."""
        return max(0.0, self.time_s / self.bound_s - 1) if self.bound_s else math.inf


@dataclass(frozen=True)
class FoundPlans:
    """The best plans, best first, and what the usual way to cut batches would take on the stages of the first."""

    found: tuple[FoundPlan, ...]
    fixed_padded_s: float | None
    """With as many samples in each micro-batch, padded to the longest; None where that fits nowhere, or nothing is padded."""
    error: float
    """How far the costs are off, usually, as a share."""

    def plans(self) -> list[Plan]:
        """The plans, each with a note that says why it stands where it stands."""
        best = self.found[0]
        beside = [f"the next best, {short_name(one.plan)}, takes {one.time_s / best.time_s - 1:.1%} longer" for one in self.found[1:2]]
        if self.fixed_padded_s:
            ratio = self.fixed_padded_s / best.time_s
            beside.append(f"fixed micro-batches, padded to the longest sample, would take {ratio:.2f} times as long on these lengths")
        beside.append(f"at most {best.gap:.1%} above the best way to cut these batches on its stages")
        later = (
            replace(one.plan, notes=(*one.plan.notes, f"{one.time_s / best.time_s - 1:.1%} slower than {short_name(best.plan)}"))
            for one in self.found[1:]
        )
        return [replace(best.plan, notes=(*best.plan.notes, *beside)), *later]


@dataclass(frozen=True)
class PlanQuestion:
    """A question for plans: model, cluster, costs and limits."""

    model: Model
    source: str
    """Of the model, as plans name it."""
    cluster: str
    costs: str
    global_batch: int
    longest: int
    precision: str | None = None
    memory_limit_gb: float | None = None
    time_budget_s: float | None = None


def job_cluster(text: str) -> str:
    """The cluster that a job means: `local` has a device for each process of torchrun, where that has started this one."""
    if text.strip().lower() != "local" or "WORLD_SIZE" not in os.environ:
        return text
    started, here = int(os.environ["WORLD_SIZE"]), resolve_cluster("local")
    if here.device(0).name == "cpu":
        return f"{started}xcpu"
    if started != here.num_devices:
        raise InputError(
            f"{plural(started, 'process')} {'was' if started == 1 else 'were'} started, but the cluster 'local' is {here.describe()}. "
            f"Start one process for each device (torchrun --nproc-per-node {here.num_devices}), or say which there are, such as "
            f"--cluster {started}x{here.device(0).name}."
        )
    return text


def batch_of(tokens_per_batch: int | None, lengths: Sequence[int], has_tokens: bool) -> int:
    """Samples of a global batch of so many tokens, on average; all that there are, where they do not suffice for the usual number."""
    if not has_tokens:
        return min(_USUAL_IMAGES, len(lengths))
    mean = sum(lengths) / len(lengths)
    samples = max(1, round((tokens_per_batch or _USUAL_TOKENS) / mean))
    if tokens_per_batch is None:
        return min(samples, len(lengths))
    if samples > len(lengths):
        raise InputError(
            f"a global batch of {tokens_per_batch:,} tokens is about {plural(samples, 'sample')} of {mean:,.0f} tokens, but the data has "
            f"{len(lengths):,}. Use more data, or --tokens-per-batch {int(mean * len(lengths))} at most."
        )
    return samples


def plans_for(
    question: PlanQuestion, samples: Sequence[SampleLengths], *, progress: Callable[[str], None] = lambda text: None
) -> FoundPlans:  # fmt: skip
    """The best plans for these samples. Processes that ask the same get the same plans, on one machine or with one cache."""
    cluster = resolve_cluster(question.cluster)
    asked = {field.name: getattr(question, field.name) for field in dataclasses.fields(question) if field.name != "model"}
    asked["costs"] = question.costs, _content(question.costs)
    asked["model"] = [(block.name, copies, [op.signature for op in block.ops]) for block, copies in question.model.runs]
    lengths = [(sample.length, sample.dec_length) for sample in samples]
    started = os.environ.get("WORLD_SIZE")
    path = cache_folder("plans") / f"{digest(_RECIPE, asked, dict(question.model.config), cluster_to_dict(cluster), lengths, started)}.json"
    made_once(path, lambda path: write_json(path, _to_dict(_searched(question, samples, progress))))
    return _from_dict(read_json(path, "kept plans"), path)


def _content(costs: str) -> str:
    """A name for what is in the profile that a source of costs is; a file may be measured anew under its old name."""
    kind, _, path = costs.strip().partition(":")
    return digest_of_files([Path(path)]) if kind == "profile" and os.path.isfile(path) else ""


def _searched(question: PlanQuestion, samples: Sequence[SampleLengths], progress: Callable[[str], None]) -> FoundPlans:
    limit = math.inf if question.memory_limit_gb is None else question.memory_limit_gb * 1e9
    has_tokens = bool(question.model.seq_length)
    request = Request.of(
        question.source, question.cluster, question.global_batch, question.costs, question.longest if has_tokens else None, [], limit,
        precision=question.precision,
    )  # fmt: skip
    budget_s = question.time_budget_s or math.inf
    found = tuple(_for_lengths(request, samples, budget_s, progress) if has_tokens else _for_images(request, budget_s))
    if not found:
        raise InfeasibleError(
            f"no plan was found that has work for all {os.environ['WORLD_SIZE']} processes that were started. Start fewer, or raise the "
            "global batch (--tokens-per-batch)."
        )
    padded_s = fixed_padded_s(request, samples, found[0].plan) if has_tokens else None
    return FoundPlans(found, padded_s, request.estimator.source.error)


def _for_lengths(
    request: Request, samples: Sequence[SampleLengths], budget_s: float, progress: Callable[[str], None]
) -> Iterator[FoundPlan]:  # fmt: skip
    found = search_for_lengths(
        request, samples, top=_TRIED, time_budget_s=budget_s, watch=lambda text, best_s, bound_s: progress(f"pipelines: {text}"),
        judging=lambda done, all_: progress(f"planning batches for pipeline {done + 1} of {all_}"), strict=False,
    )  # fmt: skip
    for number, choice in enumerate(choice for choice in found if _is_usable(choice.plan)):
        limit = min(limit for batch in choice.batches for replica in batch.limit_bytes for limit in replica)
        yield FoundPlan(
            choice.plan, choice.time_s, choice.num_tokens, choice.num_micro_batches, choice.padding_share, choice.peak_bytes, limit,
            choice.bound_s if number == 0 else 0.0,
        )  # fmt: skip


def _for_images(request: Request, budget_s: float) -> Iterator[FoundPlan]:
    outcome = search(request, top=_TRIED, time_budget_s=budget_s)
    for choice in (choice for choice in outcome.simple_first if _is_usable(choice.plan)):
        limit = min(device.memory_bytes for device, _ in request.cluster.kinds)
        yield FoundPlan(
            choice.plan, choice.estimate.time_s, float(request.frame.global_batch), float(choice.estimate.num_micro_batches), 0.0,
            choice.estimate.peak_bytes, float(limit), outcome.bound_s,
        )  # fmt: skip


def _is_usable(plan: Plan) -> bool:
    """Under torchrun every process needs work: those that are there cannot be sent away."""
    started = os.environ.get("WORLD_SIZE")
    return started is None or len(plan.ranks) == int(started)


def _described(model: Model) -> dict[str, Any]:
    """A model's fields, with the place of its file whole: a plan may have it as somebody wrote it in that file's folder."""
    origin = model.config.get("origin")
    return {**model.config, "origin": absolute_source(str(origin))} if origin else dict(model.config)


def differences(plan: Plan, model: Model) -> list[str]:
    """What a plan was made for that a model is not, such as `layers 2 in place of 3`; empty if it is for this model."""
    from penstock.plans.references import model_of

    planned = model_of(plan)
    if planned.family != model.family:
        return [f"family {planned.family} in place of {model.family}"]
    was, is_ = _described(planned), _described(model)
    names = [name for name in {**was, **is_} if name != "dtype"]
    differ = [f"{name} {was.get(name)} in place of {is_.get(name)}" for name in names if was.get(name) != is_.get(name)]
    if not differ and planned.num_ops != model.num_ops:
        return [f"{planned.num_ops} ops in place of {model.num_ops}"]
    return differ


def require_plan_of(plan: Plan, model: Model) -> None:
    """Refuses a plan that was made for another model, with what differs."""
    from penstock.plans.references import model_of

    if differ := differences(plan, model):
        raise InputError(
            f"the plan is of another model: '{model_of(plan).name}', not '{model.name}' ({', '.join(differ[:4])}). Leave the plan out to "
            "have one searched, or name the model that it was made for."
        )


def _to_dict(plans: FoundPlans) -> dict[str, Any]:
    found = [{**vars(one), "plan": plan_to_dict(one.plan)} for one in plans.found]
    return {"found": found, "fixed_padded_s": plans.fixed_padded_s, "error": plans.error}


def _from_dict(value: Any, path: Path) -> FoundPlans:
    try:
        found = tuple(FoundPlan(**{**one, "plan": plan_from_dict(one["plan"], f"kept plan '{path}'")}) for one in value["found"])
        return FoundPlans(found, value["fixed_padded_s"], value["error"])
    except (TypeError, KeyError, json.JSONDecodeError):
        raise InputError(f"'{path}' holds no plans of this version. Remove it: it is made again.") from None
