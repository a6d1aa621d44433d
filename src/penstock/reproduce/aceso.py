"""Aceso's figures 7, 8, 9, 15 and 16 from its profiled tables; sizes without tables are left as published."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import InputError
from penstock.files import read_text, write_json
from penstock.reproduce.aceso_cases import searched_cases
from penstock.reproduce.aceso_plans import CASE_STUDIES, PLANS
from penstock.reproduce.figures import Claim, Drawing, Evidence, FigureSpec, Plotted, Reproduction, at_least, at_most
from penstock.reproduce.trained import TRAINED

__all__ = ["ACESO_FIGURES"]

_LAYERS = (8, 16, 32, 64, 128, 256, 512, 1024)


def _table(evidence: Evidence, name: str) -> tuple[list[str], dict[str, list[float]]]:
    """The columns and rows of one of Aceso's result files, whose cells are padded with spaces."""
    path = evidence.folder / "ref-results" / f"{name}.csv"
    lines = [[cell.strip() for cell in line.split(",")] for line in read_text(path, "result table").splitlines() if line.strip()]
    try:
        return lines[0][1:], {line[0]: [float(cell) for cell in line[1:]] for line in lines[1:]}
    except (IndexError, ValueError) as error:
        raise InputError(f"result table '{path}' is not as Aceso publishes it: {error}.") from None


def _found(evidence: Evidence) -> dict[tuple[str, str], tuple[float, float]]:
    """(time_s, CPU seconds) by family and size, of the paper's cases that have tables."""
    cases = {case: one for case, one in searched_cases(evidence).items() if case.folder == "eurosys"}
    return {(case.model, case.size): (one.answer.time_s, one.cpu_s) for case, one in cases.items()}


def _predicted(evidence: Evidence) -> dict[tuple[str, str], float]:
    """Seconds that Aceso predicts of its own plans."""
    found: dict[tuple[str, str], float] = {}
    for family in ("gpt", "resnet"):
        sizes, rows = _table(evidence, f"perf_model_time_large_{family}")
        found |= {(family, size): time_s for size, time_s in zip(sizes, rows["predict"], strict=True)}
    return found


def _throughput(evidence: Evidence) -> Drawing:
    places: list[str] = []
    values: dict[str, list[float | None]] = {"Megatron-LM": [], "Alpa": [], "Aceso": [], "Penstock": []}
    found, predicted, claims = _found(evidence), _predicted(evidence), []
    for family in ("gpt", "t5", "resnet"):
        sizes, rows = _table(evidence, f"e2e_norm_thpt_large_{family}")
        for index, size in enumerate(sizes):
            places.append(f"{family}\n{size.replace('_', '.')}")
            for label, row in (("Megatron-LM", "megatron"), ("Alpa", "alpa"), ("Aceso", "aceso")):
                values[label].append(rows[row][index] or None)
            both = (family, size) in found and (family, size) in predicted
            ratio = predicted[family, size] / found[family, size][0] if both else None
            values["Penstock"].append(rows["aceso"][index] * ratio if ratio else None)
            if ratio:
                claims.append(at_least(f"{family} {size}: times as fast as Aceso's plan, by its own cost model", ratio, 1.005))
    curves = [Plotted(label, places, row, published=label != "Penstock") for label, row in values.items()]
    return Drawing(curves, "model", "throughput, Megatron-LM = 1", claims, note=(
        "Bars of Megatron-LM, Alpa and Aceso are measured and published by Aceso's authors. Penstock's are Aceso's, multiplied by how much "
        "faster its plan is by the cost model of Aceso; nothing was trained. Sizes without published tables or predictions have no bar."
    ))  # fmt: skip


def _search_time(evidence: Evidence) -> Drawing:
    places: list[str] = []
    values: dict[str, list[float | None]] = {"Alpa": [], "Aceso": [], "Penstock": []}
    found, claims = _found(evidence), []
    for family in ("gpt", "resnet"):
        sizes, rows = _table(evidence, f"search_cost_large_{family}")
        for index, size in enumerate(sizes):
            places.append(f"{family} {size.replace('_', '.')}")
            values["Alpa"].append(rows["alpa"][index] or None)
            values["Aceso"].append(rows["aceso"][index] or None)
            own = found.get((family, size))
            values["Penstock"].append(own[1] if own else None)
            if own:
                claims.append(at_most(f"{family} {size}: CPU seconds of the search", own[1], 8.0))
    curves = [Plotted(label, places, row, published=label != "Penstock") for label, row in values.items()]
    return Drawing(curves, "model", "search, seconds", claims, log_y=True, note=(
        "Alpa's and Aceso's times are published (wall seconds on their machines); Penstock's are CPU seconds of this run."
    ))  # fmt: skip


