"""An unlisted model of transformers and a stranger's net, each by command and by script: four ranks, killed, gone on with on two, exported,
loaded, and beside plain PyTorch all the way.

    python benchmarks/transcript.py

Prints the commands and a table. Ranks are processes of this machine's processors; a few minutes on two of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torchrun_ranks import run_ranks  # noqa: E402

import penstock  # noqa: E402
from penstock.plans.telling import short_name  # noqa: E402
from penstock.runtime.checkpoints.folder import latest_checkpoint, step_of  # noqa: E402
from penstock.runtime.telemetry.steps import read_steps  # noqa: E402

STEPS, KILLED, TOKENS = 12, 5, 600
RATE = {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-3}
"""With so large an `eps` weights without a gradient stay where they are: what differs is arithmetic, not noise."""
SETTINGS = [word for name, value in RATE.items() for word in ("--set", f"train.{name}={value}")]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rivers", "run", "under", "old", "stone", "bridges"]


def main() -> None:
    """Both models, both ways."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["PENSTOCK_CACHE"] = f"{name}/kept"
        _write_inputs()
        rows = ["| model | trained by | four ranks | then two | loss | weights | logits of the export |", "|---|---|---|---|---|---|---|"]
        for title, source in (("GPT-NeoX of transformers", "hf:neox"), ("a net of one file", "module:net.py:make")):
            shutil.rmtree("plans", ignore_errors=True)
            data = _prepared(source)
            plans = {ranks: _plan(source, data, ranks) for ranks in (4, 2)}
            losses, module = plain(source, data, plans[2])
            for way, trained in (("command", by_command), ("script", by_script)):
                print(f"\n# {title}, by {way}", flush=True)
                found = trained(source, data, f"{source.partition(':')[0]}-{way}")
                off = max(abs(loss - losses[step]) / losses[step] for step, loss in found.items())
                apart, logits = loaded(source, f"{source.partition(':')[0]}-{way}-trained", module)
                names = (short_name(plans[ranks]) for ranks in (4, 2))
                rows.append(f"| {title} | {way} | {' | '.join(names)} | {off:.0e} | {apart:.0e} | {logits:.0e} |")
                print(rows[-1], flush=True)
        print("\nDifferences are the largest from plain PyTorch, relative.\n")
        print("\n".join(rows))


def by_command(source: str, data: str, out: str) -> dict[int, float]:
    """`penstock train` under a plan of four ranks, killed after a checkpoint; the same command with one of two; `penstock export`.

    Losses by step: what was not yet written down when the run was killed is missing.
    """
    given = ["train", "--model", source, "--data", data, "--out", out, "--steps", str(STEPS), "--checkpoint-every", str(KILLED), *SETTINGS]
    four = [*given, "--set", "plan.file=plans/4.json"]
    print(f"$ penstock {' '.join(four)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *four, "--set", f"train.steps={100 * STEPS}"], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and (latest_checkpoint(Path(out) / "checkpoints") is None):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    saved = latest_checkpoint(Path(out) / "checkpoints")
    assert saved is not None and step_of(saved) < STEPS
    losses = {step.step: step.loss for step in read_steps(Path(out) / "steps.jsonl") if step.step < step_of(saved)}
    print(f"Killed, with {step_of(saved)} steps saved", flush=True)
    two = [*given, "--set", "plan.file=plans/2.json", "--json"]
    print(f"$ penstock {' '.join(two)}", flush=True)
    told = json.loads(_output(two))
    print(f"goes on with step {told['first_step']}; changed: {', '.join(told['changed'])}", flush=True)
    print(f"$ penstock export {out} --to huggingface:{out}-trained", flush=True)
    _output(["export", out, "--to", f"huggingface:{out}-trained"])
    later = dict(enumerate(told["losses"], told["first_step"]))
    assert [*later] == [*range(step_of(saved), STEPS)]
    return {step: loss for step, loss in losses.items() if loss is not None} | later


def by_script(source: str, data: str, out: str) -> dict[int, float]:
    """The loop below in a process for each rank, as torchrun starts it; all of four are killed, two go on."""
    found: dict[int, float] = {}
    for ranks in (4, 2):
        print(f"$ torchrun --nproc-per-node {ranks} loop.py {source} {data} {out}", flush=True)
        here = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"} for rank in range(ranks)]
        ended = run_ranks([__file__, source, data, out], here, Path.cwd())
        assert {one.status for one in ended} == {-signal.SIGKILL if ranks == 4 else 0}, ended[0].err[-2000:]
        for line in ended[0].out.splitlines():
            if line.startswith("step "):
                found[int(line.split()[1])] = float(line.split()[3])
        print("Killed" if ranks == 4 else ended[0].out.strip().splitlines()[-1], flush=True)
    return {step: found[step] for step in range(STEPS)}


def loop(source: str, data: str, out: str) -> None:
    """A training loop of one's own, which is killed in its first life."""
    ranks = int(os.environ["WORLD_SIZE"])
    plan = penstock.Plan.read(f"plans/{ranks}.json")
    model = penstock.parallelize(source, plan)
    optimizer = model.optimizer(torch.optim.AdamW, **RATE)
    loader = penstock.DynamicLoader(data, plan, epochs=100)
    if Path(out).is_dir():
        model.load(out)
        loader.step = model.steps
    for step, batch in loader:
        loss = model.step(batch)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.8f}", flush=True)
        if model.steps == KILLED:
            model.save(out)
        if ranks == 4 and model.steps == KILLED + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if model.steps == STEPS:
            break
    model.export(f"{out}-trained")


