"""FASOP's experiments by its own cost tables: search times, six settings, the Pareto set of 80 clusters, choices under a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, Reproduction, at_least, at_most, compared
from penstock.reproduce.peers.checkout import Peer, PeerError
from penstock.reproduce.peers.fasop import list_with_fasop
from penstock.systems.fasop.rules import FasopProblem
from penstock.systems.fasop.scoring import row_time_s
from penstock.systems.fasop.search import ClusterAnswer, FasopAnswer, pareto_fasop, search_fasop
from penstock.systems.fasop.tables import FasopTables

__all__ = ["FASOP_FIGURES", "FIRST_ROWS_S"]

FIRST_ROWS_S = {
    "bert-homo": 0.9780, "bert-het": 0.8787, "gpt2XL-homo": 1.3105, "gpt2XL-het": 1.1460, "T5-homo": 1.0390, "T5-het": 1.0203,
}  # fmt: skip
"""Seconds per step of the first row of FASOP's results that fits, its estimator repaired (links in both directions, memory)."""
BEST_ROWS_S = {
    "bert-homo": 0.9780, "bert-het": 0.8632, "gpt2XL-homo": 1.2891, "gpt2XL-het": 1.1355, "T5-homo": 1.0390, "T5-het": 0.9995,
}  # fmt: skip
"""The same of the best of all its rows, which its own estimator puts further down."""
_PARETO = "gpt2XL-pareto"


def _found(evidence: Evidence) -> dict[str, tuple[FasopAnswer, float]]:
    """The answer and CPU seconds of every setting that names its nodes."""

    def work() -> dict[str, tuple[FasopAnswer, float]]:
        tables, runs = FasopTables.open(evidence.folder), {}
        for name in FIRST_ROWS_S:
            tables.layer_times_s(tables.settings()[name].model)
            cpu = time.process_time()
            runs[name] = (search_fasop(tables, name), time.process_time() - cpu)
        return runs

    return evidence.once("fasop settings", work)


def _listed(evidence: Evidence) -> tuple[dict[str, tuple[float, float, float]], str]:
    """Of each setting that FASOP itself lists: seconds of its first row that fits and of its best, and its CPU seconds."""
    tables = FasopTables.open(evidence.folder)

    def work(peer: Peer, name: str) -> tuple[float, float, float]:
        problem, listed = FasopProblem.of(tables, name), list_with_fasop(peer, tables.settings()[name].model, mixed=name.endswith("-het"))
        fitting = [time_s for row in listed.rows if (time_s := row_time_s(problem, row)) < math.inf]
        if not fitting:
            raise PeerError(f"fasop lists no row of {name} that fits.")
        return fitting[0], min(fitting), listed.cpu_s

    slow = {"T5-het"} if evidence.quick else set()
    return evidence.beside("FASOP", [name for name in FIRST_ROWS_S if name not in slow], work)


def _settings(evidence: Evidence) -> Drawing:
    found, (listed, said) = _found(evidence), _listed(evidence)
    names = list(found)
    first = {name: first_s for name, (first_s, _, _) in listed.items()}
    best = {name: best_s for name, (_, best_s, _) in listed.items()}
    claims = [at_least(f"{name}: times as fast as FASOP's first fitting row", first.get(name, FIRST_ROWS_S[name]) / found[name][0].time_s,
                       1.025) for name in names]  # fmt: skip
    curves = [
        *compared("FASOP's first fitting row", names, first, FIRST_ROWS_S), *compared("FASOP's best row", names, best, BEST_ROWS_S),
        Plotted("Penstock", names, [found[name][0].time_s for name in names]),
        Plotted("bound", names, [found[name][0].bound_s for name in names]),
    ]  # fmt: skip
    took = ", ".join(f"{name} {cpu_s:.0f} s" for name, (*_, cpu_s) in listed.items())
    return Drawing(curves, "setting", "seconds per step", claims, note=(
        "All by FASOP's published layer times and link speeds, its rows scored by its estimator with its faults repaired. "
        + (f"FASOP ran here: {took} of CPU time. " if took else "") + said
    ))  # fmt: skip


