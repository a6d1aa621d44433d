"""DynaPipe's figure 15: what its way of cutting batches is worth (a), and what its schedule and its order of micro-batches are (b)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from msgspec.structs import replace

from penstock.batching.baselines import Order, run_baseline, token_budget
from penstock.batching.costs import PipelineCosts
from penstock.batching.ordering import by_length, tour
from penstock.batching.plan import BatchPlan, ReplicaBatch
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_workload
from penstock.errors import InfeasibleError
from penstock.models.micro_batch import MicroBatch
from penstock.ordering.adaptive import adaptive
from penstock.reproduce.dynapipe_batches import TOKENS, LengthBatch, costs_of, drawn_batch, plan_dynamic, plan_packed, shared_batch
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, at_least
from penstock.schedules.orders import one_forward_one_backward
from penstock.timing.execution import execute

__all__ = ["MICRO_BATCHING", "SCHEDULES"]

_LONGEST = 4096
_BUDGETS = (1024, 2048, 3072, 4096, 8192)
"""Tokens of a micro-batch that DynaPipe's ablation tries."""
_FEW_TOKENS = 16_384
_DYNAPIPE_MS = {"1F1B": 3208.0, "adaptive": 3019.0, "adaptive, reordered": 2931.0}
"""What DynaPipe's own planner makes of the shared batch of 64k tokens, under each schedule."""
_GROUPS = 3
"""Groups of micro-batches of similar cost, which DynaPipe injects in every order (for more than 20 of them)."""


def _budgeted(batch: LengthBatch, costs: PipelineCosts, order: Order) -> BatchPlan | None:
    """The best budget of tokens."""
    found = []
    for max_tokens in _BUDGETS:
        try:
            found.append(run_baseline(token_budget(batch.samples, costs, max_tokens, order), costs, f"{max_tokens} tokens"))
        except InfeasibleError:
            continue
    return min(found, key=lambda plan: plan.predicted_s, default=None)


