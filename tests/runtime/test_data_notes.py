"""What is said of a plan and its data before the first step."""

from __future__ import annotations

from dataclasses import replace

from penstock.data.dataset import open_data
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.runtime.data_notes import data_notes
from penstock.runtime.request import TrainRequest


def request_for(data: str, seq_length: int) -> TrainRequest:
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=2, pp=2, seq_length=seq_length)
    return TrainRequest(plan, data, steps=2, out="run")


def test_a_plan_for_longer_samples_says_what_would_be_faster(data: str) -> None:
    shorter, cut = data_notes(request_for(data, 128))
    assert "assumes 128 tokens a sample" in shorter and f"penstock search --data {data}" in shorter and "× faster" in shorter
    assert "are cut to fit the plan's 128 tokens" in cut and "are not trained on" in cut
    lengths = open_data(data).lengths
    lost = sum(max(0, int(own + its) - 129) for own, its in zip(*lengths, strict=True))
    tokens = sum(int(side.sum()) for side in lengths)
    assert f"{lost:,} of {tokens:,} tokens ({lost / tokens:.1%})" in cut


def test_a_plan_for_the_lengths_that_are_there_says_nothing_of_them(data: str) -> None:
    asked = request_for(data, 128)
    dynamic = replace(asked, plan=replace(asked.plan, micro_batching=MicroBatching("packed", "dynamic")))
    assert not [note for note in data_notes(dynamic) if "assumes" in note]
    assert not [note for note in data_notes(request_for(data, 32)) if "assumes" in note]
