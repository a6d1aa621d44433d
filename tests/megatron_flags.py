"""The flags of an export to Megatron-LM as a shell takes them."""

from __future__ import annotations

import shlex

from penstock.interop.megatron import megatron_text
from penstock.plans.plan import Plan

__all__ = ["megatron_flags"]


def megatron_flags(plan: Plan) -> list[str]:
    """The words of the text that are no remarks."""
    return [word for line in megatron_text(plan).splitlines() if not line.startswith("#") for word in shlex.split(line)]
