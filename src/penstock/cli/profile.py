"""`penstock profile`: measure a model's ops on this machine's device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import JsonFlag, out, print_json, progress, table
from penstock.cli.options import BIG, file_to_go_on_with, within
from penstock.errors import InputError, near_misses, plural

if TYPE_CHECKING:
    from penstock.costs.profile import BesidePoint
    from penstock.models.ops import Model
    from penstock.profiling.run import Profiler
    from penstock.profiling.units import Unit

__all__ = ["profile"]

_NOISY = 0.5
"""Held-out points are off by a few percent on a device that has nothing else to do."""


def profile(
    path: Annotated[
        str, typer.Option("--out", callback=file_to_go_on_with, help="Profile to write, or to go on with (`.json`, `.json.gz`).")
    ],
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Model name, YAML file, hf:PATH or module:FILE.py:FUNCTION; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.")] = "cpu",
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees whose shards are measured.")] = "1,2,4,8",
    beside: Annotated[
        str, typer.Option(metavar="LOADS", help="Also measure ops beside so many processes that keep the device busy, such as 0.5,1,2.")
    ] = "",
    merge: Annotated[list[str] | None, typer.Option(help="Profiles of other machines to take in; may be repeated.")] = None,
    time_budget: Annotated[
        float, typer.Option(callback=within(0, BIG), help="Stop after this many seconds; run again to go on. 0: no limit.")
    ] = 0.0,
    repeats: Annotated[
        int, typer.Option(callback=within(0, 1000), help="Passes that are timed of each shape; 0: 4 on a GPU, 2 on a processor.")
    ] = 0,
    warm_up: Annotated[
        float | None,
        typer.Option(callback=within(0, BIG), help="Seconds that work runs which fills the device before it is timed; 0.5 on a GPU."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure ops (forward, backward, memory), the optimizer, and, under torchrun, collectives and transfers.

    Results are saved piece by piece: a run that was stopped goes on where it was.

    Example: penstock profile --model gpt-small --device cpu --out profile.json
    """
    _check_request(path, bool(model or merge))
    degrees, loads = _degrees(tp), _loads(beside)
    models = _models(model or [], device)
    _check_device(device)
    from penstock.costs.profile import read_profile
    from penstock.profiling.links import join_ranks, measure_links
    from penstock.profiling.run import Profiler
    from penstock.runtime.transport.allocator import keep_freed_memory

    keep_freed_memory()  # as ranks do
    rank = join_ranks(device)
    profiler = Profiler.open(path, device)
    profiler.repeats, profiler.warm_up_s = repeats, warm_up
    for other in merge or []:
        profiler.profile.merge(read_profile(other))
    profiler.here.links[:] = measure_links(profiler.device) or profiler.here.links  # first, so that no rank waits for another's ops
    if rank:
        return
    units = profiler.units(models, degrees, loads)
    if models and not units and not profiler.here.series:
        raise InputError(f"--tp is '{tp}', which divides no op of {', '.join(known.name for known in models)}. Use 1, or powers of two.")
    left = _measure(profiler, units, time_budget, quiet=json)
    profiler.profile.write(path)
    _tell(profiler, path, left, json)


def _measure(profiler: Profiler, units: Sequence[Unit], time_budget_s: float, *, quiet: bool) -> int:
    """Measures units until the time budget (0: none) is spent; how many are left."""
    with progress("profiling", len(units), quiet=quiet) as bar:

        def report(name: str) -> None:
            bar.describe(name)
            bar.advance()

        return len(units) - profiler.run(units, time_budget_s=time_budget_s or float("inf"), progress=report)


def _check_request(path: str, has_work: bool) -> None:
    """Refuses what could only fail, or do nothing, later."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"--out is '{path}', which is not a file; the name of a file (.json, .json.gz) was expected.")
    if not has_work and "WORLD_SIZE" not in os.environ and not os.path.exists(path):
        raise InputError("nothing to measure: give --model (such as gpt-small), or --merge. Links alone are measured under torchrun.")


def _degrees(text: str) -> list[int]:
    try:
        degrees = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"--tp is '{text}'; expected numbers such as 1,2,4,8.") from None
    if degrees[0] < 1:
        raise InputError(f"--tp is '{text}'; degrees start at 1.")
    return degrees


def _loads(text: str) -> list[float]:
    from penstock.processes.burners import MAX_FACTOR

    try:
        loads = sorted({float(part) for part in text.split(",")}) if text else []
    except ValueError:
        raise InputError(f"--beside is '{text}'; expected numbers such as 0.5,1,2.") from None
    if not all(0 < load <= MAX_FACTOR for load in loads):
        raise InputError(f"--beside is '{text}'; loads are above 0, and at most {MAX_FACTOR:g}.")
    return loads


def _models(names: list[str], device: str) -> list[Model]:
    """The models in the precision that a search for this machine would choose."""
    from penstock.clusters import resolve_cluster
    from penstock.models import resolve_model
    from penstock.plans.precision import chosen_precision

    cluster = resolve_cluster("1xcpu" if device == "cpu" else "local")
    return [chosen_precision(resolve_model(name), cluster)[0] for name in names]


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device is '{device}'. {near_misses(device, ('cpu', 'cuda'))}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device is 'cuda', but torch sees no GPU here. Check the driver with nvidia-smi, or use --device cpu.")


def _tell(profiler: Profiler, path: str, left: int, json: bool) -> None:
    here = profiler.here
    errors = [abs(error) for _, error in here.held_out]
    mean, worst = (sum(errors) / len(errors), max(errors)) if errors else (0.0, 0.0)
    points = sum(len(series) for series in here.series.values())
    if json:
        print_json({"out": path, "device": profiler.name, "series": len(here.series), "points": points, "units_left": left,
                    "beside": _slower(here.beside),
                    "held_out_points": len(errors), "held_out_mean_error": mean, "held_out_worst_error": worst})  # fmt: skip
        return
    rows = [
        ("device", f"{profiler.name} ({here.about.get('device')})"), ("distinct ops measured", str(len(here.series))),
        ("points", str(points)), ("out of memory", str(len(here.out_of_memory))),
        ("held-out points", str(len(errors))), ("held-out error, mean / worst", f"{mean:.1%} / {worst:.1%}"),
        ("links", f"{len(here.links)} measured" if here.links else "modelled (one rank here)"),
    ]  # fmt: skip
    out().print(table(f"profile {path}", ("what", "value"), rows))
    for load, factors in sorted(_slower(here.beside).items()):
        told = ", ".join(f"{op_class} {factor:.2f}x" for op_class, factor in sorted(factors.items()))
        out().print(f"beside {load:g} busy: {told} as long", markup=False, highlight=False)
    if worst > _NOISY:
        out().print(f"note: a held-out point is off by {worst:.0%}: something else kept the device busy. Measure again, to another file.")
    if left:
        out().print(f"{plural(left, 'unit')} of work left: run the same command again to go on.")


def _slower(points: Iterable[BesidePoint]) -> dict[float, dict[str, float]]:
    """The slow-down of each class of ops beside each load, all models together."""
    found: dict[float, dict[str, float]] = {}
    for load, op_class in {(point.load, point.op_class) for point in points}:
        own = [point for point in points if (point.load, point.op_class) == (load, op_class)]
        found.setdefault(load, {})[op_class] = sum(point.beside_s for point in own) / sum(point.alone_s for point in own)
    return found
