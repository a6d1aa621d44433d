"""Ranks along named axes, also those that no plan has yet, and runs of ops with equal degrees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.plans.degrees import Axis, DegreeRun, Degrees, algos_of, parts_of, recomputed_in
from penstock.plans.plan import OpRun, Stage

degrees = st.builds(Degrees, *(st.sampled_from([1, 2, 3]),) * 4)


def test_the_drawn_table() -> None:
    stage = Degrees(tp=2, dp=3)
    assert [stage.coordinate(Axis.TP, index) for index in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [stage.coordinate(Axis.DP, index) for index in range(6)] == [0, 0, 1, 1, 2, 2]
    assert stage.groups(Axis.TP, range(10, 16)) == [(10, 11), (12, 13), (14, 15)]
    assert stage.groups(Axis.DP, range(10, 16)) == [(10, 12, 14), (11, 13, 15)]
    assert stage.group(Axis.TP, 3, range(10, 16)) == (12, 13) and stage.with_same_weights(3, range(10, 16)) == [11, 13, 15]


@given(own=degrees)
def test_groups_along_an_axis_differ_in_it_alone_and_cover_all(own: Degrees) -> None:
    ranks = range(100, 100 + own.size)
    for axis in Axis:
        groups = own.groups(axis, ranks)
        assert sorted(rank for group in groups for rank in group) == list(ranks)
        for group in groups:
            places = [{other: own.coordinate(other, rank - 100) for other in Axis} for rank in group]
            assert [place[axis] for place in places] == list(range(own.of(axis)))
            assert all({**place, axis: 0} == {**places[0], axis: 0} for place in places)
            assert all(own.group(axis, rank - 100, ranks) == group for rank in group)


@given(own=degrees, data=st.data())
def test_weights_are_divided_by_tp_and_ep_alone(own: Degrees, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, own.size - 1))
    same = own.with_same_weights(index, range(own.size))
    wanted = [own.coordinate(axis, index) for axis in (Axis.TP, Axis.EP)]
    assert same == [at for at in range(own.size) if [own.coordinate(axis, at) for axis in (Axis.TP, Axis.EP)] == wanted]


def test_a_stage_falls_into_runs_of_equal_degrees() -> None:
    stage = Stage(4, 10, ((0, 1),), Degrees(2), runs=(OpRun(6, 7, 2, 1, algo=1), OpRun(7, 9, 1, 2)), recompute=(((5, 8),),))
    runs = parts_of(stage)
    assert runs == [DegreeRun(4, 7, 2, 1), DegreeRun(7, 9, 1, 2), DegreeRun(9, 10, 2, 1)]
    assert [algos_of(stage, run) for run in runs] == [(0, 0, 1), (0, 0), (0,)]
    assert [recomputed_in(stage, run) for run in runs] == [{1, 2}, {0}, frozenset()]
    assert runs[1].degrees == Degrees(1, 2) and parts_of(Stage(0, 3, ((0,),))) == [DegreeRun(0, 3, 1, 1)]