def _long_chains(evidence: Evidence) -> Drawing:
    """Throughput by the number of layers: the roofline's, since the table of the layer that was repeated is not published."""
    from penstock.search import search_plans

    sizes, rows = _table(evidence, "e2e_thpt_scale_scale-layer")
    published = dict(zip((int(size.removesuffix("layers")) for size in sizes), zip(*rows.values(), strict=True), strict=True))
    chosen = (8, 64, 1024) if evidence.quick else _LAYERS
    ours, claims = [], list[Claim]()
    with tempfile.TemporaryDirectory() as folder:
        for layers in chosen:
            path = Path(folder) / "model.yaml"
            write_json(path, {"base": "gpt-1.3b", "layers": layers, "hidden": 512, "heads": 8})
            cpu = time.process_time()
            outcome = search_plans(str(path), "8xv100-32gb", 1024, top=1)
            ours.append(1024 / outcome.choices[0].estimate.time_s)
            if layers == max(chosen):
                claims = [at_most(f"{layers:,} layers: CPU seconds of the search", time.process_time() - cpu, 12.0),
                          at_most(f"{layers:,} layers: share above the bound", outcome.gap, 0.025)]  # fmt: skip
    curves = [Plotted(label, list(published), [row[index] or None for row in published.values()], published=True)
              for index, label in enumerate(("Megatron-LM", "Alpa", "Aceso"))]  # fmt: skip
    curves.append(Plotted("Penstock, by its roofline", chosen, ours))
    return Drawing(curves, "layers", "samples per second", claims, "lines", log_x=True, log_y=True, note=(
        "Published curves are measured on 8 V100. Penstock's is what its roofline of 8 V100 predicts of the plan found, so only its "
        "form and the time to find it compare."
    ))  # fmt: skip


def _accuracy(what: str, unit: str, row: str, families: Sequence[str] = ("gpt", "resnet")) -> FigureSpec:
    """Aceso's own predictions beside its measurements, redrawn."""
    number, title = ("15", "time") if what == "time" else ("16", "memory")

    def make(evidence: Evidence) -> Drawing:
        places: list[str] = []
        actual: list[float | None] = []
        predicted: list[float | None] = []
        for family in families:
            sizes, rows = _table(evidence, f"perf_model_{what}_large_{family}")
            extra = rows.get("predict (extra)", [0.0] * len(sizes))
            places += [f"{family} {size.replace('_', '.')}" for size in sizes]
            actual += rows["actual"]
            predicted += [own + more for own, more in zip(rows[row], extra, strict=True)]
        curves = [Plotted("measured", places, actual, published=True), Plotted("predicted by Aceso", places, predicted, published=True)]
        errors = [abs(p / a - 1) for p, a in zip(predicted, actual, strict=True) if p is not None and a]
        claims = [at_most("mean error of Aceso's prediction, as published", sum(errors) / len(errors), 0.25)]
        return Drawing(curves, "model", unit, claims, note="Redrawn from Aceso's result files; nothing is of this run.")

    return FigureSpec(number, f"figure {number}: predicted and measured {title}", make, ("ref-results",))


ACESO_FIGURES = Reproduction("aceso", (
    FigureSpec("7", "figure 7: throughput", _throughput, ("ref-results", "eurosys")),
    FigureSpec("8", "figure 8: time of the search", _search_time, ("ref-results", "eurosys")),
    FigureSpec("9", "figure 9: chains of 8 to 1,024 layers", _long_chains, ("ref-results",)),
    _accuracy("time", "seconds per iteration", "predict"), _accuracy("mem", "MB on a GPU", "predict (norm)"),
    PLANS, CASE_STUDIES, TRAINED,
), "Aceso's artifact (microsoft/SuperScaler on GitHub, MIT) has them: its profiled-time-eurosys as eurosys/, its "
   "profiled-time-miniset as miniset/, its result CSVs as ref-results/.")  # fmt: skip
