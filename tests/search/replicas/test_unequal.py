"""The searcher of unequal replicas: families come by their bounds, and what follows their pipelines is worked out where it may count."""

from __future__ import annotations

import math
from itertools import islice

from penstock.search import Request
from penstock.search.replicas.replica_families import replica_families
from penstock.search.replicas.unequal import UnequalReplicas

REQUEST = Request.of("bert-large", "1xp4d.24xlarge+1xp3.16xlarge", 64, "roofline", None, (), math.inf)


def test_families_come_by_their_bounds() -> None:
    ranked = [family.bound_s for family in UnequalReplicas(REQUEST)._ranked()]
    assert ranked == sorted(family.bound_s for family in replica_families(REQUEST))


def test_what_follows_a_pipeline_is_not_worked_out_for_families_that_their_pipelines_exclude() -> None:
    """Of 500 families, gradient sync of all but a few layouts was worked out only to be left unused."""
    unequal = UnequalReplicas(REQUEST)
    first = list(islice(unequal._ranked(), 5))
    assert unequal.bound() == first[0].bound_s
    layouts = {id(family.layout): family.layout for family in unequal._families}
    assert sum("afterwards" in vars(layout) for layout in layouts.values()) < 0.2 * len(layouts)
