"""Searches that are made once for all tests of a file that ask for the same, on other screens or in other words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import search
from penstock.search import Request

__all__ = ["searched_once"]

Told = tuple[str, float, float]


@contextmanager
def searched_once() -> Iterator[None]:
    """Meanwhile `search` and `offers` answer again what they were asked before, and tell the same on the way."""
    find, offer = search.search, search.offers
    found: dict[Any, tuple[Any, list[Told]]] = {}
    offered: dict[Any, Any] = {}

    def remembered(request: Request, *, watch: Callable[..., None] = lambda *_: None, **options: Any) -> Any:
        asked = _asked(request), tuple(sorted(options.items()))
        if asked not in found:
            told: list[Told] = []

            def heard(*words: Any) -> None:
                told.append(words)
                watch(*words)

            found[asked] = find(request, watch=heard, **options), told
        else:
            for words in found[asked][1]:
                watch(*words)
        return found[asked][0]

    def offers(request: Request, steps: int, *others: Any) -> Any:
        asked = _asked(request), steps
        if asked not in offered:
            offered[asked] = offer(request, steps, *others)
        return list(offered[asked][0]), offered[asked][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "search", remembered)
        patch.setattr(search, "offers", offers)
        yield


def _asked(request: Request) -> tuple[Any, ...]:
    source = request.estimator.source
    return (
        request.model.name, request.cluster.name, repr(request.frame), source.name, source.error, request.micro_batches, request.schedules,
        request.memory_limit_bytes, request.narrows,
    )  # fmt: skip
