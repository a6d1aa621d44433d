"""The job file: everything that one training is told, in a file that repeats it.

    penstock train --model hf:llama --data chats.jsonl --out run      writes run/job.yaml, all of it resolved
    penstock train run/job.yaml --out again --set train.lr=1e-5       repeats it, with another learning rate
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import InputError, near_misses
from penstock.files import describe_validation_error, parsed_yaml, read_yaml, short_repr, write_text, yaml_text
from penstock.stores.addresses import without_password

__all__ = [
    "DataGroup", "JobFile", "ModelGroup", "PlanGroup", "SaveGroup", "TrainGroup", "absolute_source", "anywhere", "changed",
    "dotted_fields", "job_from", "parse_changes", "read_job", "write_job",
]  # fmt: skip

FORMAT, VERSION = "penstock-job", 1
_MOST = 10**15

Count = Annotated[int, Field(ge=1, le=_MOST)]
OrNone = Annotated[int, Field(ge=0, le=_MOST)]
"""A count, of which 0 means none."""
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelGroup(_Fields):
    """Which model, and the weights that it begins with."""

    source: str
    """A name of the catalogue, a YAML file of sizes, hf:FOLDER (or the name of a downloaded model), or module:FILE.py:FUNCTION."""
    weights: str = "auto"
    """hf:FOLDER, a checkpoint, or none for random ones; auto: those of the model's own folder if it has any."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Of weights and activations; if not given, the model's own, or one that all devices have."""
    native: bool = True
    """Whether an hf: model of a family that Penstock has itself runs as its ops; false: as transformers' own module."""


class DataGroup(_Fields):
    """Which samples, and how they become tokens."""

    path: list[str] = Field(min_length=1)
    """JSONL (texts, pairs or chats), CSV, Parquet or text files or Hugging Face datasets, each a task; or one prepared folder."""
    fields: str = ""
    """Fields or columns that hold the texts, such as input=inputs,target=targets or text=body; empty: input and target, or text."""
    tokenizer: str | None = None
    """A file or folder; if not given, that of the model's folder, or one that is trained on the texts where weights are random."""
    over_long: Literal["refuse", "truncate"] = "refuse"
    """What becomes of samples that are longer than the model's positions."""
    split: str = "949,50,1"
    """Parts for training, validation and test."""
    prompt_loss: bool = False
    """Whether the tokens of inputs count in a decoder's loss, besides those of targets; of chats all turns, besides the assistant's."""
    folder: str | None = None
    """Where the prepared samples are; found by Penstock."""


class PlanGroup(_Fields):
    """On which devices, and how the training is divided among them."""

    cluster: str = "local"
    """local, a cluster file, or a shorthand such as 4xa100-40gb."""
    costs: str = "auto"
    """roofline, profile:FILE, measure (here, for at most a minute, once); auto: measure on a GPU, roofline on a processor."""
    tokens_per_batch: Count | None = None
    """Tokens of a global batch, on average; if not given, 65,536, or all that the data has."""
    memory_limit_gb: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Use at most this many GB of each device."""
    time_budget_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Search for at most this many seconds."""
    global_batch: Count | None = None
    """Samples of a global batch; found from tokens_per_batch if not given."""
    file: str | None = None
    """A plan of your own; if not given, the best that the search finds."""


