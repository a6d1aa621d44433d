"""What each kind of price of a family's options begins with: the family, and answers that are worked out once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from penstock.search.space.families import PlanFamily
    from penstock.search.space.request import Request

__all__ = ["FamilyPart", "remembered"]


@dataclass(frozen=True, eq=False)
class FamilyPart:
    """Something of a family's options; its methods may be `remembered`."""

    family: PlanFamily

    @property
    def request(self) -> Request:
        """The request that the family serves."""
        return self.family.request

    @cached_property
    def _answers(self) -> dict[tuple[Any, ...], Any]:
        return {}


Part = TypeVar("Part", bound=FamilyPart)
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def remembered(method: Callable[Concatenate[Part, Given], Answer]) -> Callable[Concatenate[Part, Given], Answer]:
    """The method, which works each answer out once for an object, as `functools.cache` would without outliving it."""

    @wraps(method)
    def answer(part: Part, /, *given: Given.args, **named: Given.kwargs) -> Answer:
        key = (method.__name__, *given)
        if key not in part._answers:
            part._answers[key] = method(part, *given, **named)
        found: Answer = part._answers[key]
        return found

    return answer
