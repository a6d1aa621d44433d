"""Somebody's modules beside plain torch: every model of the test suite's zoo on one, two and four ranks, and what all that costs.

    python benchmarks/front_door.py [--only PART …] [--device cpu|cuda] [--models MODEL …]

  equal      of each model five AdamW steps on 1, 2 and 4 ranks (pipeline; replicas; ZeRO-1; ZeRO-3; where it has a `tp_plan`, tp 2)
             against a plain loop over samples: the largest difference of losses and weights; half an hour of two processors
  skipping   one module as a single stage beside its plain loop, and the time of a skipped unit
  native     transformers' own Llama, as it is and with compiled units, beside our own ops: the same batches in turn
  predicted  a step of that Llama as a module beside what was predicted of it from its measured units
  first      from the command to the first step, with everything kept from before

Without `--device` the GPU is used where there is one, and `equal` is left out there: `--device cuda` takes three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import module_zoo  # noqa: E402
import torch  # noqa: E402
from first_step import job_s  # noqa: E402
from module_cases import described, module_case, plain_training, weights_apart  # noqa: E402
from training_jobs import train_programs  # noqa: E402

import penstock  # noqa: E402
from penstock.clusters import resolve_cluster  # noqa: E402
from penstock.data.bundled import bundled_files  # noqa: E402
from penstock.jobs.rows import folder_of_rows  # noqa: E402
from penstock.models.modules.cutting.skipping import Skipping  # noqa: E402
from penstock.plans.build import uniform_plan  # noqa: E402
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings  # noqa: E402
from penstock.runtime.workers import WorkerPool  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "1 rank": {}, "pp 2": {"pp": 2}, "2 replicas": {"replicas": 2, "pp": 1}, "pp 4": {"pp": 4},
    "pp 2 × dp 2, ZeRO-1": {"pp": 2, "dp": 2, "zero": 1}, "dp 4, ZeRO-3": {"dp": 4, "zero": 3},
}  # fmt: skip
DIVIDED: dict[str, dict[str, Any]] = {"tp 2": {"tp": 2}, "tp 2 × pp 2": {"tp": 2, "pp": 2}}
"""Of models with a `tp_plan`."""
MODELS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "phi", "gpt2", "bert", "t5", "mixtral", "long_skips",
    "plain_gpt", "vit",
)  # fmt: skip
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)


PARTS = ("equal", "skipping", "native", "predicted", "first")
LLAMA: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 2048, "max_position_embeddings": 256},
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
             "vocab_size": 32_000, "max_position_embeddings": 2048},
}  # fmt: skip
"""Sizes that keep the device busy, and its memory free."""
ROUNDS = {"cpu": 8, "cuda": 30}
STEPS = {"cpu": 10, "cuda": 24}
BATCH, MICRO_BATCH = 8, 4


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the zoo, for `equal`")
    given = parser.parse_args()
    parts = given.only or [part for part in PARTS if part != "equal" or given.device == "cpu"]
    if "equal" in parts:
        equal(given.models)
    lines: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "skipping": skipping, "native": lambda: beside_native(given.device), "predicted": lambda: predicted(given.device), "first": first,
    }  # fmt: skip
    print(f"\n| {torch.cuda.get_device_name() if given.device == 'cuda' else f'{os.cpu_count()} cores'} | measured |\n|---|---|")
    for part in parts:
        for title, value in lines[part]() if part in lines else ():
            print(f"| {title} | {value} |", flush=True)


def equal(names: list[str]) -> None:
    """Every model under every plan against a plain loop."""
    print("| model | plan | loss | weights |\n|---|---|---|---|")
    with WorkerPool(4, timeout_s=600) as pool:
        for name in names:
            for title, choice in (PLANS | (DIVIDED if described(name).max_tp() > 1 else {})).items():
                case = module_case(name, iterations=5, **choice)
                outcomes = [one for one in pool.run(train_programs, case.plan, case.programs(), ADAMW) if one.losses]
                losses, weights = plain_training(name, case, ADAMW)
                off = max(abs(mine - other) / abs(other) for mine, other in zip(outcomes[0].losses, losses, strict=True))
                print(f"| {name} | {title} | {off:.0e} | {weights_apart(case, outcomes, weights):.0e} |", flush=True)


def skipping() -> Iterator[tuple[str, str]]:
    """What cutting costs on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module, kwargs = module_zoo.make("llama"), module_zoo.example("llama", 8, 64)
    plain = _best(lambda: module(**kwargs).loss.backward())
    chain = Skipping(module)
    chain.trace(lambda own: own(**kwargs))
    whole = _best(lambda: chain.run(lambda own: own(**kwargs), 0, len(chain.calls), {}).loss.backward())
    few, many = (_last_but_one(lambda depth=depth: module_zoo.make("llama", num_hidden_layers=depth), "llama") for depth in (4, 24))
    fewer, more = (_last_but_one(lambda depth=depth: module_zoo.LongSkips(layers=depth), "long-skips") for depth in (4, 24))
    torch.set_num_threads(threads)
    yield "module as one stage beside its plain loop", f"{whole / plain:.3f} ×"
    yield "a skipped unit of Llama: 24 layers less 4", f"{(many[0] - few[0]) / (many[1] - few[1]) * 1e6:.0f} µs"
    yield "a skipped unit with sums between, in place and not", f"{(more[0] - fewer[0]) / (more[1] - fewer[1]) * 1e6:.0f} µs"
    yield "a pass of Llama's last norm alone: masks and angles too", f"{few[0] * 1e6:.0f} µs"


