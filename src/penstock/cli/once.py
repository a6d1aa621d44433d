"""Commands that refuse an option given twice, of whose two values one would be ignored in silence."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from penstock.errors import InputError

__all__ = ["OnceCommand", "refuse_twice"]


class OnceCommand(TyperCommand):
    """A command whose options, but for those that are lists, are given at most once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_twice(self, ctx, args)
        return super().parse_args(ctx, args)


def refuse_twice(command: Any, ctx: Any, args: list[str]) -> None:
    """Refuses words in which an option of one value comes more than once."""
    _, _, given = command.make_parser(ctx).parse_args(args=list(args))  # every option as often as it was written
    for option, count in Counter(option for option in given if not option.multiple and option.param_type_name == "option").items():
        if count > 1:
            raise InputError(f"{option.opts[0]} is given {count} times. Give it once.")
