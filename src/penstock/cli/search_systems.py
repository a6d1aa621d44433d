"""The systems that `penstock search` plans for, by `--for` and `--export`: what they cannot take is refused before anything is searched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.console import format_share, format_time
from penstock.cli.search_options import parse_schedules
from penstock.errors import InputError, near_misses, shell_words
from penstock.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from penstock.cli.export import Target
    from penstock.plans.plan import Plan
    from penstock.search import Outcome, Request

__all__ = ["Systems"]

_SEARCHED_FOR = {"dynpipe": "pipedream"}
"""The schedule that a system runs, where it is none of those that are searched together; such plans are in fp32."""
_WITHOUT_LENGTHS = ("micro-batches", "objective", "proof", "for", "max-hops")
"""Options that say nothing of batches planned one by one."""


@dataclass(frozen=True)
class Systems:
    """The other systems that `--for` and `--export` name, and what they cannot take."""

    planned: str
    """What `--for` names."""
    target: Target | None
    """What `--export` names."""

    @classmethod
    def of(cls, planned: str, export: str) -> Systems:
        """Reads both options."""
        from penstock.cli.export import FOR

        if planned and planned not in FOR:
            raise InputError(f"--for is '{planned}': there is no such system to plan for. {near_misses(planned, FOR)}")
        return cls(planned, _target(export))

    @property
    def _named(self) -> dict[str, str]:
        """The system that each option names."""
        return {"--for": self.planned, "--export": self.target.system if self.target else ""}

    def usual(self, schedules: str, precision: str | None, said: Collection[str]) -> tuple[str, str | None]:
        """The schedules and the precision to search, of which what is not said is what the system has."""
        if own := _SEARCHED_FOR.get(self.planned):
            return schedules if "schedules" in said else own, precision or "fp32"
        return schedules, precision

    def check_schedules(self, schedules: str) -> None:
        """Says that a system updates weights at other times than all plans of some schedules."""
        from penstock.cli.export import TARGETS

        apart = any(SCHEDULES[name].asynchronous for name in parse_schedules(schedules))
        for option, system in self._named.items():
            if system in _SEARCHED_FOR and not apart:
                raise InputError(
                    f"{option} is for {system}, whose stages update after every micro-batch: no plan of --schedules {schedules} does. "
                    f"Search with --for {system} alone, or --schedules {_SEARCHED_FOR[system]}."
                )
            if system in TARGETS and system not in _SEARCHED_FOR and apart:
                raise InputError(
                    f"--schedules is '{schedules}', whose stages update after every micro-batch; {system} ({option}) updates once an "
                    "iteration. Leave one of the two out."
                )

    def check_model(self, request: Request) -> None:
        """Says that a system takes no plan of the model."""
        from penstock.cli.export import check_model

        for system in self._named.values():
            check_model(system, request.model, request.schedules)

    def check_lengths(self, said: Collection[str], lengths: Path | None) -> None:
        """Refuses options that say nothing of batches planned one by one, and systems that have none; how long samples are, files of
        lengths say, and data does not."""
        from penstock.cli.export import LAUNCHERS

        for name in (*(["seq-length"] if lengths else []), *_WITHOUT_LENGTHS):
            if name in said:
                raise InputError(
                    f"--{name} does not go with --lengths or --data, whose batches are planned one by one, for time. Drop one of them."
                )
        if self.target and self.target.system not in LAUNCHERS:
            raise InputError(
                f"--export is for {self.target.system}, which cannot express micro-batches that differ from batch to batch, as --lengths "
                "and --data plan them. Drop one of them."
            )

    def kept(self, request: Request, outcome: Outcome, top: int) -> tuple[Outcome, str]:
        """The plans that the system can express, and a sentence on what that costs."""
        if not self.planned:
            return outcome, ""
        from penstock.cli.export import refusal_of
        from penstock.cli.plan_words import plan_name
        from penstock.search.expressible import expressible

        kept = expressible(
            request, outcome.choices, lambda plan: refusal_of(plan, self.planned), top, _CHANGES.get(self.planned)
        )  # fmt: skip
        fastest, best = outcome.choices[0], kept.choices[0]
        slower = best.estimate.time_s / fastest.estimate.time_s
        found = replace(outcome, choices=kept.choices, offered=best, formula_s=slower * outcome.formula_s)
        if not kept.reason:
            return found, ""
        name = f"{plan_name(fastest.plan)} at {format_time(fastest.estimate.time_s)}"
        return found, (
            f"{self.planned} cannot express the fastest plan found, {name}: {kept.reason} This one is {format_share(slower - 1)} slower"
        )

    def export(self, plan: Plan, path: Path | None) -> None:
        """Writes the plan, which is in a file already if there is a path, for the system that gets it."""
        from penstock.cli.export import export_plan

        if self.target is None:
            return
        try:
            export_plan(plan, self.target, path or Path("plan.json"))
        except InputError as error:
            raise InputError(f"{error} The search was not in vain: its plans are in '{path}'." if path else str(error)) from None


def _target(text: str) -> Target | None:
    """Parses `--export`."""
    from penstock.cli.export import WEIGHTS, parse_target

    target = parse_target(text, "--export") if text else None
    if target and target.system == WEIGHTS:
        other = shell_words("penstock", "export", "RUN", "--to", text)
        raise InputError(f"--export is '{text}': a plan has no weights. Export those of a checkpoint: {other}")
    return target


def _undivided(plan: Plan) -> Plan:
    """The plan for systems without ZeRO."""
    return replace(plan, stages=tuple(replace(stage, zero=0) for stage in plan.stages))


def _asynchronous(plan: Plan) -> Plan:
    """The plan as DynPipe runs it: updates of each stage on their own."""
    return replace(_undivided(plan), schedule="pipedream")


_CHANGES: Mapping[str, Callable[[Plan], Plan]] = {"aceso": _undivided, "fasop": _undivided, "dynpipe": _asynchronous}
"""What a plan becomes for systems that have less, before it is asked whether they take it."""
