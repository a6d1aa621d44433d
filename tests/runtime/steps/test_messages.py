"""Words after each step as rows of numbers, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.models.micro_batch import MicroBatch
from penstock.runtime.request import EvalRecord
from penstock.runtime.steps.messages import StepMessage, samples_digest, whole_digest
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.steps import StepRecord

FULL = StepRecord(
    7, 5.25, 0.5, 2**40 + 1, 1e6, 0.25, 3e-4, 1.5, True, 2**41 + 3, 2**42, 0.125, 0.0, 0.75, 1.9e9, 400.0
)  # fmt: skip


@pytest.mark.parametrize("record", [None, StepRecord(0), StepRecord(3, loss=1.0), FULL])
@pytest.mark.parametrize("evaluated", [None, EvalRecord(8, 2.5, 0.5)])
def test_a_word_comes_back_from_its_numbers(record: StepRecord | None, evaluated: EvalRecord | None) -> None:
    word = StepMessage(True, 15, False, True, 12345, 70.0, 2**43 + 1, RankFigures(1.0, 2.0, 3.0, 4.0, 5.0), record, evaluated)
    back = StepMessage.of_row(word.row())
    assert back == word
    if record is not None:
        assert msgspec.json.encode(back.record) == msgspec.json.encode(record)  # counts are integers again


def program(*micro_batches: tuple[int, ...]) -> Any:
    """All that a digest looks at."""
    return SimpleNamespace(micro_batches=[MicroBatch(number, own, "padded") for number, own in enumerate(micro_batches)])


def test_a_digest_knows_samples_but_not_how_they_are_cut() -> None:
    def digest(*replicas: Any) -> str:
        return whole_digest(StepMessage(samples=samples_digest(one.micro_batches)) for one in replicas)

    whole = digest(program((1, 2), (3, 4)))
    assert whole == digest(program((4,), (3, 1, 2))) == digest(program((1, 4)), program((2, 3)))
    others = [program((1, 2), (3, 3))], [program((1, 2), (3,))], [program((1, 2, 3, 4)), program((4,))], []
    assert len({whole, *(digest(*other) for other in others)}) == 5
