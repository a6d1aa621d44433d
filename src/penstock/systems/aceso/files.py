"""Aceso's plan files: the JSON of one plan, field by field, checked as it is read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from penstock.errors import InputError, near_misses, plural
from penstock.files import read_json, write_text
from penstock.systems.tables import Count, validated

__all__ = ["FAMILY_FIELDS", "AcesoPlan", "aceso_text", "read_aceso_plan", "require_consistent", "write_aceso_plan"]

Flag = Annotated[bool, Field(strict=True)]
Bit = Annotated[int, Field(strict=True, ge=0, le=1)]

FAMILY_FIELDS = {
    "gpt": ("seq_length", "max_position_embeddings", "num_attention_heads", "hidden_size"),
    "t5": ("encoder_seq_length", "decoder_seq_length", "max_position_embeddings", "num_attention_heads", "kv_channels", "hidden_size",
           "ffn_hidden_size"),
    "resnet": ("in_channels", "width_factor"),
}  # fmt: skip
"""The fields that only one family's plans have, in the order of the file."""


@dataclass(frozen=True)
class AcesoPlan:
    """A plan as Aceso writes it; `micro_batch_size` is that of a whole stage, which each op's dp divides."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic's name for it)

    model_name: str
    model_size: str
    num_layers: Count | Annotated[tuple[Count, ...], Field(min_length=1)]
    global_batch_size: Count
    micro_batch_size: Count
    num_stages: Count
    num_gpus: tuple[Count, ...]
    checkpoint_activations: tuple[Flag, ...]
    resharding_stages: tuple[Flag, ...]
    num_ops_in_each_stage: tuple[Count, ...]
    model_parallel_size_of_each_op: tuple[tuple[Count, ...], ...]
    data_parallel_size_of_each_op: tuple[tuple[Count, ...], ...]
    recompute_ops: tuple[tuple[Bit, ...], ...]
    algo_of_each_op: tuple[tuple[Bit, ...], ...]
    seq_length: Count | None = None
    max_position_embeddings: Count | None = None
    num_attention_heads: Count | None = None
    hidden_size: Count | None = None
    encoder_seq_length: Count | None = None
    decoder_seq_length: Count | None = None
    kv_channels: Count | None = None
    ffn_hidden_size: Count | None = None
    in_channels: Count | None = None
    width_factor: Count | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the file in its order."""
        own = {name: value for name, value in asdict(self).items() if value is not None}
        order = ["model_name", "model_size", "num_layers", *FAMILY_FIELDS[self.model_name]]
        return {name: _plain(own[name]) for name in [*order, *(name for name in own if name not in order)]}

    def per_op(self, stage: int) -> list[tuple[int, int, int, int]]:
        """(tp, dp, algo, recomputed) of each op of a stage."""
        lists = (self.model_parallel_size_of_each_op, self.data_parallel_size_of_each_op, self.algo_of_each_op, self.recompute_ops)
        return list(zip(*(values[stage] for values in lists), strict=True))


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def read_aceso_plan(path: str | Path) -> AcesoPlan:
    """The plan of one of Aceso's JSON files, checked."""
    plan = validated(AcesoPlan, read_json(path, "Aceso plan"), f"Aceso plan '{path}'")
    require_consistent(plan, f"Aceso plan '{path}'")
    return plan


def aceso_text(plan: AcesoPlan) -> str:
    """The file's text as Aceso itself writes it, byte for byte; only a consistent plan has one."""
    require_consistent(plan, "the Aceso plan")
    return json.dumps(plan.to_dict(), indent=4)


def write_aceso_plan(path: str | Path, plan: AcesoPlan) -> None:
    """Writes a file that `read_aceso_plan` reads back."""
    write_text(path, aceso_text(plan))


def require_consistent(plan: AcesoPlan, where: str) -> None:
    """Refuses a plan whose fields contradict each other; `where` names it in the error."""
    problems = list(_problems(plan))
    if problems:
        raise InputError(f"{where} is not valid:\n" + "\n".join(f"  {problem}" for problem in problems[:10]))


def _problems(plan: AcesoPlan) -> Iterator[str]:
    """What the types cannot say: sizes of the family, lists that belong together, degrees that divide."""
    if plan.model_name not in FAMILY_FIELDS:
        yield f"model_name is {plan.model_name!r}. {near_misses(plan.model_name, FAMILY_FIELDS)}"
        return
    for name in dict.fromkeys(name for fields in FAMILY_FIELDS.values() for name in fields):
        belongs = name in FAMILY_FIELDS[plan.model_name]
        if belongs != (getattr(plan, name) is not None):
            yield f"{name} is {'missing' if belongs else 'not a field'}; a plan of {plan.model_name} has {'it' if belongs else 'none'}."
    if (plan.model_name == "resnet") != isinstance(plan.num_layers, tuple):
        yield f"num_layers is {plan.num_layers}; a list of blocks belongs to resnet, a number to the others."
    if plan.global_batch_size % plan.micro_batch_size:
        yield f"global_batch_size {plan.global_batch_size} is not a multiple of micro_batch_size {plan.micro_batch_size}."
    lists = ("num_gpus", "checkpoint_activations", "resharding_stages", "num_ops_in_each_stage", "model_parallel_size_of_each_op",
             "data_parallel_size_of_each_op", "recompute_ops", "algo_of_each_op")  # fmt: skip
    ragged = [name for name in lists if len(getattr(plan, name)) != plan.num_stages]
    yield from (f"{name} has {plural(len(getattr(plan, name)), 'entry')}, num_stages is {plan.num_stages}." for name in ragged)
    if not ragged:
        for stage in range(plan.num_stages):
            yield from _stage_problems(plan, stage, lists[4:])


def _stage_problems(plan: AcesoPlan, stage: int, lists: Sequence[str]) -> Iterator[str]:
    expected = plan.num_ops_in_each_stage[stage]
    wrong = [name for name in lists if len(getattr(plan, name)[stage]) != expected]
    if wrong:
        yield f"{wrong[0]}.{stage} has {plural(len(getattr(plan, wrong[0])[stage]), 'entry')}, num_ops_in_each_stage says {expected}."
        return
    ops = plan.per_op(stage)
    for op, (tp, dp, _, _) in enumerate(ops):
        if tp * dp != plan.num_gpus[stage]:
            yield f"model_parallel_size_of_each_op.{stage}.{op} is {tp} and dp {dp}, but num_gpus.{stage} is {plan.num_gpus[stage]}."
            break
        if plan.micro_batch_size % dp:
            yield f"data_parallel_size_of_each_op.{stage}.{op} is {dp}, which does not divide micro_batch_size {plan.micro_batch_size}."
            break
    if plan.checkpoint_activations[stage] != any(op[3] for op in ops):
        yield f"checkpoint_activations.{stage} is {plan.checkpoint_activations[stage]}, against recompute_ops.{stage}."
    if not plan.resharding_stages[stage] and len({op[:3] for op in ops}) > 1:
        yield f"resharding_stages.{stage} is False, but the ops of the stage differ in tp, dp or algo."