def _micro_batching(evidence: Evidence) -> Drawing:
    """Packed rows, token budgets (TB) and dynamic programming (DP) after sorting (S) and after a tour (T), and our search."""
    costs = costs_of(evidence, "t5D")
    batch = drawn_batch(True, _LONGEST, TOKENS // (4 if evidence.quick else 1))
    ways = {
        "packed rows": plan_packed(costs, batch), "TB (S)": _budgeted(batch, costs, by_length), "TB (T)": _budgeted(batch, costs, tour),
        "DP (S)": plan_batch(batch.samples, costs, order="sorted"), "DP (T)": plan_batch(batch.samples, costs, order="tour"),
        "Hilbert order\nand search": plan_dynamic(evidence, costs, batch),
    }  # fmt: skip
    speeds = {way: batch.tokens_per_s(plan) for way, plan in ways.items()}
    budget = max(speeds["TB (S)"] or 0.0, speeds["TB (T)"] or 0.0)
    own, tours, sorts = (speeds[way] or 0.0 for way in ("Hilbert order\nand search", "DP (T)", "DP (S)"))
    claims = [
        at_least("DP after a tour, times as fast as the best token budget", tours / budget if budget else np.inf, 1.0),
        at_least("DP after a tour, times as fast as after sorting", tours / sorts, 1.0),
        at_least("Hilbert order and search, times as fast as DP after a tour", own / tours, 1.0),
    ]
    return Drawing([Plotted("T5 11B, 8 GPUs (tp 8)", list(speeds), list(speeds.values()))], "", "tokens per second", claims, note=(
        f"{batch.num_tokens:,} tokens, samples of at most {_LONGEST:,}, drawn like FLAN's from a fixed seed; times by DynaPipe's "
        "cost tables. TB: as many tokens in a micro-batch as a budget allows, the best of "
        f"{_BUDGETS[0]:,} to {_BUDGETS[-1]:,}; DP: dynamic programming; (S): samples sorted by length; (T): along a tour through both "
        "lengths. What is recomputed is chosen for each micro-batch of DP, for all alike elsewhere."
    ))  # fmt: skip


def _under(micro_batches: Sequence[MicroBatch], costs: PipelineCosts, replica: int, schedule: str) -> float:
    """Seconds of a replica's micro-batches under a schedule, in the way of recomputing that suits it best; infinite where none fits."""
    modes = [tuple(one.recompute for one in micro_batches)]
    modes += [((mode,) * costs.num_stages,) * len(micro_batches) for mode in range(len(costs.modes))]
    best_s = np.inf
    for mode in modes:
        workload = batch_workload(costs, [replace(one, recompute=own) for one, own in zip(micro_batches, mode, strict=True)], replica)
        if not np.isfinite(workload.durations_s).all():
            continue
        try:
            orders = _injections(len(micro_batches), workload.durations_s.sum(axis=(0, 1))) if schedule == "adaptive, reordered" else [()]
            for order in orders:
                chosen = one_forward_one_backward(costs.num_stages, len(micro_batches)) if schedule == "1F1B" else adaptive(workload, order)
                run = execute(chosen, workload)
                best_s = min(best_s, run.pipeline_s if run.violation is None else np.inf)
        except InfeasibleError:
            continue
    return best_s


def _injections(count: int, times_s: np.ndarray) -> Iterator[list[int]]:
    """Orders to inject micro-batches in: as they come, and groups of similar cost in every order."""
    yield list(range(count))
    groups = np.array_split(np.argsort(times_s, kind="stable"), min(_GROUPS, count))
    for order in permutations(groups):
        yield np.concatenate(order).tolist()


def _as_cut(replica: ReplicaBatch) -> list[MicroBatch]:
    """Micro-batches as they come from samples sorted by length, the longest first."""
    ordered = sorted(replica.micro_batches, key=lambda one: (-one.row_length, one.samples))
    return [replace(one, index=index) for index, one in enumerate(ordered)]


def _schedules(evidence: Evidence) -> Drawing:
    costs, whole = costs_of(evidence, "gptA"), shared_batch(evidence, "gptA", f"tok{TOKENS}_max{_LONGEST}")
    speeds: dict[str, dict[str, float]] = {name: {} for name in _DYNAPIPE_MS}
    for tokens in (_FEW_TOKENS, TOKENS):
        place = f"{tokens:,} tokens"
        cut = [_as_cut(replica) for replica in plan_batch(whole.first(tokens).samples, costs, order="sorted").replicas]
        times_s = {name: max(_under(own, costs, replica, name) for replica, own in enumerate(cut) if own) for name in speeds}
        for name, time_s in times_s.items():
            speeds[name][place] = times_s["1F1B"] / time_s
    curves = [Plotted(name, list(own), list(own.values())) for name, own in speeds.items()]
    curves += [Plotted(f"DynaPipe, {name}", [f"{TOKENS:,} tokens"], [_DYNAPIPE_MS["1F1B"] / ms], published=True)
               for name, ms in _DYNAPIPE_MS.items() if name != "1F1B"]  # fmt: skip
    claims = [at_least(f"{place}: {name}, times as fast as 1F1B", own[place], 1.0)
              for name, own in speeds.items() if name != "1F1B" for place in own]  # fmt: skip
    return Drawing(curves, "global batch", "throughput, 1F1B = 1", claims, note=(
        f"GPT 6.7B, tp 1, pp 4, dp 2, samples of at most {_LONGEST:,} tokens (a shared batch and its first samples), by DynaPipe's tables. "
        "All schedules run the same micro-batches, in the way of recomputing that suits each best; reordered: groups of similar cost "
        "enter the pipeline in the best of all orders. DynaPipe's values are of its own planner, in earlier runs."
    ))  # fmt: skip


MICRO_BATCHING = FigureSpec("15a", "figure 15a: micro-batching, way by way", _micro_batching, ("configs.json",))
SCHEDULES = FigureSpec("15b", "figure 15b: schedules for the same micro-batches", _schedules, ("configs.json", "inputs"))
