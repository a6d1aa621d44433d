"""DynaPipe's own planner on batches of lengths, over the tables of one configuration."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.batching.plan import SampleLengths
from penstock.reproduce.peers import dynapipe_program
from penstock.reproduce.peers.checkout import Peer, PeerError
from penstock.systems.dynapipe.inputs import PlannerConfig
from penstock.systems.dynapipe.tables import DynaPipeTables

__all__ = ["DynaPipePlanned", "plan_with_dynapipe"]

_LIMIT_S = 1800.0


@dataclass(frozen=True)
class DynaPipePlanned:
    """The slowest replica by DynaPipe's simulator, and processor seconds of planning; None where it found no plan."""

    ms: float | None
    cpu_s: float


def plan_with_dynapipe(
    peer: Peer, tables: DynaPipeTables, config: PlannerConfig, batches: Sequence[Sequence[SampleLengths]]
) -> list[DynaPipePlanned]:
    """Plans each batch by DynaPipe's defaults: every recomputation and schedule that it knows, micro-batches reordered."""
    points, sizes = tables.measured
    per_node = config.gpus_per_node or tables.links.gpus_per_node
    request = {
        "checkout": str(peer.checkout.absolute()), "config": asdict(config), "links": asdict(tables.links),
        "hidden": tables.dimensions.hidden, "has_decoder": tables.dimensions.has_decoder,
        "nodes": [stage * config.tp * config.dp // per_node for stage in range(config.pp)],
        "points": [
            [tp, mode, component, at[0], at[1:], *(None if math.isnan(value) else value for value in values)]
            for (tp, mode, component), found in points.items() if tp == config.tp for at, values in found
        ],
        "sizes": [[*key, megabytes] for key, megabytes in sizes.items()],
        "batches": [[[sample.length, sample.dec_length] for sample in batch] for batch in batches],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = peer.run([Path(dynapipe_program.__file__).absolute()], Path(folder), _LIMIT_S, given=json.dumps(request))
    found = [json.loads(line) for line in run.text.splitlines() if line.startswith("{")]
    if len(found) != len(batches):
        raise PeerError(f"dynapipe planned {len(found)} of {len(batches)} batches.")
    return [DynaPipePlanned(one["ms"], one["cpu_s"]) for one in found]