def _search_times(evidence: Evidence) -> Drawing:
    found = _found(evidence)
    claims = [at_most(f"{name}: CPU seconds of the search", cpu, 10.0) for name, (_, cpu) in found.items()]
    return Drawing([Plotted("Penstock, with its bound", list(found), [cpu for _, cpu in found.values()])], "setting", "CPU seconds", claims)


def _clusters(evidence: Evidence) -> tuple[list[ClusterAnswer], float]:
    def work() -> tuple[list[ClusterAnswer], float]:
        tables, cpu = FasopTables.open(evidence.folder), time.process_time()
        return pareto_fasop(tables, _PARETO, dict.fromkeys("AB", 3) if evidence.quick else None), time.process_time() - cpu

    return evidence.once("fasop clusters", work)


def _usd(answer: FasopAnswer, steps: int) -> float:
    return answer.usd_per_step * steps


def _pareto(evidence: Evidence) -> Drawing:
    clusters, cpu = _clusters(evidence)
    setting = FasopTables.open(evidence.folder).settings()[_PARETO]
    batch, steps = FasopTables.open(evidence.folder).models[setting.model].global_batch_size, setting.total_steps

    def points(chosen: Sequence[ClusterAnswer], label: str) -> Plotted:
        answers = sorted((c.answer for c in chosen if c.answer), key=lambda answer: answer.time_s)
        return Plotted(label, [batch / answer.time_s for answer in answers], [_usd(answer, steps) for answer in answers])

    best = [cluster for cluster in clusters if cluster.dominated_by is None]
    beaten = [cluster for cluster in clusters if cluster.dominated_by is not None]
    curves = [points(beaten, "beaten in time, money and GPUs"), points(best, "worth having for one of these")]
    limit = 30.0 * len(clusters) / 80
    claims = [at_most(f"CPU seconds of {len(clusters)} clusters", cpu, max(limit, 5.0)), at_least("clusters worth having", len(best), 3)]
    kinds = "A100 and A10 nodes of 8 GPUs, GPT-2 XL"
    return Drawing(curves, "samples per second", "USD for the whole training", claims, "points", note=f"{kinds}; by FASOP's tables.")


def _constrained(evidence: Evidence) -> Drawing:
    """The fastest cluster for at most so much money, and the cheapest for at least so much speed."""
    clusters, _ = _clusters(evidence)
    setting = FasopTables.open(evidence.folder).settings()[_PARETO]
    answers = [cluster.answer for cluster in clusters if cluster.answer]
    least = min(_usd(answer, setting.total_steps) for answer in answers)
    shares = (1.0, 1.25, 1.5, 2.0, 3.0)
    fastest = [min(a.time_s for a in answers if _usd(a, setting.total_steps) <= share * least * (1 + 1e-9)) for share in shares]
    curve = Plotted("fastest for at most this", [share * least for share in shares], fastest)
    claims = [at_least("how much faster three times the money is", fastest[0] / fastest[-1], 1.2)]
    return Drawing([curve], "USD allowed", "seconds per step", claims, "lines", note="FASOP leaves such questions to a spreadsheet.")


FASOP_FIGURES = Reproduction("fasop", (
    FigureSpec("settings", "estimates of six settings", _settings, ("settings.json",)),
    FigureSpec("search-time", "time of the search", _search_times, ("settings.json",)),
    FigureSpec("pareto", "time and money of every cluster", _pareto, ("settings.json",)),
    FigureSpec("constrained", "choices under a limit", _constrained, ("settings.json",)),
), "FASOP's public repository (no licence: its numbers cannot be shipped) has them as known_cost/*.npy and constants of its "
   "driver; docs/systems/fasop.md says which files to write from them.")  # fmt: skip