def plain(source: str, data: str, plan: penstock.Plan) -> tuple[list[float], torch.nn.Module]:
    """Losses and module of a loop over the same samples, one by one, which knows nothing of plans."""
    module = _module(source)
    optimizer = torch.optim.AdamW(module.parameters(), **RATE)
    loaders = [penstock.DynamicLoader(data, plan, epochs=100, rank=rank) for rank in plan.ranks]
    losses = []
    for batches in zip(*loaders, strict=True):
        samples = {key: one for _, batch in batches for micro in batch.micro_batches for key, one in micro.samples.items()}
        total = 0.0
        for one in samples.values():
            assert one.counted is not None
            out = module(torch.from_numpy(one.inputs)[None])
            logits = (out if isinstance(out, torch.Tensor) else out.logits)[0]
            each = F.cross_entropy(logits, torch.from_numpy(one.labels), reduction="none")
            loss = (each * torch.from_numpy(one.counted)).sum() / batches[0][1].program.loss_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if len(losses) == STEPS:
            return losses, module
    raise AssertionError("the data ended")


def loaded(source: str, folder: str, module: torch.nn.Module) -> tuple[float, float]:
    """How far an export's weights, and the logits of whoever loads it, are from those of the plain loop."""
    from safetensors.torch import load_file

    weights, ids = load_file(f"{folder}/model.safetensors"), torch.arange(1, 41).view(2, 20)
    mine = dict(module.named_parameters())
    apart = max(((value - mine[name]).abs().max() / mine[name].abs().max()).item() for name, value in weights.items() if name in mine)
    if source.startswith("hf:"):
        from transformers import AutoModelForCausalLM

        other = AutoModelForCausalLM.from_pretrained(folder)
        logits, wanted = other(ids).logits, module(ids).logits
    else:
        other = _module(source)
        other.load_state_dict(weights, strict=False)  # the head is the embedding
        logits, wanted = other(ids), module(ids)
    return apart, ((logits - wanted).abs().max() / wanted.abs().max()).item()


def _module(source: str) -> Any:
    if source.startswith("hf:"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(source.removeprefix("hf:")).train()
    from penstock.models.modules.cutting.origins import make_origin

    return make_origin(source).module


def _plan(source: str, data: str, ranks: int) -> penstock.Plan:
    """The best plan that has work for so many processes."""
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks)}):
        plan = penstock.find_plans(source, f"{ranks}xcpu", data=data, tokens_per_batch=TOKENS, time_budget_s=20)[0]
    Path("plans").mkdir(exist_ok=True)
    plan.write(f"plans/{ranks}.json")
    return plan


def _prepared(source: str) -> str:
    """The texts as tokens: of the model's own tokenizer, or of one for a vocabulary of 300."""
    out = f"{source.partition(':')[0]}-data"
    given = ["--tokenizer", "neox"] if source.startswith("hf:") else ["--train-tokenizer", "290"]
    _output(["prepare-data", "texts.jsonl", *given, "--split", "1,0,0", "--out", out])
    return out


def _write_inputs() -> None:
    import transformers

    from penstock.data.text.tokenizer import train_tokenizer

    drawn = random.Random(0)
    texts = [" ".join(drawn.choice(WORDS) for _ in range(drawn.choice((5, 8, 12, 20, 40)))) for _ in range(160)]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shutil.copy(ROOT / "tests" / "strangers_net.py", "net.py")
    config = transformers.GPTNeoXConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=256,
        architectures=["GPTNeoXForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPTNeoXForCausalLM(config).save_pretrained("neox")
    transformers.PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(iter(texts), 384)).save_pretrained("neox")


def _output(words: list[str]) -> str:
    return subprocess.run([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    if len(sys.argv) == 4 and "WORLD_SIZE" in os.environ:
        loop(*sys.argv[1:])
    else:
        main()
