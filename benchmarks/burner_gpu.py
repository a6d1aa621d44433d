"""A load in one quarter of a GPU that MPS divides in four: noticed, moved away from, and held beside the best cuts made by hand.

    python benchmarks/burner_gpu.py --out FOLDER              all parts; what is in FOLDER already is not done again
    python benchmarks/burner_gpu.py --out FOLDER --only cuts  one of them: costs, adapt, cuts, told
    python benchmarks/burner_gpu.py --out FOLDER --device cpu --stages 2 --layers 8 --hidden 128 --length 128 --micro-batches 8
                                                              the same on a processor, with a load beside the rank

    costs   ops measured on a quarter, between busy neighbours (`shared_gpu.py`)
    adapt   a GPT pipeline trains with `--adapt move`; in mid-run `penstock disturb --slow RANK=FACTOR` slows one stage, and the run moves
    cuts    the same load for as large a share of the time, and one plan after the other: the one that was moved to, and the slow stage with
            0, 1, 2 … layers fewer
    told    the table, and the files to keep: events, steps, a trace around the move, figures (`--results`)

MPS is started, and ended, where `nvidia-cuda-mps-control` is there and nobody has started it. Status 1 if the slow rank was not noticed or
not moved away from, or if the plan that was moved to has less than 0.95 of the tokens a second of the best one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapting.asking import ask_for
from penstock.adapting.events import RunEvent, read_events
from penstock.adapting.loads import LoadWithin
from penstock.adapting.watching import move_run, obey_run
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.models.catalog import model_from_mapping
from penstock.plans.build import block_ranges
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.devices.loads import LoadReport
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.telemetry.steps import StepRecord, read_steps
from penstock.runtime.trainer import PlanTrainer

PARTS = ("costs", "adapt", "cuts", "told")
REACH = 0.95
VOCAB = 512
CALM, STEPS = 30, 110
"""Steps before the load is asked for, and of the whole run."""
WINDOW, COUNTED = 10, 7
"""Steps under each of the cuts, and the last of them, which count."""
FEWER = 4
"""Layers that are taken from the slow stage at most."""
KEPT_BYTES = 200_000
"""Of the trace."""


# MPS ---------------------------------------------------------------------------------------------------------------------------


@contextmanager
def divided_gpu(device: str, parts: int) -> Iterator[None]:
    """Each process that is started meanwhile has so small a part of the GPU."""
    control = shutil.which("nvidia-cuda-mps-control")
    if device != "cuda" or "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ:  # or who called this has seen to it
        yield
        return
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // parts)
    if control is None:
        print("nvidia-cuda-mps-control is not here: ranks take turns on the GPU, unless MPS runs elsewhere.", flush=True)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # paths of sockets have to be short
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False)


# Data, model, plans ------------------------------------------------------------------------------------------------------------


def prepared(given: argparse.Namespace) -> str:
    """Texts of one length, so that steps differ by what disturbs them alone."""
    folder = given.out / "data"
    if not folder.exists():
        draw, lines = random.Random(0), given.out / "texts.jsonl"
        words = ["".join(draw.choices("abcdefghijklmnop", k=3)) for _ in range(200)]
        texts = (" ".join(draw.choices(words, k=given.length)) for _ in range(1024))
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        prepare_text(TextRequest((lines,), folder, train_tokenizer=VOCAB, limits=(None, given.length - 1), workers=1))
    return str(folder)


def sizes_of(given: argparse.Namespace) -> dict[str, Any]:
    dtype = "bf16" if given.device == "cuda" else "fp32"
    return {
        "family": "gpt", "layers": given.layers, "hidden": given.hidden, "heads": max(1, given.hidden // 64), "seq_length": given.length,
        "vocab": VOCAB, "dtype": dtype,
    }  # fmt: skip


def plan_of(given: argparse.Namespace, layers: Sequence[int]) -> Plan:
    """A stage for each number of layers; embedding and head go with the first and the last."""
    sizes = sizes_of(given)
    model = model_from_mapping(sizes, "benchmark", "gpt")
    starts = [first for name, (first, _) in block_ranges(model) if name == "layers"]
    cuts = [0, *(starts[sum(layers[:stage])] for stage in range(1, len(layers))), model.num_ops]
    stages = tuple(Stage(first, last, ((rank,),)) for rank, (first, last) in enumerate(pairwise(cuts)))
    costs = f"profile:{given.out / 'share.json'}" if given.device == "cuda" else "roofline"
    cluster = f"{len(layers)}x{'h200' if given.device == 'cuda' else 'a100-80gb' if given.device == 'paced' else 'cpu'}"
    return Plan(
        sizes, cluster, given.samples * given.micro_batches, stages, MicroBatching("packed", samples=given.samples),
        seq_length=given.length, precision=sizes["dtype"], costs=costs,
    )  # fmt: skip


def even_layers(given: argparse.Namespace) -> list[int]:
    return [given.layers // given.stages + (stage < given.layers % given.stages) for stage in range(given.stages)]


def cuts_by_hand(given: argparse.Namespace) -> list[list[int]]:
    """The slow stage with 0, 1, 2 … layers fewer, which the others get in turn."""
    found = [even_layers(given)]
    others = [stage for stage in range(given.stages) if stage != given.rank]
    while len(found) <= FEWER and found[-1][given.rank] > 1:
        layers = list(found[-1])
        layers[given.rank] -= 1
        layers[others[len(found) % len(others)]] += 1
        found.append(layers)
    return found


# Parts -------------------------------------------------------------------------------------------------------------------------


def measure_costs(given: argparse.Namespace) -> None:
    if given.device == "cuda" and not (given.out / "share.json").exists():
        from shared_gpu import measure_share

        measure_share(given.out / "share.json", sizes_of(given))


def request_of(given: argparse.Namespace, plan: Plan, steps: int, name: str) -> TrainRequest:
    shutil.rmtree(given.out / name, ignore_errors=True)
    return TrainRequest(
        plan, prepared(given), steps, str(given.out / name), device=given.device, checkpoint_every=0, planning=PlanningSettings(0),
        share_gpus=True,
    )  # fmt: skip


def last_told(run: Path) -> LoadReport | None:
    """What the slowed rank says of its load; nothing on devices without one inside."""
    found = [msgspec.json.decode(path.read_bytes(), type=LoadReport) for path in (run / "loads").glob("*.told")]
    return found[0] if found else None


def adapt(given: argparse.Namespace) -> None:
    """Writes the plan that was moved to, and the load that it was moved to for, into the run's folder."""
    request = request_of(given, plan_of(given, even_layers(given)), STEPS, "adapt")
    run, told = Path(request.out), list[LoadReport]()
    command = [sys.executable, "-m", "penstock", "disturb", request.out, "--slow", f"{given.rank}={given.factor}"]
    with ExitStack() as stack:

        def progress(step: StepReport) -> None:
            for note in step.notes:
                print(f"step {step.step}: {note}", flush=True)
            if step.step == CALM:
                stack.callback(_ended, subprocess.Popen(command))
            told.extend(one for one in [last_told(run)] if one is not None)

        result = PlanTrainer(request, move_run).train(progress)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    write_plan(run / "moved.json", result.plan or request.plan)
    steered = [one for one in told if one.factor is not None]
    (run / "load.json").write_bytes(msgspec.json.encode(steered[-1] if steered else LoadReport(0.0)))


