"""What users run, by the commands of the README, on one GPU: predicted beside measured steps, and tokens/s beside a plain torch loop.

  python benchmarks/flows.py [--out flows] [--model gpt-1.3b] [--cluster 1xh200] [--costs profile:h200-141gb] [--only NAME …]

  texts           `search` without lengths, `train` on the bundled texts: fixed micro-batches of samples much shorter than planned for
  texts-data      `search --data`: the same, planned for the lengths that are there
  lognormal       texts of log-normal lengths, `search --data`
  deterministic   `train --deterministic` twice, and once killed and resumed: losses compared to the bit; what it costs

Each finished flow is a line in OUT/flows.jsonl and is not run again. The plain loop trains the same model by torch's own modules on the
same micro-batches, in bf16 with fused AdamW.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

COMMAND = [sys.executable, "-m", "penstock"]
STEPS, WARM_UP = 14, 4


def penstock(*words: str, **more: Any) -> str:
    """Runs a command; what it printed."""
    started = time.perf_counter()
    done = subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, text=True, check=True, **more)
    print(f"$ penstock {' '.join(words)}   ({time.perf_counter() - started:.0f} s)", flush=True)
    return done.stdout


def prepared(out: Path, name: str) -> str:
    """The data of a flow."""
    folder = out / f"data-{name}"
    if not folder.exists():
        inputs = ["bundled"]
        if name == "lognormal":
            inputs = [str(_lognormal_texts(out / "lognormal.jsonl"))]
        penstock("prepare-data", *inputs, "--train-tokenizer", "2048", "--out", str(folder))
    return str(folder)


def _lognormal_texts(path: Path) -> Path:
    generator = random.Random(0)
    words = ["the", "water", "falls", "through", "a", "long", "pipe", "and", "turns", "wheels", "of", "iron", "all", "day"]
    with path.open("w") as file:
        for _ in range(8000):
            count = max(8, min(2000, round(math.exp(generator.gauss(math.log(120), 1.1)))))
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=count))}) + "\n")
    return path


def trained(given: argparse.Namespace, out: Path, name: str, data: str, search: list[str], *more: str) -> dict[str, Any]:
    """Searches and trains; what `train --compare --json` tells, with the plan's path."""
    plan = out / f"{name}.json"
    if not plan.exists():
        penstock("search", "--model", given.model, "--cluster", given.cluster, "--costs", given.costs, "--global-batch",
                 str(given.global_batch), *search, "--out", str(plan), "--top", "1")  # fmt: skip
    run = out / f"run-{name}{''.join(more)}"
    shutil.rmtree(run, ignore_errors=True)  # of one that failed
    told = penstock("train", str(plan), "--data", data, "--steps", str(given.steps), "--out", str(run), "--compare", "--json", *more)
    shutil.rmtree(run)  # its checkpoint is many gigabytes
    return {"plan": str(plan), **json.loads(told)}


def plain_tokens_per_s(plan_path: str, data: str, steps: int) -> float:
    """The same micro-batches through torch's own modules."""
    import throughput
    import torch

    from penstock.plans.references import model_of
    from penstock.plans.schema import read_plan
    from penstock.runtime.request import TrainRequest
    from penstock.runtime.run_inputs import run_inputs

    plan = read_plan(plan_path)
    config = model_of(plan).config
    source, planner = run_inputs(TrainRequest(plan, data, steps, "nowhere"))
    found, batches = source.open()
    device = torch.device("cuda")
    work = []
    for step in range(steps):
        micro = [one for own in planner.batch_plan(found, batches[step]).replicas for one in own.micro_batches]
        work.append([throughput.tensors(list(one.lengths), one.layout, config["vocab"], device) for one in micro])
        work[-1].append(sum(one.num_tokens for one in micro))
    with torch.device(device):
        model = throughput.PlainGpt(config["layers"], config["hidden"], config["heads"], config["vocab"], plan.seq_length)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(number: int) -> None:
        *micro, tokens = work[number]
        throughput.plain_step(model, optimizer, micro, tokens)

    seconds = throughput.timed(train, WARM_UP, steps - WARM_UP, device)
    return sum(one[-1] for one in work[WARM_UP:]) / seconds


def flow(given: argparse.Namespace, name: str) -> dict[str, Any]:
    out = Path(given.out)
    if name == "deterministic":
        return deterministic(given, out)
    data = prepared(out, "lognormal" if name == "lognormal" else "texts")
    found = trained(given, out, name, data, [] if name == "texts" else ["--data", data])
    line = {"predicted_s": found["predicted_time_s"], "measured_s": found["time_s"], "tokens_per_s": found["tokens_per_s"]}
    line["error"] = line["predicted_s"] / line["measured_s"] - 1
    if not given.no_plain:
        line["plain_tokens_per_s"] = plain_tokens_per_s(found["plan"], data, given.steps)
        _free_device()
        line["over_plain"] = line["tokens_per_s"] / line["plain_tokens_per_s"]
    return line


def _free_device() -> None:
    """Gives back what this process keeps of the GPU's memory: the next flow needs it."""
    import torch

    torch.cuda.empty_cache()


def deterministic(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    data = prepared(out, "texts")
    search = ["--data", data]
    usual = trained(given, out, "same", data, search)
    first = trained(given, out, "same", data, search, "--deterministic")
    again = trained(given, out, "same-again", data, search, "--deterministic")
    return {"same_twice": first["losses"] == again["losses"], "same_after_kill": _resumed(given, out, data) == first["losses"][-2:],
            "cost": first["time_s"] / usual["time_s"] - 1}  # fmt: skip


def _resumed(given: argparse.Namespace, out: Path, data: str) -> list[float]:
    """The last two losses of a run that was killed half-way and went on from its checkpoint."""
    run = out / "run-killed"
    words = ["train", str(out / "same.json"), "--data", data, "--steps", str(given.steps), "--out", str(run), "--deterministic", "--json"]
    process = subprocess.Popen([*COMMAND, *words, "--checkpoint-every", "3"], start_new_session=True)
    try:
        _await(lambda: _steps_done(run) >= given.steps // 2 and bool(list(run.glob("checkpoints/*"))))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    losses: list[float] = json.loads(penstock(*words, "--resume", str(run)))["losses"]
    shutil.rmtree(run)
    return losses[-2:]


def _steps_done(run: Path) -> int:
    return len((run / "steps.jsonl").read_text().splitlines()) if (run / "steps.jsonl").exists() else 0


def _await(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the run made no progress")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="flows")
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--cluster", default="1xh200")
    parser.add_argument("--costs", default="profile:h200-141gb")
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-plain", action="store_true", help="without the plain torch loop, which needs a GPU")
    parser.add_argument("--only", nargs="*", default=["texts", "texts-data", "lognormal", "deterministic"])
    given = parser.parse_args()
    log = Path(given.out) / "flows.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    done = {line["flow"]: line for line in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    for name in given.only:
        if name not in done:
            line = {"flow": name, **flow(given, name)}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done[name] = line
        print(json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