class TrainGroup(_Fields):
    """How long, with which learning rate, and on what."""

    steps: Count | None = None
    """Iterations in all; found from epochs if not given."""
    epochs: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Times that the data is gone through, where steps are not given."""
    lr: Annotated[float, Field(gt=0, le=1e30)] = 3e-4
    """Highest learning rate."""
    warmup: OrNone = 0
    """Steps in which the learning rate rises."""
    decay: Literal["constant", "linear", "cosine"] | None = None
    """How the learning rate falls until the last step; if not given, as a cosine after a warm-up, else not at all."""
    end_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of the learning rate at the last step, where it falls."""
    weight_decay: Amount = 0.01
    """What every update takes off each weight, times the learning rate."""
    no_decay: tuple[str, ...] = ()
    """Weights that do not decay: vectors (biases and norms), and words that are in their names, such as embedding."""
    optimizer: Literal["adamw", "lamb", "sgd"] | None = None
    """The update rule; if not given, that of the plan, which is adamw unless somebody wrote another."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of AdamW and LAMB: how much of the averages of gradients, and of their squares, stays from step to step."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Of AdamW and LAMB: added to the root of the averaged squares."""
    momentum: Share = 0.9
    """Of SGD: how much of the last update is in the next."""
    clip: Amount = 1.0
    """Largest norm of the gradients; 0: any."""
    on_nan: Literal["stop", "skip"] = "stop"
    """At a loss or gradients that are not finite: end the run, or skip the update."""
    seed: OrNone = 0
    """Of weights, dropout and the order of samples."""
    deterministic: bool = False
    """On a GPU: the same losses to the bit in every run, at some cost in speed."""
    eval_every: OrNone = 0
    """Steps between evaluations on the validation split; 0: never."""
    device: str = ""
    """cpu or cuda; empty: what the cluster has."""
    adapt: Literal["off", "watch", "move"] = "watch"
    """watch: notice slow ranks and say what could be done; move: do it."""
    on_death: Literal["end", "recover"] = "end"
    """When a rank dies or freezes: end the run, or go on with another process in its place."""
    copies: OrNone = 10
    """Steps between copies of what each rank has learned, from which a run that recovers goes on; 0: from checkpoints alone."""
    share_gpus: bool = False
    """Let several ranks run on one GPU."""
    reserve_memory: Share = 0.0
    """Share of each GPU's memory that is taken at the start."""
    planners: Annotated[int, Field(ge=0, le=64)] = 1
    """Planner processes on each node; 0: every rank plans for itself."""
    budget_steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Steps of search for each batch of dynamic micro-batches."""
    store: Annotated[str, AfterValidator(without_password)] = ""
    """Store between planners and ranks; empty: one of its own."""
    store_timeout: Amount = 60.0
    """Seconds that the store may be away."""
    torch_profile: str = ""
    """Steps of which torch.profiler traces are written, such as 3,4."""


class SaveGroup(_Fields):
    """Which checkpoints are written and kept."""

    every: OrNone = 500
    """Steps between checkpoints, of which there is one every ten minutes besides; 0: only at the end."""
    keep: Count = 2
    """Checkpoints that stay, the newest ones."""


class JobFile(_Fields):
    """One training, from model and raw data to checkpoints."""

    format: Literal["penstock-job"] = "penstock-job"
    """What kind of file this is."""
    version: Literal[1] = 1
    """Of the format."""
    out: str
    """Folder of the run: checkpoints, steps, spans, and this file."""
    model: ModelGroup
    data: DataGroup
    plan: PlanGroup = PlanGroup()
    train: TrainGroup = TrainGroup()
    save: SaveGroup = SaveGroup()

    def with_values(self, **fields: Any) -> JobFile:
        """The job with some fields replaced, by dotted names with two underscores for the dot: `train__steps=10`."""
        return job_from(self.model_dump(), {name.replace("__", "."): value for name, value in fields.items()}, "the job")


_GROUPS: dict[str, type[_Fields]] = {
    "model": ModelGroup, "data": DataGroup, "plan": PlanGroup, "train": TrainGroup, "save": SaveGroup,
}  # fmt: skip
_KNOWN = {"": [*JobFile.model_fields], **{name: [*group.model_fields] for name, group in _GROUPS.items()}}


def read_job(path: str | Path) -> dict[str, Any]:
    """The fields of a job file, of a version that this Penstock knows; `job_from` checks them."""
    found = read_yaml(path, "job file")
    if not isinstance(found, dict):
        raise InputError(f"job file '{path}' holds {type(found).__name__}; groups such as `model:` and `data:` were expected.")
    if found.get("format", FORMAT) != FORMAT or found.get("version", VERSION) != VERSION:
        raise InputError(
            f"job file '{path}' is of format {found.get('format')!r}, version {found.get('version')!r}; this Penstock reads '{FORMAT}', "
            f"version {VERSION}."
        )
    return found


def job_from(values: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> JobFile:
    """The job of some fields, with others put in by their dotted names; `where` names the origin in errors."""
    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        if field not in _KNOWN.get(group, ()) or (not group and field in _GROUPS):
            known = [one for one, _ in dotted_fields()]
            of_groups = [one for one in known if one.endswith(f".{name}")]
            raise InputError(f"a job has no field '{name}'. {near_misses(name, of_groups or known)}")
        if group and not isinstance(merged.setdefault(group, {}), dict):
            merged[group] = {}
        (merged[group] if group else merged)[field] = value
    path = merged.get("data", {}).get("path") if isinstance(merged.get("data"), dict) else None
    if isinstance(path, str):
        merged["data"]["path"] = [path]
    try:
        return JobFile.model_validate(merged)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, where, _KNOWN)) from None


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Parses `--set train.lr=1e-5`: dotted names and YAML values."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set is '{text}'; a field and a value such as train.lr=1e-5 were expected.")
        try:
            given = parsed_yaml(value, "--set", "the value of")
            is_name = isinstance(given, (int, float)) and not isinstance(given, bool) and _holds_text(name.strip())
            found[name.strip()] = value.strip() if is_name else given
        except InputError:
            raise InputError(
                f"--set is {short_repr(text)}, of which {short_repr(value)} is not a value. Put text with special characters in quotes."
            ) from None
    return found


def _holds_text(name: str) -> bool:
    """Whether a field's value is text, also where it reads like a number: `data.split=1`."""
    group, _, field = name.rpartition(".")
    known = _GROUPS.get(group, JobFile).model_fields.get(field)
    return known is not None and str in (known.annotation, *get_args(known.annotation))