def beside_native(device: str) -> Iterator[tuple[str, str]]:
    """Steps of the same Llama by our ops, by transformers' module, and by that with compiled units; in turn, so that load strikes all."""
    length = LLAMA[device]["max_position_embeddings"]
    drawn = random.Random(0)
    rows = [[drawn.randrange(LLAMA[device]["vocab_size"]) for _ in range(length + 1)] for _ in range(BATCH)]
    with tempfile.TemporaryDirectory() as name:
        folder, cluster = _config(device, Path(name)), _cluster(device)
        plans = {
            native: uniform_plan(
                f"{'hf' if native else 'transformers'}:{folder}", cluster, global_batch=BATCH, micro_batch=MICRO_BATCH, seq_length=length,
                precision=_precision(device),
            ) for native in (True, False)
        }  # fmt: skip
        batch = {native: next(iter(penstock.DynamicLoader(rows, plan)))[1] for native, plan in plans.items()}
        ways = {"native": (True, False), "eager": (False, False), "compiled": (False, True)}
        steps = {way: _step(f"hf:{folder}", plans[ways[way][0]], batch[ways[way][0]], *ways[way]) for way in ways}
        for _ in range(3):  # compiling, and whatever else comes first
            for step in steps.values():
                step()
        times = {way: [] for way in ways}  # type: dict[str, list[float]]
        for _ in range(ROUNDS[device]):
            for way, step in steps.items():
                start = time.perf_counter()
                step()
                times[way].append(time.perf_counter() - start)
    middle = {way: statistics.median(found) for way, found in times.items()}
    yield f"a step of our native Llama, {sum(map(len, rows)) - BATCH:,} tokens", f"{middle['native'] * 1e3:.1f} ms"
    for way in ("compiled", "eager"):
        ratio = statistics.median(mine / other for mine, other in zip(times[way], times["native"], strict=True))
        yield f"transformers' Llama, {way} units, beside it", f"{ratio:.3f} × ({middle[way] * 1e3:.1f} ms)"


def _step(source: str, plan: penstock.Plan, batch: Any, native: bool, compiled: bool) -> Callable[[], None]:
    model = penstock.parallelize(source, plan, native=native, compile=compiled)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-5)

    def step() -> None:
        model.step(batch).item()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def predicted(device: str) -> Iterator[tuple[str, str]]:
    """A run of the command with `--compare`, its costs measured just before."""
    longest, drawn = LLAMA[device]["max_position_embeddings"], random.Random(1)
    sizes = [max(16, int(longest * share)) for share in (0.05, 0.1, 0.2, 0.4, 0.95)]
    rows = [[drawn.randrange(LLAMA[device]["vocab_size"]) for _ in range(drawn.choice(sizes))] for _ in range(256)]
    with tempfile.TemporaryDirectory() as name:
        os.environ["PENSTOCK_CACHE"] = f"{name}/kept"
        folder, data = _config(device, Path(name)), folder_of_rows(rows)
        _penstock("profile", "--model", f"transformers:{folder}", "--device", device, "--tp", "1", "--time-budget", "45", "--out",
                  f"{name}/costs.json", "--json")  # fmt: skip
        found = json.loads(_penstock(
            "train", "--model", f"hf:{folder}", "--set", "model.native=false", "--data", data, "--out", f"{name}/run", "--steps",
            str(STEPS[device]), "--cluster", _cluster(device), "--costs", f"profile:{name}/costs.json", "--tokens-per-batch",
            str(8 * longest), "--compare", "--json"))  # fmt: skip
    off = found["predicted_time_s"] / found["time_s"] - 1
    yield "a step of transformers' Llama, texts of many lengths: predicted beside measured", (
        f"{found['predicted_time_s'] * 1e3:.1f} beside {found['time_s'] * 1e3:.1f} ms ({off:+.1%})"
    )


def first() -> Iterator[tuple[str, str]]:
    """`first_step.py` with a tiny model."""
    options = ["--model", "gpt-tiny", "--tokens-per-batch", "2048", "--costs", "roofline", "--cluster", "1xcpu"]
    options += ["--set", "data.over_long=truncate", *(word for file in bundled_files() for word in ("--data", str(file)))]
    with tempfile.TemporaryDirectory() as name:
        times_s = [job_s(options, Path(name) / str(number), Path(name) / "kept") for number in range(3)]
    yield "command to first step: nothing kept, all kept", f"{times_s[0]:.1f} s, {min(times_s[1:]):.1f} s"


def _config(device: str, folder: Path) -> Path:
    """A folder with a config alone: weights are drawn."""
    import transformers

    transformers.LlamaConfig(**LLAMA[device], architectures=["LlamaForCausalLM"]).save_pretrained(folder / "llama")
    return folder / "llama"


def _cluster(device: str) -> str:
    return "1xcpu" if device == "cpu" else f"1x{resolve_cluster('local').device(0).name}"


def _precision(device: str) -> str:
    return "fp32" if device == "cpu" else "bf16"


def _penstock(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _last_but_one(make: Callable[[], Any], name: str) -> tuple[float, int]:
    """Seconds of a pass of the last unit but one, all before it skipped; how many that are."""
    kwargs = {key: value for key, value in module_zoo.example(name, 8, 64).items() if key != "labels"}
    chain = Skipping(make())
    chain.trace(lambda own: own(**kwargs))
    at = len(chain.calls) - 2
    carry = {site: x.detach() for site, x in chain.run(lambda own: own(**kwargs), 0, at, {}).items()}
    return _best(lambda: chain.run(lambda own: own(**kwargs), at, at + 1, carry), 50), at


def _best(work: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the fastest."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main()
