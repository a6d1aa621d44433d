"""Files that say what slows a run down. Imported only when one is read: pydantic takes longer to import than this room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.errors import InputError
from penstock.files import describe_validation_error, read_yaml
from penstock.timing.disturbance import Disturbance, DisturbanceChange, DisturbanceStrike

__all__ = ["parse_disturbance", "read_disturbance"]

Count = Annotated[int, Field(ge=0, le=10**9)]
Struck = Count | Annotated[str, Field(pattern=r"^(([0-9]{1,9}|node [0-9]{1,9}|store)@[a-z]+|node [0-9]{1,9}|store)$")]
"""A rank, `node 1`, or `store`, each also in a phase of the step: `1@backward`."""


class _ChangeSpec(BaseModel):
    """One of `rank`, `link` and `data`, and what happens to it; or who is to `kill` or `freeze`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rank: Count | None = None
    link: Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")] | None = None
    data: Annotated[bool, Field()] | None = None
    kill: Struck | None = None
    freeze: Struck | None = None
    factor: float | None = None
    shape: str = "step"
    first: Annotated[Count, Field(alias="from")] = 0
    steps: Count = 0

    def change(self) -> DisturbanceChange | DisturbanceStrike:
        """What is meant."""
        if self.kill is not None or self.freeze is not None:
            return self._strike()
        named = [name for name in ("rank", "link", "data") if getattr(self, name) is not None]
        if len(named) != 1 or self.data is False:
            raise InputError(f"{len(named)} of rank, link and data are given; name one, such as `rank: 3`, `link: 0-1` or `data: true`.")
        if self.factor is None:
            raise InputError("factor is missing: how many times as long does it take?")
        ranks = () if self.data else (self.rank,) if self.link is None else tuple(map(int, self.link.split("-")))
        return DisturbanceChange(ranks, self.factor, self.shape, self.first, self.steps)  # type: ignore[arg-type]


    def _strike(self) -> DisturbanceStrike:
        given = sorted(self.model_fields_set - {"first"})
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} do not go together; who is struck has a step (`from`), and nothing else.")
        who, _, phase = str(self.kill if self.freeze is None else self.freeze).partition("@")
        rank = int(who) if who.isdecimal() else None
        node = int(who.removeprefix("node ")) if who.startswith("node") else None
        return DisturbanceStrike("kill" if self.freeze is None else "freeze", rank, phase or "forward", self.first, node)


_FIELDS = {"": ("rank", "link", "data", "kill", "freeze", "factor", "shape", "from", "steps")}


def read_disturbance(path: str | Path) -> Disturbance:
    """The disturbance of a YAML file: a list of changes."""
    return parse_disturbance(read_yaml(path, "disturbance file"), f"disturbance file '{path}'")


def parse_disturbance(data: Any, what: str) -> Disturbance:
    """The disturbance that the YAML value `data` describes; `what` names its origin in errors."""
    try:
        specs = TypeAdapter(list[_ChangeSpec]).validate_python(data)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, what, _FIELDS)) from None
    changes = []
    for index, spec in enumerate(specs):
        try:
            changes.append(spec.change())
        except InputError as error:
            raise InputError(f"{what}: {index}: {error}") from None
    slower = tuple(one for one in changes if isinstance(one, DisturbanceChange))
    return Disturbance(slower, tuple(one for one in changes if isinstance(one, DisturbanceStrike)))