def _ended(command: subprocess.Popen[bytes]) -> None:
    """A command ends with the run that it disturbs."""
    try:
        command.wait(30)
    except subprocess.TimeoutExpired:
        command.kill()
        raise


def cuts(given: argparse.Namespace) -> None:
    """One plan after the other, under the same load from the second step on."""
    load = msgspec.json.decode((given.out / "adapt" / "load.json").read_bytes(), type=LoadReport)
    first = replace(read_plan(given.out / "adapt" / "moved.json"), predicted=None)
    plans = [first, *(plan_of(given, layers) for layers in cuts_by_hand(given))]
    begins = [0, *(2 * WINDOW + WINDOW * number for number in range(len(plans) - 1))]
    request = request_of(given, first, begins[-1] + WINDOW, "cuts")
    command = [sys.executable, "-m", "penstock", "disturb", request.out, "--slow", f"{given.rank}={given.factor}"]
    with ExitStack() as stack:

        def progress(step: StepReport) -> None:
            if step.step == 1 and load.share:
                stack.enter_context(LoadWithin(request.out, given.rank, given.factor, 2, request.steps, load.share))
            elif step.step == 1:
                stack.callback(_ended, subprocess.Popen(command))
            if step.step + 4 in begins[1:]:
                ask_for(request.out, plans[begins.index(step.step + 4)], step.step + 4)

        PlanTrainer(request, obey_run).train(progress)
    shutil.rmtree(Path(request.out) / "checkpoints", ignore_errors=True)
    steps = read_steps(Path(request.out) / "steps.jsonl")
    moved = [event.step for event in read_events(request.out) if event.event == "moved"]
    if moved != begins[1:]:
        raise SystemExit(f"the run moved before steps {moved}, where {begins[1:]} were asked for; see {request.out}/events.jsonl")
    ends = [*begins[1:], request.steps]
    rows = [{"ops": ops_of(plan), "tokens_per_s": rate(steps[end - COUNTED : end])} for plan, end in zip(plans, ends, strict=True)]
    (given.out / "cuts.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def ops_of(plan: Plan) -> list[int]:
    return [stage.last - stage.first for stage in plan.stages]


def rate(steps: Sequence[StepRecord]) -> float:
    """Tokens a second."""
    return sum(step.tokens or 0 for step in steps) / max(1e-9, sum(step.time_s or 0.0 for step in steps))


# What came of it ---------------------------------------------------------------------------------------------------------------


def tell(given: argparse.Namespace) -> int:
    run = given.out / "adapt"
    steps, events = read_steps(run / "steps.jsonl"), read_events(run)
    begun = next(event for event in events if event.event == "disturbed")
    noticed = next((one for one in events if one.event == "noticed" and one.step >= begun.step and one.ranks == (given.rank,)), None)
    moves = [event for event in events if event.event == "moved" and event.step > begun.step]
    if noticed is None or not moves:
        print(f"rank {given.rank} was not noticed, or not moved away from; see `penstock events {run}`")
        return 1
    ended = [event.before for event in events if event.event == "disturbed" and event.before is not None]
    found = _figures(given, steps, begun, noticed, moves, ended[-1] if ended else None)
    for name, value in found.items():
        print(f"{name:20} {value if name != 'cuts' else ''}")
    for row in found["cuts"]:
        print(f"{'':20} {'-'.join(map(str, row['ops'])):20} {row['tokens_per_s']:10.0f} tokens/s")
    print(f"{found['after_over_best']:.3f} of the best plan for that load; {REACH} wanted")
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("events.jsonl", "steps.jsonl"):
        shutil.copy(run / name, given.results / name)
    _write_trace(run, moves[0].step, given.results / "trace.json.gz")
    return 0 if found["after_over_best"] >= REACH else 1


def _figures(
    given: argparse.Namespace, steps: Sequence[StepRecord], begun: RunEvent, noticed: RunEvent, moves: Sequence[RunEvent],
    reached: float | None,
) -> dict[str, Any]:  # fmt: skip
    rows = json.loads((given.out / "cuts.json").read_text(encoding="utf-8"))
    load = json.loads((given.out / "adapt" / "load.json").read_text(encoding="utf-8"))
    last, best = moves[-1].step, max(row["tokens_per_s"] for row in rows)
    after = rate(steps[last + 3 :])
    return {
        "device": given.device, "model": sizes_of(given), "slow_rank": given.rank, "factor_asked": given.factor,
        "factor_reached": reached, "factor_noticed": noticed.factor, "share": load["share"], "slow_since": begun.step,
        "steps_to_notice": noticed.step - begun.step + 1, "moved_at": moves[0].step, "moves": len(moves), "remedy": moves[-1].remedy,
        "pause_s": moves[0].pause_s, "moved_bytes": moves[0].moved_bytes, "ops_before": ops_of(plan_of(given, even_layers(given))),
        "ops_after": ops_of(read_plan(given.out / "adapt" / "moved.json")), "tokens_per_s_before": rate(steps[5 : begun.step]),
        "tokens_per_s_during": rate(steps[begun.step + 2 : moves[0].step]), "tokens_per_s_after": after, "cuts": rows,
        "best_tokens_per_s": best, "after_over_best": after / best,
    }  # fmt: skip


def _write_trace(run: Path, step: int, path: Path) -> None:
    """As many steps around the move as there is room for."""
    for around in (4, 2, 1):
        chosen = f"{step - around}-{step + around}"
        subprocess.run([sys.executable, "-m", "penstock", "trace", str(run), "--steps", chosen, "--out", str(path)], check=True)
        if path.stat().st_size <= KEPT_BYTES:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("burner"), help="folder for data, costs and runs")
    parser.add_argument("--results", type=Path, help="folder for the files to keep; OUT/results if not given")
    parser.add_argument("--only", choices=PARTS, help="one part, done again")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "paced"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--rank", type=int, default=-1, help="the one that is slowed; one in the middle if not given")
    parser.add_argument("--factor", type=float, default=2.0)
    given = parser.parse_args()
    given.out, given.rank = given.out.resolve(), given.rank if given.rank >= 0 else given.stages // 2
    given.results = given.results or given.out / "results"
    given.out.mkdir(parents=True, exist_ok=True)
    acts = {"costs": measure_costs, "adapt": adapt, "cuts": cuts, "told": tell}
    done = {"costs": given.out / "share.json", "adapt": given.out / "adapt" / "load.json", "cuts": given.out / "cuts.json"}
    with divided_gpu(given.device, given.stages):
        if given.only:
            return acts[given.only](given) or 0
        for part in PARTS:
            if part not in done or not done[part].exists():
                # In a process of its own: what it has of the GPU goes with it.
                code = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", part]).returncode
                if code:
                    return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
