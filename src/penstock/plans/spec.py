"""What a plan file may contain. Imported only when a plan is read or written: pydantic takes longer to import than this room."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.errors import InputError
from penstock.files import describe_validation_error
from penstock.plans.plan import MAX_PATTERNS
from penstock.plans.texts import OP_RANGE_PATTERN, OPS_PATTERN, RANKS_PATTERN, parse_op_range, parse_ops, parse_ranks
from penstock.schedules.rules import SCHEDULES

__all__ = [
    "FORMAT",
    "VERSION",
    "DegreesSpec",
    "MemorySpec",
    "MicroBatchingSpec",
    "PlanSpec",
    "PredictedSpec",
    "RunSpec",
    "StageSpec",
    "validate",
]

FORMAT: Literal["penstock-plan"] = "penstock-plan"
VERSION: Literal[1] = 1


def _parsed(parse: Callable[[object], Any]) -> BeforeValidator:
    """A validator that reads a text, its error reported as one of the field."""

    def read(value: object) -> Any:
        try:
            return parse(value)
        except InputError as error:
            raise PydanticCustomError("text", "{reason}", {"reason": str(error)}) from None

    return BeforeValidator(read)


def _text(pattern: str, description: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "description": description})


def _name_or_mapping(value: object) -> object:
    if not isinstance(value, str | dict) or not value:
        raise InputError("a name, a path or a mapping was expected")
    texts = [value] if isinstance(value, str) else [value[key] for key in ("base", "family", "name") if key in value]
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise InputError(f"{reprlib.repr(text)} was given, a name was expected")
    return value


def _schedule_name(value: object) -> object:
    if not isinstance(value, str) or value not in SCHEDULES:
        raise InputError(f"a schedule was expected: {', '.join(map(repr, SCHEDULES))}")
    return value


Count = Annotated[int, Field(ge=1, le=10_000_000)]
Size = Annotated[int, Field(ge=0, le=10_000_000)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Reference = Annotated[str | dict[str, Any], _parsed(_name_or_mapping)]
OpRangeText = Annotated[tuple[int, int], _parsed(parse_op_range), _text(OP_RANGE_PATTERN, "ops FIRST:END, END not included")]
OpsText = Annotated[tuple[tuple[int, int], ...], _parsed(parse_ops), _text(OPS_PATTERN, "op ranges FIRST:END joined by commas")]
RankText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,6})$")]
LinkText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,6})-(0|[1-9][0-9]{0,6})$")]
RanksText = Annotated[tuple[int, ...], _parsed(parse_ranks), _text(RANKS_PATTERN, "ranks such as 0-3,8, ends included")]

ScheduleName = Annotated[str, _parsed(_schedule_name), WithJsonSchema({"enum": list(SCHEDULES), "type": "string"})]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DegreesSpec(_Spec):
    """Over how many devices each axis splits the stage; cp and ep are 1 today."""

    tp: Count = 1
    dp: Count = 1
    cp: Count = 1
    ep: Count = 1


class RunSpec(_Spec):
    """Ops of a stage with degrees or a split of their own."""

    ops: OpRangeText
    tp: Count
    dp: Count
    algo: Size = 0


class StageSpec(_Spec):
    """Ops on a group of devices in each replica."""

    ops: OpRangeText
    devices: Annotated[list[RanksText], Field(min_length=1, description="one entry for each replica")]
    degrees: DegreesSpec = DegreesSpec()
    runs: list[RunSpec] = []
    recompute: Annotated[
        list[OpsText], Field(max_length=MAX_PATTERNS, description="patterns a micro-batch may use; the first is the default")
    ] = []
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    sequence_parallel: bool = False


class MicroBatchingSpec(_Spec):
    """How a global batch becomes micro-batches."""

    layout: Literal["padded", "packed"]
    policy: Literal["fixed", "dynamic"]
    samples: Count | None = None
    max_tokens: Count | None = None
    per_replica: Annotated[
        list[Count], Field(description="micro-batches of each replica under the policy fixed; none: all replicas run as many")
    ] = []
    slower: Annotated[
        dict[RankText, Annotated[list[Positive], Field(min_length=3, max_length=3)]],
        Field(description="ranks that take longer than the costs say: how many times for matrix products, attention, all else"),
    ] = {}
    slower_links: Annotated[
        dict[LinkText, Positive], Field(description="pairs of ranks whose messages take longer than the costs say, and how many times")
    ] = {}


class MemorySpec(_Spec):
    """Bytes on the fullest device of a stage."""

    weights_bytes: Bytes = 0
    gradients_bytes: Bytes = 0
    master_weights_bytes: Bytes = 0
    moments_bytes: Bytes = 0
    activations_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    buffers_bytes: Bytes = 0
    slack_bytes: Bytes = 0
    context_bytes: Bytes = 0


class PredictedSpec(_Spec):
    """What the planner expects of one iteration."""

    time_s: Positive
    costs: Name
    tokens_per_s: NonNegative | None = None
    price_usd: NonNegative | None = None
    price_usd_per_h: NonNegative | None = None
    lower_bound_s: NonNegative | None = None
    memory: list[MemorySpec] = []


class PlanSpec(_Spec):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True, title="Penstock plan")

    format: Literal["penstock-plan"]
    version: Literal[1]
    model: Reference
    cluster: Reference
    precision: Literal["bf16", "fp16", "fp32"]
    gradients: Literal["", "bf16", "fp16", "fp32"] = ""
    optimizer: Literal["adamw", "lamb", "sgd"]
    global_batch: Count
    seq_length: Size
    dec_length: Size = 0
    num_replicas: Count
    micro_batching: MicroBatchingSpec
    schedule: ScheduleName
    stages: Annotated[list[StageSpec], Field(min_length=1)]
    costs: Name = "roofline"
    predicted: PredictedSpec | None = None
    notes: list[str] = []


_MODELS: dict[str, type[_Spec]] = {
    "": PlanSpec,
    "micro_batching": MicroBatchingSpec,
    "stages": StageSpec,
    "degrees": DegreesSpec,
    "runs": RunSpec,
    "predicted": PredictedSpec,
    "memory": MemorySpec,
}


def validate(data: dict[str, Any], where: str) -> PlanSpec:
    """The checked content of a plan; `where` names it in the error."""
    try:
        return PlanSpec.model_validate(data)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, where, {name: model.model_fields for name, model in _MODELS.items()})) from None
