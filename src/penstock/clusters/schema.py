"""What a cluster file may contain. Imported only when a file is read: pydantic takes longer to import than this room."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.errors import InputError
from penstock.files import describe_validation_error, short_repr

__all__ = ["ClusterSpec", "DeviceSpec", "LinkSpec", "NodeSpec", "OverrideSpec", "validate_cluster"]


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _name_as_mapping(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


# No device, link or bill comes near this; products of larger figures would no longer be numbers.
_MOST = 1e12
Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Name = Annotated[str, Field(min_length=1)]
Endpoint = Annotated[str, BeforeValidator(_number_as_text)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LinkSpec(_Spec):
    """A link: a kind from the catalogue, figures, or a kind with some figures replaced."""

    kind: Name | None = None
    bandwidth_gb_per_s: Positive | None = None
    latency_us: NonNegative | None = None


NamedLink = Annotated[LinkSpec, BeforeValidator(_name_as_mapping)]


class OverrideSpec(LinkSpec):
    """A link between two sets of ranks: a rank (3), ranks ('0-7'), nodes ('node:2', 'node:0-3'), or a node name."""

    between: Annotated[list[Endpoint], Field(min_length=2, max_length=2)]


class DeviceSpec(_Spec):
    """A device kind of the user's own; rates are dense, in 10¹² per second."""

    name: Name
    memory_gb: Positive
    memory_bandwidth_gb_per_s: Positive
    fp32_tflops: Positive
    tf32_tflops: Positive | None = None
    fp16_tflops: Positive | None = None
    bf16_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    intra: NamedLink = LinkSpec(kind="pcie4")
    inter: NamedLink = LinkSpec(kind="ethernet-100g")


class NodeSpec(_Spec):
    """Equal nodes: a catalogue `instance`, or a `device` and how many `gpus`; the rest replaces what those imply."""

    instance: Name | None = None
    name: Name | None = None
    device: Name | None = None
    gpus: Count | None = None
    intra: NamedLink | None = None
    inter: NamedLink | None = None
    rails: Count | None = None
    price_usd_per_h: NonNegative | None = None
    count: Count = 1
    memory_limit_gb: Positive | None = None


class ClusterSpec(_Spec):
    """The whole file."""

    name: Name | None = None
    devices: list[DeviceSpec] = []
    nodes: Annotated[list[NodeSpec], Field(min_length=1)]
    links: list[OverrideSpec] = []


_MODELS: dict[str, type[_Spec]] = {
    "": ClusterSpec,
    "devices": DeviceSpec,
    "nodes": NodeSpec,
    "links": OverrideSpec,
    "intra": LinkSpec,
    "inter": LinkSpec,
}


def validate_cluster(data: Any, what: str) -> ClusterSpec:
    """The checked content of a cluster file; `what` names it in the error."""
    if not isinstance(data, dict):
        raise InputError(f"{what} holds {short_repr(data)}, a mapping with the field 'nodes' was expected.")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, what, {name: model.model_fields for name, model in _MODELS.items()})) from None
