"""Plans for samples of many lengths: feasible, reproducible, and never slower than judging the same pipelines one by one."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from penstock.batching.plan import SampleLengths
from penstock.batching.planner import costs_for, plan_batch
from penstock.batching.ways import BatchWays
from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.validity import check_plan
from penstock.search import Request
from penstock.search.lengths import (
    LengthsChoice,
    _attended,
    _drawn,
    _judged,
    _of_one_length,
    _pipelines,
    fixed_padded_s,
    search_for_lengths,
)


def lengths(count: int, longest: int, median: int = 60, decoder: bool = False) -> list[SampleLengths]:
    draw = random.Random(3)
    drawn = lambda: max(8, min(longest, round(math.exp(draw.gauss(math.log(median), 1.0)))))  # noqa: E731
    return [SampleLengths(number, drawn(), drawn() if decoder else 0) for number in range(count)]


def request(model: str = "gpt-small", cluster: str = "4xa100-40gb", global_batch: int = 64, limit: float = math.inf) -> Request:
    return Request.of(model, cluster, global_batch, "roofline", None, [], limit)


@pytest.fixture(scope="module")
def found() -> list[LengthsChoice]:
    return search_for_lengths(request(), lengths(300, 256), top=3)


def test_plans_are_valid_and_dynamic_and_say_what_to_expect(found: list[LengthsChoice]) -> None:
    assert [choice.time_s for choice in found] == sorted(choice.time_s for choice in found)
    for choice in found:
        assert check_plan(choice.plan) == []
        assert choice.plan.micro_batching == MicroBatching("packed", "dynamic") and choice.plan.global_batch == 64
        assert choice.plan.predicted is not None and choice.plan.predicted.time_s == choice.time_s
        assert 0 < choice.bound_s <= choice.time_s * (1 + 1e-9)
    layouts = [(choice.plan.num_replicas, tuple(replace(stage, recompute=()) for stage in choice.plan.stages)) for choice in found]
    assert len(set(layouts)) == len(layouts)


def test_interleaved_pipelines_are_judged_too() -> None:
    asked, samples = request(global_batch=32), lengths(32, 256)
    found = uniform_plan("gpt-small", "4xa100-40gb", global_batch=32, micro_batch=2, pp=4, chunks=2, schedule="interleaved")
    (plan,) = _pipelines(asked, [found], samples)
    choice = _judged(plan, [samples], asked, BatchWays())
    assert check_plan(choice.plan) == [] and choice.plan.schedule == "interleaved" and choice.plan.num_chunks == 2
    assert 0 < choice.bound_s <= choice.time_s


def test_what_a_plan_had_to_give_up_is_told() -> None:
    """Such as that gradients are summed in fewer bits, since nothing else fits."""
    asked = request()
    narrow = asked.narrowed().frame
    (plan,) = _pipelines(asked, [narrow], lengths(32, 256))
    assert (plan.gradients, plan.notes) == (narrow.gradients, narrow.notes) and len(plan.notes) > len(asked.frame.notes)


def test_the_same_question_has_the_same_answer(found: list[LengthsChoice]) -> None:
    again = search_for_lengths(request(), lengths(300, 256), top=3)
    assert [choice.plan for choice in again] == [choice.plan for choice in found]


def test_no_uniform_pipeline_is_faster_on_the_same_batches(found: list[LengthsChoice]) -> None:
    """The oracle: all uniform pipelines of the cluster, each with the same batches planned for it."""
    from penstock.batching.planned import with_recompute_choices
    from penstock.plans.references import model_of

    samples = lengths(300, 256)
    batches = list(_drawn(samples, 64))
    times = []
    for pp, tp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        plan = uniform_plan("gpt-small", "4xa100-40gb", pp=pp, tp=tp, replicas=4 // (pp * tp), global_batch=64, micro_batch=1)
        plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic"), seq_length=max(sample.length for sample in samples))
        prices = costs_for(with_recompute_choices(plan, model_of(plan)), plan.seq_length, costs="roofline")
        times.append(sum(plan_batch(batch, prices).predicted_s for batch in batches) / len(batches))
    assert found[0].time_s <= min(times) * (1 + 1e-9)


def test_samples_of_one_length_weigh_the_same() -> None:
    samples = lengths(300, 256)
    frame = _of_one_length(request(), samples).frame
    mean = sum(sample.length for sample in samples) / len(samples)
    assert frame.seq_length == _attended([sample.length for sample in samples]) and frame.global_batch % 4 == 0
    assert frame.global_batch * frame.seq_length == pytest.approx(64 * mean, rel=0.1)


def test_the_length_is_the_mean_of_what_tokens_attend_to() -> None:
    assert _attended([100, 300]) == 248  # a quarter of the tokens in 100, the others in 300: 250, and a multiple of 8
    assert _attended([3, 2]) == 8


def test_batches_have_other_samples_each() -> None:
    samples = [SampleLengths(number, 8 + number) for number in range(12)]
    drawn = [[sample.length for sample in batch] for batch in _drawn(samples, 9)]
    assert sorted(length for batch in drawn for length in batch) == sorted(3 * [*range(8, 20)])  # 4 × 9 are 3 × 12


def test_money_speed_and_memory_are_those_of_the_batches() -> None:
    asked, samples = request(cluster="p4d.24xlarge", global_batch=32), lengths(64, 256)
    found = uniform_plan("gpt-small", "p4d.24xlarge", global_batch=64, micro_batch=2, pp=2, replicas=4)
    (plan,) = _pipelines(asked, [found], samples)
    choice = _judged(plan, [samples[:32], samples[32:]], asked, BatchWays())
    predicted, (one, other) = choice.plan.predicted, choice.batches
    assert predicted is not None and choice.plan.global_batch == 32 and one.peak_bytes != other.peak_bytes
    time_s = (one.predicted_s + other.predicted_s) / 2
    tokens = sum(sample.length for sample in samples) / 2
    assert (predicted.time_s, predicted.tokens_per_s) == (pytest.approx(time_s), pytest.approx(tokens / time_s, rel=0.02))
    assert (predicted.price_usd_per_h, predicted.price_usd) == (32.7726, pytest.approx(32.7726 / 3600 * time_s))
    assert choice.peak_bytes == max(one.peak_bytes, other.peak_bytes)


def test_a_limit_of_memory_holds_for_the_batches_too() -> None:
    samples = lengths(32, 256)
    found = uniform_plan("gpt-small", "4xa100-40gb", global_batch=32, micro_batch=2, pp=2, replicas=2)

    def asked(limit: float = math.inf) -> tuple[Request, Plan]:
        own = request(global_batch=32, limit=limit)
        (plan,) = _pipelines(own, [found], samples)
        return own, plan

    def judged(limit: float = math.inf) -> LengthsChoice:
        own, plan = asked(limit)
        return _judged(plan, [samples], own, BatchWays())

    free_bytes = judged().peak_bytes
    assert judged(0.99 * free_bytes).peak_bytes <= 0.99 * free_bytes
    own, plan = asked()
    assert fixed_padded_s(own, samples, plan) is not None
    own, plan = asked(0.5 * free_bytes)
    assert fixed_padded_s(own, samples, plan) is None


@pytest.mark.parametrize(("held", "count", "batches"), [(300, 64, 4), (64, 64, 1), (10, 64, 4)])
def test_batches_are_drawn_from_what_there_is(held: int, count: int, batches: int) -> None:
    samples = lengths(held, 256)
    found = list(_drawn(samples, count))
    assert len(found) == batches and all([sample.id for sample in batch] == list(range(count)) for batch in found)
    known = {sample.length for sample in samples}
    assert all(sample.length in known for batch in found for sample in batch)


def test_encoders_with_decoders_are_padded() -> None:
    [best] = search_for_lengths(request("t5-small", "2xa100-40gb", 32), lengths(64, 256, decoder=True), top=1)
    assert best.plan.micro_batching.layout == "padded" and best.plan.dec_length > 0 and check_plan(best.plan) == []


def test_what_fits_nowhere_is_said() -> None:
    with pytest.raises(InfeasibleError, match="The model takes 256 positions"):
        search_for_lengths(request(), [*lengths(60, 256), SampleLengths(60, 300)])
    with pytest.raises(InfeasibleError, match=r"--memory-limit allows 1\.0 GB"):
        search_for_lengths(request("gpt-1.3b", "1xa100-40gb", limit=1e9), lengths(60, 256))
    with pytest.raises(InputError, match="takes images"):
        search_for_lengths(request("vgg16"), lengths(60, 256))
