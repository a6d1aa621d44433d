"""Plan search on Aceso's and FASOP's tables: one JSON line per case, and a table against Aceso's own results.

    python benchmarks/search.py --data DIR                          the known cases (DIR holds aceso/eurosys and aceso/miniset);
                                                                    --cuts both for plans that can be imported
    python benchmarks/search.py --aceso-db DIR --model gpt --size 1_3B --nodes 1 --gpus-per-node 4 --global-batch 1024
        --micro-batches 1,2,4,8 --memory-mb 28000                   any other; --layers 1024 repeats its layer so often
    python benchmarks/search.py --fasop-dir DIR [--setting NAME]    one of FASOP's experiments, or all that spell a cluster
    python benchmarks/search.py --fasop-dir DIR --setting NAME --pareto [--most A=8,B=8]    every cluster of up to so many nodes
    python benchmarks/search.py --scale                             long chains, thousands of devices, hundreds of two kinds; roofline costs
    python benchmarks/search.py --op-degrees                        stages with degrees of each op against stages with one for all
    python benchmarks/search.py --unequal                           replicas of unequal speed against replicas that are alike
    python benchmarks/search.py --money                             all choices of nodes from a pool by time and money, on all cores
    --judge FILE scores the plans with an independent program (aceso_judge.py, fasop_judge.py)

Times are of a warm process: kernels are compiled and imports done before the first search. Peak memory is that of the process, so of
all cases so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from judges import load_judge

from penstock.files import write_json
from penstock.kernels import compile_all
from penstock.plans.schema import write_plan
from penstock.plans.texts import format_counts
from penstock.processes.states import family_cpu_s
from penstock.reproduce.aceso_cases import KNOWN_CASES, AcesoCase, searched
from penstock.search import Request, offers, search, search_plans
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.space.families import families
from penstock.search.uniform import uniform_choices
from penstock.systems.aceso.rules import CUTS
from penstock.systems.fasop.search import FasopAnswer, pareto_fasop, search_fasop
from penstock.systems.fasop.tables import FasopTables


def run(case: AcesoCase, folder: Path, out: Path, judge: Any) -> dict[str, Any]:
    """Searches one case, writes its plan and scores it."""
    found = searched(case, folder)
    answer, took = found.answer, found.took_s
    gpus = case.num_gpus
    size = case.size + (f"_{case.layers}layers" if case.layers else "")
    path = out / f"{case.folder}_{case.model}_{size}_{gpus}gpus.json"
    write_json(path, answer.plan)
    judged = judge.evaluate(answer.plan, str(folder), case.nodes, case.gpus_per_node, case.memory_mb) if judge else None
    if judged is not None and not judged.ok:
        raise SystemExit(f"{path} is not a valid plan: {judged.errors or 'does not fit'}")
    return {
        "case": f"{case.folder} {case.model} {size}, {gpus} GPUs", "search_time_s": round(took, 3), "peak_memory_mb": peak_memory_mb(),
        "judged_time_s": judged.iteration_s if judged else None, "predicted_time_s": answer.time_s, "lower_bound_s": answer.bound_s,
        "gap": answer.time_s / answer.bound_s - 1, "aceso_s": case.aceso_s, "plan_path": str(path),
    }  # fmt: skip


def run_fasop(arguments: argparse.Namespace, judge: Any) -> None:
    """Searches FASOP's settings and prints a line for each, or for each cluster of a Pareto set."""
    tables = FasopTables.open(arguments.fasop_dir)
    known = tables.settings()
    for name in {setting.model for setting in known.values()}:
        tables.layer_times_s(name)
    scorer = (judge, judge.Data(str(arguments.fasop_dir))) if judge else None
    if arguments.pareto:
        run_pareto(tables, arguments, scorer)
        return
    spelled = [name for name, setting in known.items() if set(setting.nodes) <= set(tables.node_kinds(setting.node_table))]
    for name in [arguments.setting] if arguments.setting else spelled:
        start, cpu = time.perf_counter(), time.process_time()
        answer = search_fasop(tables, name)
        took = {"search_time_s": round(time.perf_counter() - start, 3), "search_cpu_s": round(time.process_time() - cpu, 3)}
        print(json.dumps({"case": name, **took, **fasop_line(answer, arguments.out / f"fasop_{name}.json", scorer)}), flush=True)


def run_pareto(tables: FasopTables, arguments: argparse.Namespace, scorer: Any) -> None:
    """A line for each cluster, and a last one for the whole set."""
    most = {kind: int(count) for kind, _, count in (part.partition("=") for part in arguments.most.split(","))} if arguments.most else None
    start, cpu = time.perf_counter(), time.process_time()
    clusters = pareto_fasop(tables, arguments.setting, most)
    took, cpu_took = time.perf_counter() - start, time.process_time() - cpu
    for cluster in clusters:
        name = "_".join(f"{count}{kind}" for kind, count in cluster.counts.items())
        line: dict[str, Any] = {"case": f"{arguments.setting} {name}", "dominated_by": cluster.dominated_by}
        if cluster.answer:
            line |= fasop_line(cluster.answer, arguments.out / f"fasop_{arguments.setting}_{name}.json", scorer)
        print(json.dumps(line), flush=True)
    front = sum(cluster.answer is not None and cluster.dominated_by is None for cluster in clusters)
    total = {"clusters": len(clusters), "undominated": front, "search_time_s": round(took, 3), "search_cpu_s": round(cpu_took, 3)}
    print(json.dumps({"case": arguments.setting, **total}))