def dotted_fields() -> Iterator[tuple[str, str]]:
    """(name, what it means) of every field of a job, groups by their fields."""
    for name, field in JobFile.model_fields.items():
        if name not in _GROUPS:
            yield name, field.description or ""
    for group, kind in _GROUPS.items():
        for name, field in kind.model_fields.items():
            yield f"{group}.{name}", field.description or ""


def anywhere(job: JobFile) -> JobFile:
    """The job with absolute paths, so that it means the same in every folder: of its run always, of other things where they are here. What
    is no path, such as a name of the catalogue, of a downloaded model or of a kind of cluster, stays as it is."""
    model, plan = job.model, job.plan
    costs, store = _behind("profile:", plan.costs), _behind("file:", job.train.store)
    weights = model.weights if model.weights in ("auto", "none") else absolute_source(_absolute(model.weights))
    cluster = _absolute(plan.cluster) if plan.cluster.strip().lower() != "local" and os.path.isfile(plan.cluster) else plan.cluster
    return job.with_values(
        out=str(Path(job.out).absolute()), model__source=absolute_source(model.source), model__weights=weights,
        data__path=[_absolute(path) for path in job.data.path], data__tokenizer=job.data.tokenizer and _absolute(job.data.tokenizer),
        plan__cluster=cluster, plan__costs=costs, plan__file=plan.file and _absolute(plan.file), train__store=store,
    )  # fmt: skip


def absolute_source(text: str) -> str:
    """A model's source with its whole path, as `module:/home/me/net.py:make` for `module:net.py:make`."""
    if text.startswith("module:"):
        name, colon, function = text.removeprefix("module:").rpartition(":")
        return f"module:{_absolute(name)}{colon}{function}"
    if text.endswith((".yaml", ".yml", ".json")) and ":" not in text:
        return _absolute(text)
    return _behind("transformers:", _behind("hf:", text))


def _behind(prefix: str, text: str) -> str:
    return prefix + _absolute(text.removeprefix(prefix)) if text.startswith(prefix) else text


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if os.path.exists(path) else path


def changed(before: JobFile, after: JobFile) -> list[str]:
    """`train.lr: 0.0003 → 1e-05` for each field that differs; the same file is no difference, however its path was written."""
    before, after, found = anywhere(before), anywhere(after), []
    for name, _ in dotted_fields():
        was, is_ = _value(before, name), _value(after, name)
        if was != is_:
            found.append(f"{name}: {was} → {is_}")
    return found


def _value(job: JobFile, name: str) -> Any:
    found: Any = job
    for part in name.split("."):
        found = getattr(found, part)
    return found


def write_job(path: str | Path, job: JobFile) -> None:
    """Writes a job with what each field means above it."""
    def line(indent: str, name: str, value: Any, meaning: str | None) -> str:
        text = yaml_text({name: value}).strip()[1:-1]
        return (f"{indent}# {meaning}\n" if meaning else "") + f"{indent}{text}\n"

    parts = ["# `penstock train` with this file repeats the training, or goes on with it; see docs/reference/job.md.\n"]
    parts += [line("", name, getattr(job, name), None) for name in JobFile.model_fields if name not in _GROUPS]
    for group, kind in _GROUPS.items():
        held, fields = getattr(job, group), kind.model_fields.items()
        parts += [f"\n{group}:\n", *(line("  ", name, getattr(held, name), field.description) for name, field in fields)]
    write_text(path, "".join(parts))
