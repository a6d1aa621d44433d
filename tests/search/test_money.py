"""Every choice of nodes from a pool: in which order they are searched, and what is left to smaller choices."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models import resolve_model
from penstock.search import money
from penstock.search.engine import search
from penstock.search.money import clusters_of, num_steps, offers
from penstock.search.space.families import families
from penstock.search.space.request import Request


def test_parts_come_before_the_whole_and_one_kind_before_several() -> None:
    names = [cluster.name for cluster in clusters_of(resolve_cluster("2xp4d.24xlarge+1xg5.24xlarge"))]
    assert names == [
        "1xg5.24xlarge", "1xp4d.24xlarge", "2xp4d.24xlarge", "1xp4d.24xlarge+1xg5.24xlarge", "2xp4d.24xlarge+1xg5.24xlarge",
    ]  # fmt: skip


def test_plans_that_leave_a_node_idle_are_left_to_the_cluster_without_it() -> None:
    """Four A10Gs give each of up to four replicas one, and nothing to more of them."""
    request = Request.of("gpt-tiny", "2xp4d.24xlarge+1xg5.24xlarge", 48, "roofline", None, (1,), math.inf)
    every = {family.replicas for family in families(request)}
    assert {1, 2, 4, 8, 16} <= every
    assert {family.replicas for family in families(request.on_all_of(request.cluster))} == {number for number in every if number <= 4}


def asked(pool: str) -> Request:
    """A small model on any nodes of a pool."""
    return Request.of("gpt-tiny", pool, 16, "roofline", None, (1,), math.inf)


def test_several_processes_find_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(money, "_SHARED", 2)
    request, begun = asked("2xp4d.24xlarge+1xg5.24xlarge"), list[tuple[str, int, int]]()
    alone = offers(request, 10)
    assert offers(request, 10, lambda *told: begun.append(told), workers=2) == alone
    assert [done for _, done, _ in begun] == list(range(5)), "who watches is told of every cluster"
    assert sorted(name for name, _, _ in begun) == sorted(cluster.name for cluster in clusters_of(request.cluster))


def test_what_is_worth_having_is_what_a_search_of_its_nodes_finds() -> None:
    """With proof, which meets plans that are slow by formula and fast by the clock."""
    request = Request.of("vgg11", "4xg5.xlarge", 4, "roofline", None, (), math.inf)
    found, _ = offers(request, 1)
    worth = {offer.cluster.name: offer for offer in found if not offer.dominated_by}
    assert list(worth) == ["1xg5.xlarge", "2xg5.xlarge"], "without proof three and four nodes seem to be faster"
    alone = search(request.on(worth["2xg5.xlarge"].cluster), top=1)
    assert (worth["2xg5.xlarge"].choice, worth["2xg5.xlarge"].bound_s) == (alone.choices[0], alone.bound_s)


def outcome(time_s: float, stopped: str = "") -> Any:
    """As much of an outcome as counts for money."""
    estimate, plan = SimpleNamespace(time_s=time_s, formula_s=time_s), SimpleNamespace(num_stages=2)
    choice = SimpleNamespace(estimate=estimate, plan=plan)
    return SimpleNamespace(choices=[choice], bound_s=time_s, stopped=stopped)


def test_waves_grow_whatever_the_number_of_processes() -> None:
    clusters = list(clusters_of(resolve_cluster("8xp4d.24xlarge+8xg5.24xlarge")))
    waves = list(money._waves(clusters))
    assert [len(wave) for wave in waves] == [1, 1, 2, 4, 8, 16, 16, 16, 16]
    assert [cluster for wave in waves for cluster in wave] == clusters


def test_a_cluster_of_the_same_wave_may_be_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and four nodes are searched in one wave, where neither search knows of the other."""
    searched = dict[int, float]()

    def found(request: Request, *, known_s: float = math.inf, **_: Any) -> Any:
        number = request.cluster.num_nodes
        searched.setdefault(number, known_s)
        return outcome({1: 9.0, 2: 6.0, 3: 1.0, 4: 1.0}[number])

    monkeypatch.setattr(money, "search", found)
    kept, left = offers(asked("4xg5.24xlarge"), 10)
    assert searched == {1: math.inf, 2: 9.0, 3: 6.0, 4: 6.0}
    assert [offer.cluster.name for offer in kept] == ["1xg5.24xlarge", "2xg5.24xlarge", "3xg5.24xlarge"]
    assert [(one.cluster.name, one.status) for one in left] == [("4xg5.24xlarge", "dominated")]
    assert "3xg5.24xlarge, which is a part of it" in left[0].reason


def test_half_of_a_search_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was interrupted has a plan at hand; the others would go on without it."""
    monkeypatch.setattr(money, "search", lambda request, **_: outcome(1.0, "interrupted"))
    with pytest.raises(KeyboardInterrupt):
        offers(asked("2xg5.24xlarge"), 10)


@pytest.mark.parametrize("model", ["gpt-tiny", "t5-tiny"])
def test_steps_are_as_many_as_all_tokens_need(model: str) -> None:
    """Tokens of both sides; a rest is trained too."""
    request = Request.of(model, "1xp4d.24xlarge", 16, "roofline", None, (1,), math.inf)
    described = resolve_model(model)
    per_step = 16 * (described.seq_length + described.dec_length)
    assert [num_steps(request, None, tokens) for tokens in (1.0, per_step, per_step + 1, 10.5 * per_step)] == [1, 1, 2, 11]
    assert (num_steps(request, 7, None), num_steps(request, None, None)) == (7, 1)
    with pytest.raises(InputError, match="give one of them"):
        num_steps(request, 7, 1e6)


def test_what_dominates_is_the_cheapest_that_does() -> None:
    """Of two offers that are faster and cheaper."""
    request = asked("1xp4d.24xlarge+1xg5.24xlarge")
    named = {cluster.name: cluster for cluster in clusters_of(request.cluster)}
    first, second, third = (money.Offer(cluster, outcome(1.0).choices[0], 1.0, hours, usd) for cluster, hours, usd in zip(
        named.values(), (2.0, 1.0, 3.0), (5.0, 9.0, 20.0), strict=True))  # fmt: skip
    assert [money._dominator(one, [first, second, third]) for one in (first, second, third)] == ["", "", first.cluster.name]
