"""Programs of several global batches: where they end, who plans them, and what ranks get."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from runtime_cases import make_case

from penstock.data.dataset import open_data
from penstock.data.forms import form_of
from penstock.data.loader import ProgramLoader
from penstock.data.planners import BatchSource, entries_of, run_planner
from penstock.data.planning import ProgramPlanner, sample_ids
from penstock.data.samples import LoadedProgram
from penstock.data.windows import Drains
from penstock.plans.plan import MicroBatching
from penstock.programs.binary import decode, encode
from penstock.programs.text import format_program, parse_program
from penstock.stores import Job
from penstock.stores.memory import MemoryValues
from penstock.stores.ring import Ring

CHOICE = {"family": "llama", "pp": 2, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
          "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip
JOB = Job("job", b"k" * 32, 2)


def starts(drains: Drains, last: int) -> Iterator[int]:
    step = 0
    while step < last:
        yield step
        step = drains.after(step)


@pytest.mark.parametrize(
    ("drains", "expected"),
    [
        (Drains(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (Drains(5), [0, 5, 10]),
        (Drains(5, (4,)), [0, 4, 8]),
        (Drains(5, (0, 7)), [0, 5, 7]),
        (Drains(5, (), (2, 3)), [0, 2, 3, 8]),
        (Drains(3, (4,), (9,)), [0, 3, 4, 7, 8, 9]),
    ],
)
def test_where_programs_begin(drains: Drains, expected: list[int]) -> None:
    assert list(starts(drains, 12)) == expected
    for step in range(12):  # whoever begins within one ends where all do
        assert drains.after(step) in {*expected, *starts(drains, 20)}


def planner_of(data: str, drains: Drains) -> ProgramPlanner:
    """Of two ranks that train asynchronously, six samples in two micro-batches at a time."""
    case = make_case(CHOICE, 3, vocab=384)
    plan = replace(case.plan, schedule="pipedream", global_batch=6, micro_batching=MicroBatching("packed", "fixed", 4))
    return ProgramPlanner(plan, case.model, None, form_of(case.model, open_data(data)), drains=drains)


def test_planners_and_ranks_agree_on_programs_of_several_batches(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine steps as five programs of two planners, which hold at most three batches each."""
    values, opened, planner = MemoryValues(), open_data(data), planner_of(data, Drains(3, (4,), (9,)))
    source, job, plan = BatchSource(data, samples_per_batch=6, num_steps=9), JOB, planner.plan
    for module in ("loader", "planners"):
        monkeypatch.setattr(f"penstock.data.{module}.open_store", lambda address, job, **_: Ring(values, job, wait_s=60))
    monkeypatch.setattr("penstock.data.planners._beat", lambda watch: None)
    loaders = [ProgramLoader(source, planner, rank, address="memory:", job=job, starts_planners=False) for rank in plan.ranks]
    with ThreadPoolExecutor(4) as threads:
        planning = [threads.submit(run_planner, source, planner, "memory:", job, index, 2, [0.0] * 3) for index in range(2)]
        found = [threads.submit(list[LoadedProgram], loader) for loader in loaders]
        ranks = [one.result(60) for one in found]
        assert all(one.result(60) is None for one in planning)
    batches = loaders[0].batches
    for loaded in ranks:
        programs = [one.program for one in loaded]
        assert [(one.iteration, one.num_batches, one.ends) for one in programs] == [
            (0, 3, (2, 4, 6)), (3, 1, ()), (4, 3, (2, 4, 6)), (7, 1, ()), (8, 1, ())
        ]  # fmt: skip
        alone = ProgramLoader(source, planner, programs[0].rank, planners=0)
        assert [encode(one.program) for one in alone] == [encode(one) for one in programs]
        for one in loaded:
            for number in range(one.program.num_batches):
                step, micros = one.program.iteration + number, one.program.of_batch(number)
                assert [sample for micro in micros for sample in micro.samples] == sample_ids(batches[step], len(opened))
                assert {one.program.iteration_of(micro.index) for micro in micros} == {step}
                first = micros[0]
                assert one.sample(step, first.samples[0], first.lengths[0], 0).inputs.shape == (first.lengths[0],)
        assert [decode(encode(one)) for one in programs] == programs == [parse_program(format_program(one)) for one in programs]


def test_a_program_is_acknowledged_with_all_its_batches(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that takes over begins after the last that all ranks have: where a program begins, not in the middle of one."""
    planner, source, job, values = planner_of(data, Drains(3)), BatchSource(data, samples_per_batch=6, num_steps=6), JOB, MemoryValues()
    monkeypatch.setattr("penstock.data.loader.open_store", lambda address, job, **_: Ring(values, job, wait_s=60))
    store = Ring(values, job, wait_s=60)
    for step in (0, 3):
        entries, _ = entries_of(planner, *source.open(), step)
        store.publish(step, dict(enumerate(entries.values())))
    loaders = [ProgramLoader(source, planner, rank, address="memory:", job=job, starts_planners=False) for rank in planner.plan.ranks]
    assert [[one.program.iteration for one in loader] for loader in loaders] == [[0, 3], [0, 3]]
    assert store.done() == 5
