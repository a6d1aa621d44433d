"""Aceso's plans and ours for the same cases, by Aceso's cost model: how long they take, and how its two case studies are cut."""

from __future__ import annotations

from penstock.reproduce.aceso_cases import AcesoCase, searched_cases
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, at_least, at_most, compared
from penstock.reproduce.peers.aceso import AcesoFound, search_with_aceso

__all__ = ["CASE_STUDIES", "PLANS"]

_BUDGET_S, _QUICK_BUDGET_S = 200.0, 10.0
"""Wall seconds that Aceso searches each case for: as its scripts do, and in the short form."""
_STUDIES = {("gpt", "1_3B"): (80, 83, 84, 68), ("resnet", "6_8B"): (22, 13, 27, 10, 37, 25)}
"""Ops of each stage in the plans that Aceso's search is known to find for the case studies of its paper."""


def _aceso_searches(evidence: Evidence) -> tuple[dict[AcesoCase, AcesoFound], str]:
    """What Aceso's own search finds where a checkout is given, and what is to be said about it."""
    budget_s = _QUICK_BUDGET_S if evidence.quick else _BUDGET_S

    found, said = evidence.beside(
        "Aceso", searched_cases(evidence), lambda peer, case: search_with_aceso(peer, case, evidence.folder / case.folder, budget_s)
    )
    here = f"Aceso's own search ran here, for {budget_s:g} s of wall time a case, a process for each depth."
    return found, f"{here if found else ''} {said}".strip()


def _plans(evidence: Evidence) -> Drawing:
    ours, (theirs, said) = searched_cases(evidence), _aceso_searches(evidence)
    places = {case: case.title for case in ours}
    found = {case.title: one.time_s for case, one in theirs.items()}
    known = {case.title: case.aceso_s for case in ours if case.aceso_s}
    claims = []
    for case, one in ours.items():
        aceso_s = found.get(case.title) or known.get(case.title)
        name = case.title.replace("\n", ", ")
        if aceso_s:
            claims.append(at_least(f"{name}: times as fast as Aceso's plan", aceso_s / one.answer.time_s, 1.005))
        claims.append(at_most(f"{name}: share above the bound", one.answer.time_s / one.answer.bound_s - 1, 0.03))
    curves = [
        *compared("Aceso", list(places.values()), found, known),
        Plotted("Penstock", list(places.values()), [one.answer.time_s for one in ours.values()]),
        Plotted("bound", list(places.values()), [one.answer.bound_s for one in ours.values()]),
    ]
    took = ", ".join(f"{one.cpu_s:.0f}" for one in theirs.values())
    return Drawing(curves, "case", "seconds per iteration", claims, note=(
        f"All by Aceso's cost model over its tables; nothing was trained. {said}"
        + (f" CPU seconds of its searches: {took}; of ours: {', '.join(f'{one.cpu_s:.1f}' for one in ours.values())}." if took else "")
    ))  # fmt: skip


def _studies(evidence: Evidence) -> Drawing:
    """Ops of each stage, with how many of them are recomputed and on how many GPUs in the note."""
    ours, (theirs, said) = searched_cases(evidence), _aceso_searches(evidence)
    found: dict[str, float] = {}
    known: dict[str, float] = {}
    own: dict[str, float] = {}
    described = []
    for case in (one for one in ours if one.folder == "eurosys" and (one.model, one.size) in _STUDIES):
        plan = ours[case].answer.plan
        peers = theirs[case].plan["num_ops_in_each_stage"] if case in theirs else None
        for counts, into in ((plan["num_ops_in_each_stage"], own), (peers or _STUDIES[case.model, case.size], found if peers else known)):
            into |= {f"{case.model} {number}": float(count) for number, count in enumerate(counts, 1)}
        again = [sum(flags) for flags in plan["recompute_ops"]]
        described.append(f"{case.model} {case.size.replace('_', '.')}: GPUs {plan['num_gpus']}, micro-batch {plan['micro_batch_size']}, "
                         f"{sum(again)} ops recomputed")  # fmt: skip
    places = list(dict.fromkeys(sorted([*own, *found, *known], key=lambda place: (place.split()[0], int(place.split()[1])))))
    curves = [*compared("Aceso", places, found, known), Plotted("Penstock", places, [own.get(place) for place in places])]
    return Drawing(curves, "stage", "ops", note=f"Penstock's plans: {'; '.join(described)}. {said}")


PLANS = FigureSpec("plans", "plans of the small set and of the paper, by Aceso's cost model", _plans, ("miniset", "eurosys"))
CASE_STUDIES = FigureSpec("cases", "case studies: where the plans are cut", _studies, ("eurosys",))
