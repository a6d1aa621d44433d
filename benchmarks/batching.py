"""Batch planning under DynaPipe's cost tables: one JSON line per batch, scored by an independent judge.

    python benchmarks/batching.py --data DIR                 the known batches (DIR holds the tables, configs.json and inputs/)
    python benchmarks/batching.py --inputs DIR --tables DIR --config NAME [--case NAME]     any others: a CSV per batch
    python benchmarks/batching.py --data DIR --orders        orders of encoder-decoder batches against sorting and clusters with a tour
    python benchmarks/batching.py --data DIR --curve         planning time from 128 to 32,768 samples
    python benchmarks/batching.py --packing                  packed, padded and fixed rows for 1 to 16 stages
    --judge FILE scores the plans with an independent program (dynapipe_judge.py); --steps N sets the steps of search
    --free-layers also moves layers between stages, which a plan would fix

Times are CPU seconds of one core in a warm process: kernels are compiled and tables read before the first plan.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from judges import load_judge

from penstock.batching.baselines import packed_rows, run_baseline
from penstock.batching.example import small_costs
from penstock.batching.fitting import positions
from penstock.batching.lengths import read_lengths
from penstock.batching.ordering import by_length, curves, tour
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planned import planned_costs, with_recompute_choices
from penstock.batching.planner import plan_batch
from penstock.batching.search import usual_steps
from penstock.batching.split import Windows
from penstock.batching.ways import one_mode
from penstock.clusters import resolve_cluster
from penstock.costs.sources import open_costs
from penstock.errors import InfeasibleError
from penstock.files import read_json, write_json
from penstock.models import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.reproduce.dynapipe_batches import seeded_lengths
from penstock.systems.dynapipe.inputs import TABLES, PlannerConfig
from penstock.systems.dynapipe.rules import dynapipe_costs, dynapipe_plan
from penstock.systems.dynapipe.search import best_layers
from penstock.systems.dynapipe.tables import DynaPipeTables, open_configuration
from penstock.systems.tables import read_checked

KNOWN = (
    ("gpt_tok65536_max2048", "gptA"), ("gpt_tok65536_max4096", "gptA"), ("gpt_n512_max2048", "gptA"), ("gpt_n2048_max2048", "gptA"),
    ("gpt_n8192_max2048", "gptA"), ("t5_tok65536_max2048", "t5D"), ("t5_n2048_max2048", "t5D"), ("t5_tok65536_max2048", "t5C"),
)  # fmt: skip
Result = TypeVar("Result")


def configured(folder: Path, name: str) -> tuple[DynaPipeTables, PlannerConfig]:
    """A configuration of `configs.json`, or of a JSON file of its own, and the tables of its model."""
    if not name.endswith(".json"):
        return open_configuration(folder / name)
    config = read_checked(Path(name), "configuration", PlannerConfig)
    return DynaPipeTables.open(folder / TABLES[config.model]), config


def timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """(result, CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def run(path: Path, config_name: str, tables: Path, out: Path, judge: Any, steps: int | None, free_layers: bool) -> dict[str, Any]:
    """Plans one batch at once and with search, writes the plan and scores it."""
    table, config = configured(tables, config_name)
    samples = read_lengths(path)
    config = best_layers(table, config, samples) if free_layers else config
    costs = dynapipe_costs(table, config)
    steps = usual_steps(costs, len(samples)) if steps is None else steps
    first, first_s, _ = timed(lambda: plan_batch(samples, costs))
    batch, cpu_s, wall_s = timed(lambda: plan_batch(samples, costs, steps=steps))
    bound = plan_batch(samples, costs, bound=True).bound_s
    plan_path = out / f"{path.stem}_{Path(config_name).stem}.json"
    write_json(plan_path, dynapipe_plan(batch, costs.modes))
    judged = score(judge, path, plan_path, config, tables)
    return {
        "case": path.stem, "config": config_name, "samples": len(samples), "steps": steps, "planning_time_s": round(cpu_s, 4),
        "wall_time_s": round(wall_s, 4), "judged_iteration_ms": judged and judged.iteration_ms,
        "predicted_iteration_ms": batch.predicted_s * 1e3, "at_once_time_s": round(first_s, 4), "at_once_ms": first.predicted_s * 1e3,
        "bound_ms": bound * 1e3, "gap": batch.predicted_s / bound - 1, "peak_memory_mb": batch.peak_bytes / 1e6,
        "padding_share": batch.padding_share, "layers_per_stage": list(config.layers_per_stage),
        "micro_batches": batch.num_micro_batches, "plan_path": str(plan_path),
    }  # fmt: skip


def score(judge: Any, batch: Path, plan: Path, config: PlannerConfig, tables: Path) -> Any:
    """The judge's score, or None without one; an invalid plan ends the run."""
    if judge is None:
        return None
    fields = {"model": config.model, "layers": config.layers, "tp": config.tp, "pp": config.pp, "dp": config.dp, "zero": config.zero}
    extra = {"layers_per_stage": list(config.layers_per_stage)} if config.layers_per_stage else {}
    if config.gpus_per_node:
        extra["gpus_per_node"] = config.gpus_per_node
    found = judge.evaluate(judge.read_batch(batch), read_json(plan, "plan"), {**fields, "mem": config.mem, **extra}, str(tables))
    if not found.ok:
        raise SystemExit(f"{plan} is not a valid plan: {found.errors or 'does not fit'}")
    return found


def curve(tables: Path) -> None:
    """Planning time at once and with search, by the size of the batch."""
    print(
        f"{'config':8} {'samples':>8} {'at once s':>10} {'µs per sample':>14} {'of n log n':>11} {'with search s':>14} {'iteration s':>12}"
    )
    for name in ("gptA", "t5D"):
        costs = dynapipe_costs(*configured(tables, name))
        base = 0.0
        for count in (128 << k for k in range(9)):
            samples = seeded_lengths(count, costs.has_decoder)
            best = min(timed(partial(plan_batch, samples, costs))[1] for _ in range(3))
            batch, full_s, _ = timed(partial(plan_batch, samples, costs, steps=usual_steps(costs, count)))
            unit = best / (count * np.log2(count))
            base = base or unit
            print(
                f"{name:8} {count:8} {best:10.4f} {best / count * 1e6:14.1f} {unit / base:11.2f} {full_s:14.3f} {batch.predicted_s:12.3f}"
            )


def orders(tables: Path, inputs: Path) -> None:
    """What splitting gives after each order of encoder-decoder batches, and what the order takes."""
    costs = dynapipe_costs(*configured(tables, "t5D"))
    print(f"{'batch':22} {'order':24} {'split ms':>9} {'order CPU s':>12}")
    for case in ("t5_tok65536_max2048", "t5_n512_max2048", "t5_n2048_max2048"):
        samples = read_lengths(inputs / f"{case}.csv")
        enc, dec = positions(samples, costs)
        kinds: dict[str, Callable[[], list[np.ndarray]]] = {
            "by length": lambda enc=enc, dec=dec: [by_length(enc, dec)],
            "by sum of lengths": lambda enc=enc, dec=dec: [np.argsort(-(enc + dec), kind="stable")],
            "clusters and tour": lambda enc=enc, dec=dec: [tour(enc, dec)],
            "Hilbert, best of 4 turns": lambda enc=enc, dec=dec: curves(enc, dec),
        }
        for name, make in kinds.items():
            found, order_s, _ = timed(make)
            best = min(Windows(costs, enc, dec, order, 64).split(np.inf)[0] for order in found)
            print(f"{case:22} {name:24} {best * 1e3:9.0f} {order_s:12.4f}", flush=True)
        planned, _, _ = timed(partial(plan_batch, samples, costs, steps=usual_steps(costs, len(samples))))
        print(f"{case:22} {'Hilbert and search':24} {planned.predicted_s * 1e3:9.0f}", flush=True)


def best_of(plans: Iterator[Callable[[], BatchPlan]]) -> float:
    """Milliseconds of the fastest plan that fits."""
    times = [math.inf]
    for plan in plans:
        try:
            times.append(plan().predicted_s * 1e3)
        except InfeasibleError:
            continue
    return min(times)


def packing(model_name: str, source_name: str, device: str, counts: Sequence[int], steps: int) -> None:
    """Packed and padded planning against fixed rows, by the number of stages; two replicas."""
    columns = ("samples", "stages", "padded, DynaPipe-style", "padded", "packed", "rows, inside", "rows, across", "bound")
    print(f"{model_name}, {source_name}, two replicas; ms per iteration")
    print("".join(f"{name:>{len(name) + 3}}" for name in (*columns, "vs style", "vs rows")))
    for count in counts:
        for stages in (1, 2, 4, 8, 16):
            style, padded, packed, inside, across, bound = compare(model_name, source_name, f"{2 * stages}x{device}", stages, count, steps)
            cells = [str(count), str(stages), *(f"{ms:.0f}" for ms in (style, padded, packed, inside, across, bound))]
            cells += [f"{packed / style - 1:.1%}", f"{packed / inside - 1:.1%}"]
            widths = [len(name) + 3 for name in (*columns, "vs style", "vs rows")]
            print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def compare(model_name: str, source_name: str, cluster_name: str, stages: int, count: int, steps: int) -> list[float]:
    """Milliseconds of padded planning with one mode, padded and packed with search, fixed rows with both attentions; the bound."""
    model, cluster, samples = resolve_model(model_name), resolve_cluster(cluster_name), seeded_lengths(count, False)
    plan = uniform_plan(model_name, cluster_name, global_batch=count, micro_batch=1, pp=stages, replicas=2, layout="packed", zero=1)
    plan = with_recompute_choices(replace(plan, micro_batching=MicroBatching("packed", "dynamic")), model)
    both = planned_costs(plan, model, cluster, open_costs(source_name, cluster), 2048)
    padded = replace(both, layouts={"padded": both.layouts["padded"]})
    style = best_of(partial(plan_batch, samples, one_mode(padded, mode)) for mode in range(len(both.modes)))
    own = [best_of(iter([partial(plan_batch, samples, costs, steps=steps)])) for costs in (padded, both)]
    rows = [
        best_of(partial(run_baseline, packed_rows(samples, both, size, attention=attention), both, "rows") for size in (1, 2, 4, 8))
        for attention in ("inside", "across")
    ]
    return [style, *own, *rows, plan_batch(samples, both, bound=True).bound_s * 1e3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the tables, configs.json and inputs/")
    parser.add_argument("--inputs", type=Path, help="folder of batches (sample_id,enc_len,dec_len)")
    parser.add_argument("--tables", type=Path, help="folder of cost tables and configs.json")
    parser.add_argument("--case", help="one batch of the folder, by its name without .csv")
    parser.add_argument("--config", help="a name in configs.json, or a JSON file; without it gptA and t5D")
    parser.add_argument("--steps", type=int, help="steps of search; without it what the size of the batch suggests")
    parser.add_argument("--free-layers", action="store_true", help="also move layers between stages")
    parser.add_argument("--judge", type=Path, help="dynapipe_judge.py")
    parser.add_argument("--out", type=Path, help="folder for plans; without it a temporary one")
    parser.add_argument("--curve", action="store_true", help="planning time by the size of the batch")
    parser.add_argument("--orders", action="store_true", help="orders of encoder-decoder batches")
    parser.add_argument("--packing", action="store_true", help="packed and padded planning against fixed rows")
    parser.add_argument("--model", default="gpt-6.7b", help="with --packing")
    parser.add_argument("--costs", default="profile:h200-141gb", help="with --packing: roofline or profile:NAME")
    parser.add_argument("--device", default="h200-141gb", help="with --packing")
    options = parser.parse_args()
    if options.packing:
        packing(options.model, options.costs, options.device, (330, 2048), 40_000 if options.steps is None else options.steps)
        return
    tables, inputs = options.tables or options.data, options.inputs or (options.data and options.data / "inputs")
    if tables is None or inputs is None:
        parser.error("give --data, or --inputs and --tables")
    plan_batch([SampleLengths(0, 3, 1), SampleLengths(1, 5, 2)], small_costs(), steps=1)  # loads the kernels
    if options.curve:
        curve(tables)
        return
    if options.orders:
        orders(tables, inputs)
        return
    out = options.out or Path(tempfile.mkdtemp(prefix="batches_"))
    out.mkdir(parents=True, exist_ok=True)
    cases = [(path, options.config or ("t5D" if path.stem.startswith("t5") else "gptA")) for path in sorted(inputs.glob("*.csv"))]
    if options.data and not options.inputs and not options.case and not options.config:
        cases = [(inputs / f"{case}.csv", config) for case, config in KNOWN]
    if options.case:
        cases = [case for case in cases if case[0].stem == options.case]
    if not cases:
        parser.error(f"{inputs} holds no such batch")
    judge = load_judge(options.judge)
    for path, config in cases:
        print(json.dumps(run(path, config, tables, out, judge, options.steps, options.free_layers)), flush=True)


if __name__ == "__main__":
    main()