def fasop_line(answer: FasopAnswer, path: Path, scorer: Any) -> dict[str, Any]:
    """What one search found, with its plan written and scored."""
    write_json(path, answer.plan)
    score = scorer[0].evaluate(answer.plan, scorer[1]) if scorer else None
    if score is not None and not score.ok:
        raise SystemExit(f"{path} is not a valid plan: {score.errors or 'does not fit'}")
    return {
        "judged_time_s": score.step_s if score else None, "predicted_time_s": answer.time_s, "lower_bound_s": answer.bound_s,
        "gap": answer.time_s / answer.bound_s - 1 if answer.bound_s else None, "usd_per_step": answer.usd_per_step,
        "devices": answer.num_devices, "plan_path": str(path),
    }  # fmt: skip


SCALE = (
    ("GPT, 1,024 layers, 8 H100", {"base": "gpt-1.3b", "layers": 1024, "hidden": 1024, "heads": 16}, "8xh100", 64),
    ("GPT 175B, 1,024 H100", "gpt-175b", "128xp5.48xlarge", 1536),
    ("GPT 175B, 16,384 H100", "gpt-175b", "2048xp5.48xlarge", 8192),
    ("GPT 350M, 128 A100 and 384 V100", "gpt-350m", "16xp4d.24xlarge+48xp3.16xlarge", 2048),
    ("GPT 1.3B, 32 A100 and 48 A10G", "gpt-1.3b", "4xp4d.24xlarge+12xg5.24xlarge", 2048),
)
"""Name, model (or the fields of a model file), cluster, global batch."""


def run_scale(out: Path) -> None:
    """Searches the large cases and prints a line for each."""
    out.mkdir(parents=True, exist_ok=True)
    for name, model, cluster, batch in SCALE:
        if isinstance(model, dict):
            write_json(out / "model.yaml", model)
            model = str(out / "model.yaml")
        start, cpu = time.perf_counter(), time.process_time()
        outcome = search_plans(model, cluster, batch, top=1)
        took = {"search_time_s": round(time.perf_counter() - start, 2), "search_cpu_s": round(time.process_time() - cpu, 2)}
        path = out / f"{name.replace(' ', '_').replace(',', '')}.json"
        write_plan(path, outcome.choices[0].plan)
        predicted = outcome.choices[0].estimate.time_s
        line = {"predicted_time_s": predicted, "lower_bound_s": outcome.bound_s, "gap": outcome.gap, "plan_path": str(path)}
        print(json.dumps({"case": name, **took, "peak_memory_mb": peak_memory_mb(), **line}), flush=True)


