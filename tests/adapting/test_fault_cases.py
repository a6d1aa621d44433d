"""The fault matrix of `benchmarks/faults.py`: what is in it, and what its covering set covers."""

from __future__ import annotations

import itertools

from benchmark_modules import load_benchmark

from penstock.runtime.recovering.faults import KINDS, PHASES


def test_a_covering_set_has_all_that_can_meet() -> None:
    matrix = load_benchmark("fault_cases")
    found, refused = matrix.cases()
    assert len(found) + sum(map(len, refused.values())) == len(KINDS) * len(PHASES) * len(matrix.VICTIMS)
    assert {one.kind for one in found} == set(KINDS) and {one.phase for one in found} == set(PHASES)
    assert {one.victim for one in found} == set(matrix.VICTIMS) and all(refused)
    few = matrix.covering(found)
    for names in itertools.combinations(("kind", "phase", "victim"), 2):
        pairs, covered = ({tuple(getattr(one, name) for name in names) for one in cases} for cases in (found, few))
        assert pairs == covered
    assert len(few) < len(found) / 3


def test_parts_have_every_case_once_and_as_many_of_each_scene() -> None:
    matrix = load_benchmark("fault_cases")
    found, _ = matrix.cases()
    parts = [matrix.part_of(found, number, 7) for number in range(1, 8)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in found)
    for scene in (matrix.PIPELINE, matrix.TENSOR, matrix.NODES):
        counts = [sum(case.victim.scene == scene for case in part) for part in parts]
        assert max(counts) - min(counts) <= 1
