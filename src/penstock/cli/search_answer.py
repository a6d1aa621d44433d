"""What `penstock search` answers: sentences, tables and one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_share, format_time, format_usd, out, print_json, say, table
from penstock.cli.plan_words import choice_row, choices_table, micro_batch_words, next_steps, plan_name, plan_sentence

if TYPE_CHECKING:
    from penstock.cli.fitted import FittedTable
    from penstock.costs.source import CostSource
    from penstock.plans.plan import Plan
    from penstock.search import Baseline, Choice, Outcome, Request

__all__ = ["SearchAnswer", "iterations_line", "why_first"]

_PROVEN = 12
"""Lines of the proof that are shown."""


@dataclass(frozen=True)
class SearchAnswer:
    """An outcome, and how it was asked for."""

    request: Request
    outcome: Outcome
    choices: tuple[Choice, ...]
    """The one to offer first."""
    asked: dict[str, Any]
    """Model, cluster, costs, objective and file as they were named."""
    files: Sequence[Path]
    count: int
    """Iterations to train for."""
    strict: bool
    baselines: bool
    proof: bool
    note: str = ""
    """Which of several clusters was chosen."""

    def tell_json(self) -> None:
        """Prints the answer as one JSON object."""
        best, outcome = self.choices[0], self.outcome
        print_json({
            **self.asked, "files": self.files,
            "seq_length": best.plan.seq_length, "precision": best.plan.precision, "gradients": best.plan.gradients,
            "notes": self._notes(), "lower_bound_s": outcome.bound_s, "formula_s": outcome.formula_s, "gap": outcome.gap,
            "stopped": outcome.stopped,
            "fastest_s": outcome.choices[0].estimate.time_s, "error": outcome.error, "strict": self.strict,
            "plans": [choice_row(choice, self.count) for choice in self.choices],
            **({"baselines": baseline_rows(self.request, outcome)} if self.baselines else {}),
            **({"proof": proof_rows(outcome)} if self.proof else {}),
        })  # fmt: skip

    def tell(self, verbose: bool) -> None:
        """Prints the answer in sentences first, then as tables."""
        outcome, best, asked = self.outcome, self.choices[0], self.asked
        say(plan_sentence(best.plan, best.estimate, outcome.error, outcome.bound_s))
        say(next_steps(best.plan, self.request.model, self.files[0] if self.files else None), "")
        plans = f"best plans of {asked['model']} on {asked['cluster']}, global batch {self.request.frame.global_batch} ({asked['costs']})"
        out().print(choices_table(plans, self.choices, verbose))
        if self.baselines:
            out().print(_baselines_table(self.request, outcome))
        if self.proof:
            out().print(_proof_table(outcome))
        fastest = outcome.choices[0]
        say(*([self.note] if self.note else []))
        say(*why_first(best.plan, best.estimate.time_s, fastest.plan, fastest.estimate.time_s, self.request.estimator.source))
        say(*self._facts(verbose or self.proof), *(f"note: {note}" for note in self._notes()))
        if self.files:
            say(f"wrote {', '.join(map(str, self.files))}.")

    def _notes(self) -> list[str]:
        """Notes on the first plan."""
        from penstock.plans.references import cluster_of
        from penstock.plans.remarks import idle_devices

        best = self.choices[0]
        return [*best.estimate.notes, *idle_devices(best.plan, cluster_of(best.plan))]

    def _facts(self, verbose: bool) -> list[str]:
        outcome, facts = self.outcome, []
        if verbose:
            facts.append(
                f"times are the simulator's; the bound is by formula, with messages counted in full: no such plan takes less than "
                f"{format_time(outcome.bound_s)}, and the best found takes {format_time(outcome.formula_s)}, at most "
                f"{format_share(outcome.gap)} above the best possible"
            )
        facts += iterations_line(self.count, self.choices[0].estimate.time_s, self.choices[0].estimate.price_usd)
        if outcome.stopped:
            facts.append("stopped by the time budget" if outcome.stopped == "time budget" else "interrupted: the best plans so far")
        return facts


def iterations_line(count: int, time_s: float, price_usd: float | None) -> list[str]:
    """Hours and money of many iterations; nothing for one."""
    usd = "" if price_usd is None else f" and {format_usd(price_usd * count)}"
    return [f"{count:,} iterations take {time_s * count / 3600:,.2f} hours{usd}"] if count > 1 else []


def why_first(plan: Plan, time_s: float, fastest: Plan, fastest_s: float, source: CostSource) -> list[str]:
    """One line for a plan that is first without being the fastest, none for one that is."""
    return [] if plan is fastest else [
        f"{plan_name(plan)} is {format_share(time_s / fastest_s - 1)} slower than the best found, {plan_name(fastest)} at "
        f"{format_time(fastest_s)}, within the error of ±{source.error * 100:.0f} % ({source.name}), and simpler (--strict ranks by time "
        "alone)"
    ]  # fmt: skip


def _baseline_choices(request: Request) -> list[tuple[Baseline, Choice | None]]:
    """Plans of simpler searches."""
    from penstock.search import BASELINES, best_of

    return [(baseline, best_of(baseline, request)) for baseline in BASELINES]


def _slower(found: Choice, outcome: Outcome) -> float:
    return found.estimate.time_s / outcome.choices[0].estimate.time_s - 1


def baseline_rows(request: Request, outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {"name": baseline.name, "space": baseline.about, "slower": None if found is None else _slower(found, outcome),
         "plan": None if found is None else choice_row(found)} for baseline, found in _baseline_choices(request)
    ]  # fmt: skip


def _baselines_table(request: Request, outcome: Outcome) -> FittedTable:
    rows = [
        [baseline.name, *(["does not fit", "-", "-", "-"] if found is None else [
            plan_name(found.plan), micro_batch_words(found.plan), format_time(found.estimate.time_s), f"{_slower(found, outcome):+.1%}"]),
         baseline.about]
        for baseline, found in _baseline_choices(request)
    ]  # fmt: skip
    columns = ["search", "plan", "micro-batch", "time", "slower", "space"]
    return table("what simpler searches find, from the same costs", columns, rows)


def proof_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Rows on how far each part of the space was excluded, the weakest first."""
    return [
        {"replicas": line.replicas, "micro_batch": line.micro_batch, "max_stages": line.subspace.max_stages,
         "devices_of_a_stage": sorted({option.num_devices for option in line.subspace.options}), "by_ops_s": line.by_ops_s,
         "by_stages_s": line.by_stages_s, "bound_s": line.bound_s}
        for line in outcome.proof
    ]  # fmt: skip


def _proof_table(outcome: Outcome) -> FittedTable:
    rows = [
        [row["replicas"], row["micro_batch"], row["max_stages"], ", ".join(map(str, row["devices_of_a_stage"])),
         format_time(row["by_ops_s"]), "-" if row["by_stages_s"] is None else format_time(row["by_stages_s"]), format_time(row["bound_s"])]
        for row in proof_rows(outcome)[:_PROVEN]
    ]  # fmt: skip
    columns = ["replicas", "micro-batch", "stages up to", "devices", "by ops", "by stages", "bound"]
    title = (
        "nothing else can be faster than this, by ops alone or by whole stages of so many devices; the weakest first "
        "(docs/how-search-works.md)"
    )
    return table(title, columns, rows)
