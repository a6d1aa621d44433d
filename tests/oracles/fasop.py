"""FASOP's costs in plain Python: the time of one plan, event by event, and the best of all plans of a tiny cluster, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from penstock.systems.fasop.rules import FasopProblem, Option, micro_batches_of, options_of

Stage = tuple[int, Option, tuple[int, ...]]
"""Layers, option, and the node of each replica."""


def node_kinds(problem: FasopProblem) -> list[Any]:
    """The kind of each node."""
    return [kind for kind, count in zip(problem.kinds.values(), problem.counts, strict=True) for _ in range(count)]


def step_s(problem: FasopProblem, samples: int, stages: list[Stage]) -> float:
    """Seconds of a step, infinite if some stage does not fit or holds encoder and decoder."""
    model, nodes = problem.model, node_kinds(problem)
    count, depth, first = model.global_batch_size // samples, len(stages), 0
    compute, gradients = [], []
    for index, (layers, option, places) in enumerate(stages):
        last, mbs = first + layers, samples // option.dp
        if depth > 1 and any(first < cut < last for cut in problem.required_cuts):
            return float("inf")
        kinds = [list(problem.kinds.values())[k] for k in option.kinds]
        rows = [problem.times_s[kind.gpu, option.tp, mbs] for kind in kinds]
        compute.append(sum(max(row[layer] for row in rows) for layer in range(first, last)))
        types = model.layer_types[first:last]
        parameters = sum(model.parameters(layer) for layer in types)
        used = 18 * parameters / option.tp + sum(_kept(model, layer, option.tp, mbs, min(depth - index, count)) for layer in types)
        if 1.10 * used > min(kind.usable_mem_gib for kind in kinds) * 2**30:
            return float("inf")
        ring = min(link(nodes, places[r], places[(r + 1) % option.dp]) for r in range(option.dp))
        gradients.append(2 * (option.dp - 1) / option.dp * 16 * parameters / ring)
        first = last
    hops = [hop_s(problem, samples, a, b) for a, b in itertools.pairwise(stages)]
    ends = last_backwards(compute, hops, count)
    tied = 0.0
    if depth > 1 and problem.tied_bits:
        (_, a, left), (_, b, right) = stages[0], stages[-1]
        dp = max(a.dp, b.dp)
        slowest = min(link(nodes, left[r * a.dp // dp], right[r * b.dp // dp]) for r in range(dp))
        tied = problem.tied_bits / min(a.tp, b.tp) * min(dp, problem.per_node) / slowest
    return max(end + after for end, after in zip(ends, gradients, strict=True)) + tied


def _kept(model: Any, layer: str, tp: int, mbs: int, in_flight: int) -> float:
    tokens, hidden = model.sequence_length * mbs, model.hidden_size
    if layer == "embedding_layer":
        return tokens * hidden * in_flight / tp
    if layer == "post_process":
        return 4 * tokens * (hidden + model.vocab_size) / tp
    return in_flight * tokens * (10 * hidden + (24 * hidden + 5 * model.num_attention_heads * model.sequence_length) / tp)


def link(nodes: list[Any], a: int, b: int) -> float:
    """Bandwidth between GPUs of two nodes, in bits per second."""
    return nodes[a].intra_bits_per_s if a == b else min(nodes[a].inter_bits_per_s, nodes[b].inter_bits_per_s)


def hop_s(problem: FasopProblem, samples: int, sender: Stage, receiver: Stage) -> float:
    """The slowest exchange of any two replicas, over all pairs and every single sample."""
    nodes, worst = node_kinds(problem), 0.0
    (_, a, left), (_, b, right) = sender, receiver
    bits = problem.model.sequence_length * problem.model.hidden_size * 16
    for i, j in itertools.product(range(a.dp), range(b.dp)):
        shared = sum(s * a.dp // samples == i and s * b.dp // samples == j for s in range(samples))
        same, speed = left[i] == right[j], link(nodes, left[i], right[j])
        lost = 3.5 if same else 1.05 * max(a.dp, b.dp) * max(a.tp, b.tp)
        worst = max(worst, shared * bits * lost / speed)
    return worst


def last_backwards(compute: list[float], hops: list[float], count: int) -> list[float]:
    """1F1B by looking again and again for a stage whose next action has its input."""
    depth = len(compute)
    orders = []
    for s in range(depth):
        ahead = min(depth - 1 - s, count)
        order = [("F", m) for m in range(ahead)]
        for m in range(count):
            order += [("F", ahead + m)] if ahead + m < count else []
            order.append(("B", m))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * depth
    while any(orders):
        for s in range(depth):
            while orders[s]:
                what, m = orders[s][0]
                if what == "F":
                    ready = 0.0 if s == 0 else done.get(("F", s - 1, m), -1.0) + hops[s - 1]
                    known = s == 0 or ("F", s - 1, m) in done
                else:
                    known = s == depth - 1 or ("B", s + 1, m) in done
                    ready = 0.0 if s == depth - 1 or not known else done["B", s + 1, m] + hops[s]
                if not known:
                    break
                clock[s] = done[what, s, m] = max(clock[s], ready) + compute[s] * (1 if what == "F" else 2) / 3
                orders[s].pop(0)
    return clock


def best_by_trying(problem: FasopProblem) -> float:
    """The least time of all cuts, options and placements."""
    return min(best_of_size(problem, samples) for samples in micro_batches_of(problem))


def best_of_size(problem: FasopProblem, samples: int) -> float:
    """The least time with so many samples per micro-batch."""
    return min((step_s(problem, samples, stages) for stages in _plans(problem, samples)), default=float("inf"))


def _plans(problem: FasopProblem, samples: int) -> Iterator[list[Stage]]:
    options = options_of(problem, samples)
    kinds = [index for index, count in enumerate(problem.counts) for _ in range(count)]

    def extend(left: int, free: tuple[int, ...]) -> Iterator[list[Stage]]:
        if left == 0:
            yield []
            return
        for layers, option in itertools.product(range(1, left + 1), options):
            pool = [node for node, kind in enumerate(kinds) if kind in option.kinds]
            for places in itertools.product(pool, repeat=option.dp):
                rest = tuple(n - option.tp * places.count(node) for node, n in enumerate(free))
                if min(rest) >= 0:
                    for others in extend(left - layers, rest):
                        yield [(layers, option, places), *others]

    sizes = tuple(kind.gpus_per_node for kind in node_kinds(problem))
    yield from extend(len(problem.model.layer_types), sizes)