def peak_memory_mb() -> int:
    """The most that this process has held since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


OP_DEGREES = (
    ("vgg16", "8xa10g", 256), ("vgg16", "8xt4", 64), ("vgg16", "8xv100-16gb", 256), ("vgg16", "8xa100-40gb", 512),
    ("wide-resnet-2b", "8xa10g", 256), ("wide-resnet-4b", "8xa100-40gb", 512),
)  # fmt: skip
"""Model, cluster, global batch."""


def run_op_degrees() -> None:
    """The best plan with and without degrees of each op, a line for each case."""
    for model, cluster, batch in OP_DEGREES:
        start, cpu = time.perf_counter(), time.process_time()
        outcome = search_plans(model, cluster, batch, top=50)
        took = {"search_time_s": round(time.perf_counter() - start, 2), "search_cpu_s": round(time.process_time() - cpu, 2)}
        best, alike = outcome.choices[0], next(choice for choice in outcome.choices if choice.kind != "mixed")
        times = {"one_for_all_s": alike.estimate.time_s, "of_each_op_s": best.estimate.time_s, "gap": outcome.gap}
        print(json.dumps({"case": f"{model}, {cluster}, batch {batch}", **took, **times}), flush=True)


UNEQUAL = (
    ("bert-large", "1xp4d.24xlarge+2xp3.16xlarge", 4096), ("bert-large", "2xg5.12xlarge+1xp3.16xlarge", 4096),
    ("gpt-350m", "1xa2-highgpu-4g+1xp3.8xlarge", 1024), ("gpt-1.3b", "1xp4d.24xlarge+2xg5.12xlarge", 1024),
    ("gpt-1.3b", "1xa2-highgpu-4g+2xg6.12xlarge", 1024), ("gpt-350m", "7xa100-40gb", 61),
)  # fmt: skip
"""Model, cluster, global batch."""


def run_unequal() -> None:
    """The best plan where all replicas are alike and where each has the devices and micro-batches that suit, a row for each case."""
    print("| case | alike s | unequal s | faster | gap | shares | search s |", "|---" * 7 + "|", sep="\n")
    for model, cluster, batch in UNEQUAL:
        request = Request.of(model, cluster, batch, "roofline", None, (), math.inf)
        start = time.process_time()
        outcome = search(request, top=1)
        took, best = time.process_time() - start, outcome.choices[0]
        alike_s = min((choice.estimate.time_s for choice in uniform_choices(request, 1, lambda: None)), default=math.inf)
        for family in families(request):
            found = best_pipeline(family, alike_s)
            alike_s = alike_s if found is None else found.estimate.time_s
        shares = format_counts(best.plan.micro_batches_per_replica or ())
        row = (f"{model}, {cluster}, batch {batch}", f"{alike_s:.3f}", f"{best.estimate.time_s:.3f}",
               f"{alike_s / best.estimate.time_s - 1:.0%}", f"{outcome.gap:.1%}", shares, f"{took:.1f}")  # fmt: skip
        print(f"| {' | '.join(row)} |", flush=True)


def run_money() -> None:
    """What comparing 80 choices of nodes takes, in seconds and in processor seconds of all processes, and what it comes to."""
    request = Request.of("gpt2-xl", "8xp4d.24xlarge+8xg5.24xlarge", 256, "roofline", None, (), math.inf)
    cores, start, cpu = len(os.sched_getaffinity(0)), time.perf_counter(), family_cpu_s()
    found, left = offers(request, 10_000, workers=cores)
    took = {"cores": cores, "search_time_s": round(time.perf_counter() - start, 1), "search_cpu_s": round(family_cpu_s() - cpu, 1)}
    worth = [offer.cluster.name for offer in found if not offer.dominated_by]
    print(json.dumps({"clusters": len(found) + len(left), **took, "worth_having": worth}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds aceso/")
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--cuts", choices=CUTS, default="ops", help="where plans of transformers over Aceso's tables may be cut")
    parser.add_argument("--aceso-db", type=Path, help="one folder of tables")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="1_3B")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the size has")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--micro-batches", default="1,2,4,8")
    parser.add_argument("--memory-mb", type=float, default=28000.0)
    parser.add_argument("--fasop-dir", type=Path, help="folder of FASOP's tables")
    parser.add_argument("--setting", help="one of its experiments")
    parser.add_argument("--pareto", action="store_true", help="every cluster of the setting's node kinds")
    parser.add_argument("--most", help="most nodes of each kind for --pareto, such as A=8,B=8 (8 of each unless told)")
    parser.add_argument("--scale", action="store_true", help="long chains and thousands of devices")
    parser.add_argument("--op-degrees", action="store_true", help="degrees of each op against one for a whole stage")
    parser.add_argument("--unequal", action="store_true", help="replicas of unequal speed against replicas that are alike")
    parser.add_argument("--money", action="store_true", help="all choices of nodes from a pool, on all cores")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "penstock-plans")
    arguments = parser.parse_args()
    modes = (arguments.scale, arguments.op_degrees, arguments.unequal, arguments.money)
    if not (arguments.data or arguments.aceso_db or arguments.fasop_dir or any(modes)):
        parser.error("give --data, --aceso-db, --fasop-dir, --scale, --op-degrees, --unequal or --money")
    if arguments.pareto and not (arguments.fasop_dir and arguments.setting):
        parser.error("--pareto needs --fasop-dir and --setting")
    compile_all()
    judge = load_judge(arguments.judge)
    if arguments.scale:
        run_scale(arguments.out)
        return
    if arguments.op_degrees:
        run_op_degrees()
        return
    if arguments.money:
        run_money()
        return
    if arguments.unequal:
        run_unequal()
        return
    if arguments.fasop_dir:
        run_fasop(arguments, judge)
        return
    if arguments.aceso_db:
        sizes = tuple(int(size) for size in arguments.micro_batches.split(","))
        a = arguments
        case = AcesoCase(
            a.aceso_db.name, a.model, a.size, a.nodes, a.gpus_per_node, a.global_batch, sizes, a.memory_mb, None, a.layers, a.cuts
        )  # fmt: skip
        print(json.dumps(run(case, a.aceso_db, a.out, judge)))
        return
    rows = []
    for case in [replace(case, cuts=arguments.cuts) for case in KNOWN_CASES if case.model != "resnet" or arguments.cuts == "ops"]:
        rows.append(run(case, arguments.data / "aceso" / case.folder, arguments.out, judge))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """What the lines say, for people."""
    lines = ["| case | Aceso s | Penstock s | bound s | gap | search s |", "|---" * 6 + "|"]
    for r in rows:
        found = r["judged_time_s"] or r["predicted_time_s"]
        figures = f"{r['aceso_s']} | {found:.2f} | {r['lower_bound_s']:.2f} | {r['gap']:.1%} | {r['search_time_s']:.2f}"
        lines.append(f"| {r['case']} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
