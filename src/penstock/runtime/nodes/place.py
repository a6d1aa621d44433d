"""Which machine of a job this is: its number, where the first one is met, which ranks it has, and the job's key."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.runtime.request import PACED, NodePlace
from penstock.stores.sealing import KEY_FILE_VARIABLE, KEY_VARIABLE, job_key

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan
    from penstock.runtime.request import TrainRequest
    from penstock.runtime.run import Watching

__all__ = [
    "ADDRESS_VARIABLE", "members_of", "node_facts", "node_key", "node_notes", "node_place", "nodes_of", "processes_of", "ranks_here",
    "ranks_of_nodes", "store_key", "threads_here",
]  # fmt: skip

ADDRESS_VARIABLE = "PENSTOCK_NODE_ADDRESS"
_LEAST_KEY_BYTES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node_place(number: int, master: str) -> NodePlace:
    """The place that `--node-rank` and `--master` name."""
    found = re.fullmatch(r"\[?([A-Za-z0-9_.:%-]{1,255}?)\]?:([0-9]{1,5})", master)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise InputError(f"--master is '{master}'; the address of node 0 and a port were expected, such as 10.0.0.1:29500.")
    return NodePlace(number, found[1], int(found[2]), os.environ.get(ADDRESS_VARIABLE, ""), tuple(sys.argv[1:]))


def ranks_of_nodes(plan: Plan, cluster: Cluster, spares: int = 0) -> list[tuple[int, ...]]:
    """The devices of each machine that has work or spares; those up to the last with work, and the spares after it, have a process each."""
    end = plan.ranks[-1] + 1
    nodes = {cluster.node_index(rank) for rank in (*plan.ranks, *range(end, end + spares))}
    own = [rank for rank in range(end + spares) if cluster.node_index(rank) in nodes]
    return [tuple(ranks) for _, ranks in groupby(own, key=cluster.node_index)]


def processes_of(plan: Plan, spares: int = 0) -> tuple[int, ...]:
    """The devices that have a process: all up to the last one with work and the spares after it, unless torchrun started processes for
    those with work alone."""
    if os.environ.get("WORLD_SIZE") == str(len(plan.ranks)):
        return plan.ranks
    return tuple(range(plan.ranks[-1] + 1 + spares))


def nodes_of(request: TrainRequest) -> list[tuple[int, ...]]:
    """The devices of each node that have a process."""
    from penstock.plans.references import cluster_of

    if request.node is None:
        return [processes_of(request.plan, request.spares)]
    return ranks_of_nodes(request.plan, cluster_of(request.plan), request.spares)


def members_of(request: TrainRequest) -> tuple[int, ...]:
    """The devices that have a process here or on other nodes; nodes without work, or a spare, have none."""
    return tuple(rank for node in nodes_of(request) for rank in node)


def ranks_here(request: TrainRequest) -> tuple[int, ...]:
    """The devices of this machine that have a process."""
    return nodes_of(request)[0 if request.node is None else request.node.number]


def node_notes(request: TrainRequest) -> list[str]:
    """Says whom this node waits for before its first step, which may be for long; nothing where a run has no other nodes."""
    if request.node is None:
        return []
    node, others = request.node, len(nodes_of(request)) - 1
    if node.number:
        return [f"this is node {node.number}, which waits for node 0 at {node.host}:{node.port}; that one tells of the steps."]
    return [f"this is node 0, which waits for {plural(others, 'other node')} at {node.host}:{node.port}."] if others else []


def threads_here(request: TrainRequest, plan: Plan) -> int:
    """Threads for each process under a plan, so that those with work share the cores of this machine."""
    num_here = len(set(plan.ranks) & set(ranks_here(request)))
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_here))


def _secret() -> bytes:
    key = job_key()
    if key is None:
        raise InputError(
            f"a job on several nodes needs a key that all of them hold: set {KEY_FILE_VARIABLE} to a file of mode 0600, or {KEY_VARIABLE}. "
            "Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    if len(key) < _LEAST_KEY_BYTES:
        raise InputError(f"the job's key has {plural(len(key), 'byte')}; at least {_LEAST_KEY_BYTES} are needed.")
    return key


def node_key() -> bytes:
    """The key that supervisors prove to each other that they hold."""
    return hmac.digest(_secret(), b"penstock supervisors", "sha256")


def store_key() -> bytes:
    """The key that seals the programs of a job on several nodes. All make it from the job's key: it is never sent."""
    return hmac.digest(_secret(), b"penstock programs", "sha256")


def node_facts(request: TrainRequest, watching: Watching | None = None) -> dict[str, Any]:
    """The facts of a run that have to be the same on all nodes, by the names that a user knows: else ranks would train for different
    things, or wait for each other where they never meet."""
    import penstock
    from penstock.plans.references import model_of
    from penstock.plans.schema import plan_to_dict
    from penstock.runtime.checkpoints.going_on import run_facts

    facts = run_facts(model_of(request.plan), request.data, seed=request.settings.seed, global_batch=request.plan.global_batch)
    if request.device == PACED and _BOOT.is_file():
        facts["machine, whose clock paced devices keep"] = _BOOT.read_text().strip()
    plan = hashlib.sha256(json.dumps(plan_to_dict(request.plan)).encode()).hexdigest()[:16]
    return {
        "version of Penstock": penstock.__version__, "plan": plan, "--steps": request.steps,
        "--on-death": request.on_death, "--copies": request.copies, "--spares": request.spares, "--device": request.device,
        "--eval-every": request.eval_every, "--eval-batches": request.eval_batches, "--checkpoint-every": request.checkpoint_every,
        "--weights": request.weights, "prompt loss": request.prompt_loss, "--budget-steps": request.planning.search_steps,
        "--adapt, carried out by": getattr(watching, "__name__", repr(watching)), "learning": repr(request.settings), **facts,
    }  # fmt: skip
