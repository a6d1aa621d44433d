"""What devices lose beside others: clocks, the wait for the slowest, and a part of their links."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.clusters import resolve_cluster, resolve_device
from penstock.costs.company import SPREAD, slowest_of, sustained, with_achieved_links
from penstock.costs.roofline import Roofline
from penstock.models import Shape, resolve_model


def test_the_slowest_of_many_is_that_of_64_normal_draws() -> None:
    drawn = np.random.default_rng(0).normal(size=(4000, 64)).max(axis=1).mean()
    assert slowest_of(8) == slowest_of(1024) == pytest.approx(1 + SPREAD * drawn, abs=0.002)
    assert slowest_of(1) == 1.0


def test_clocks_fall_in_company_where_power_is_short() -> None:
    assert sustained(resolve_device("h100"), 1) == 1.0 > sustained(resolve_device("h100"), 8)
    assert sustained(resolve_device("a100-80gb"), 8) == 1.0


def test_links_reach_a_part_of_their_rate_once() -> None:
    cluster = resolve_cluster("16xh100")
    achieved = with_achieved_links(cluster)
    assert achieved.link(0, 1).bandwidth_bytes_per_s == pytest.approx(0.8 * 450e9)
    assert achieved.link(0, 1).latency_s == cluster.link(0, 1).latency_s
    assert achieved.runs[0].node.inter.bandwidth_bytes_per_s == pytest.approx(0.9 * 400e9)
    assert with_achieved_links(achieved) == achieved


def test_one_device_is_as_it_was_measured() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(4, 2048)
    times = [Roofline().table(model, [shape], [1], resolve_cluster(name)).forward_s for name in ("1xh200", "8xh200")]
    alone = Roofline(in_company=False).table(model, [shape], [1], resolve_cluster("8xh200")).forward_s
    assert np.array_equal(times[0], alone) and (times[1] >= times[0]).all()
    assert times[1][..., 0, 0].sum() > 1.1 * times[0][..., 0, 0].sum()
