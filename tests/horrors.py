"""What people hand to programs by mistake or on purpose, for every option of every verb: files, numbers, names, and what must come of it.

A case is a whole command line in which one thing is a horror and the rest would do. It is right if the command ends in time with one of the
statuses that the horror may have, says exactly one error without a traceback and without raw control characters, and leaves nothing behind.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Case", "all_cases", "lay_out", "traces", "wrongs"]

WRONG, REFUSED, ANY = (2,), (2, 3), (0, 2, 3)
"""Wrong input; the same, or no plan fits; the same, or in fact valid."""
LONG = "x" * 300
ESCAPE, BACKWARDS, NO_TEXT = "\x1b]0;owned\x07\x1b[2J", "\u202eelif\u2066", os.fsdecode(b"\xff\xfe")


@dataclass(frozen=True)
class Case:
    """One command line, the option that is a horror, its name, and the statuses that are right."""

    verb: str
    slot: str
    horror: str
    arguments: tuple[str, ...]
    statuses: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.verb} {self.slot} {self.horror}"


PLAN: dict[str, Any] = {
    "format": "penstock-plan", "version": 1, "model": "gpt-small", "cluster": "2xcpu", "precision": "fp32", "optimizer": "adamw",
    "global_batch": 8, "seq_length": 64, "dec_length": 0, "num_replicas": 2,
    "micro_batching": {"layout": "padded", "policy": "fixed", "samples": 4}, "schedule": "1f1b",
    "stages": [{"ops": "0:68", "devices": ["0", "1"], "degrees": {"tp": 1, "dp": 1}, "zero": 1}], "costs": "roofline",
}  # fmt: skip
POINT = {
    "size": 64, "length": 0, "forward_s": 1e-3, "backward_s": 2e-3, "spread": 0.0, "forward_host_s": 0.0, "backward_host_s": 0.0,
    "growth_bytes": 1e3, "forward_peak_bytes": 1e3, "backward_peak_bytes": 1e3,
}  # fmt: skip
MODEL = "family: gpt\nsize: small\n"
CLUSTER = """\
devices:
  box: {memory_gb: 40, bf16_flops: 1.0e+14, fp32_flops: 2.0e+13, memory_bandwidth_gb_per_s: 1000}
nodes:
  - {name: n, device: box, count: 2}
"""


def _series(**changes: Any) -> dict[str, Any]:
    key = {"op": "x", "dtype": "fp32", "tp": 1, "algo": 0, "layout": "any"}
    return {"key": key, "kind": "linear", **{name: [value] for name, value in POINT.items()}, **changes}


def _profile(**changes: Any) -> dict[str, Any]:
    device = {
        "about": {}, "base_bytes": 0, "whole": {}, "optimizer": [], "links": [], "held_out": [], "out_of_memory": [], "done": [],
        "series": [_series()], **changes,
    }  # fmt: skip
    return {"format": "penstock-profile", "version": 1, "devices": {"cpu": device}}


def _plans() -> Iterator[tuple[str, Any]]:
    """Plans with one field that is wrong."""
    horrors: dict[str, list[Any]] = {
        "global_batch": [-1, 0, "x", None, 1e300, float("nan"), 10**40, [8]],
        "seq_length": [-1, "x", 10**40, float("inf"), True],
        "num_replicas": [0, -2, 10**30, 1.5],
        "model": ["no-such-model", ESCAPE, 7, [], {"format": ESCAPE}, LONG],
        "cluster": ["0xa100", ESCAPE, "2x" + LONG, {"nodes": "x"}, 10**12],
        "schedule": ["later", ESCAPE, None, BACKWARDS],
        "stages": [[], [{}], "0:68", None, [{"ops": "0:10**9"}], [{"ops": "5:3", "devices": ["0"]}]],
        "micro_batching": [{}, {"layout": ESCAPE, "policy": "fixed", "samples": 4}, {"layout": "padded", "policy": "fixed", "samples": -4}],
        "costs": ["guess", "profile:nowhere.json", ESCAPE, 5],
        "version": [99, "1", None],
        "precision": ["fp3", 32],
        "optimizer": ["adamant", None],
        ESCAPE: [1],
    }
    for field, values in horrors.items():
        for number, value in enumerate(values):
            yield f"{'escape' if field == ESCAPE else field}-{number}", {**deepcopy(PLAN), field: value}


def lay_out(folder: Path) -> None:
    """The files that cases name, good ones and horrors, in `folder`."""
    good, bad = folder / "good", folder / "bad"
    for one in (good, bad, folder / "bad" / "plans"):
        one.mkdir(parents=True)
    (good / "plan.json").write_text(json.dumps(PLAN))
    (good / "model.yaml").write_text(MODEL)
    (good / "lengths.csv").write_text("length\n10\n20\n30\n40\n")
    (good / "texts.jsonl").write_text("".join(json.dumps({"input": f"a {n}", "target": f"b {n}"}) + "\n" for n in range(40)))
    (good / "net.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n")
    for name, value in _plans():
        (bad / "plans" / f"{name}.json").write_text(json.dumps(value))
    for name, data in _contents().items():
        (bad / name).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    (bad / "directory").mkdir()
    os.mkfifo(bad / "pipe")
    (bad / "loop").symlink_to("loop")


def _contents() -> Mapping[str, str | bytes]:
    deep = "[" * 50_000 + "]" * 50_000
    lengths = {
        "no-column": "size\n3\n", "no-rows": "length\n", "text": "length\nx\n", "negative": "length\n-5\n", "zero": "length\n0\n",
        "huge": "length\n" + "9" * 30 + "\n", "digits": "length\n" + "9" * 5000 + "\n", "nan": "length\nnan\n",
        "long": "length\n1000000000\n", "escape": f"length\n{ESCAPE}\n", "twice": "id,length\n1,5\n1,6\n",
        "float": "length\n1.5\n",
    }  # fmt: skip
    profiles = {
        "text-time": _profile(series=[_series(forward_s=["x"])]), "null-time": _profile(series=[_series(forward_s=[None])]),
        "negative-time": _profile(series=[_series(backward_s=[-1.0])]), "huge-time": _profile(series=[_series(forward_s=[1e300])]),
        "nan-time": _profile(series=[_series(forward_s=[float("nan")])]), "no-size": _profile(series=[_series(size=[0])]),
        "ragged": _profile(series=[_series(size=[1, 2])]), "no-points": _profile(series=[_series(**{name: [] for name in POINT})]),
        "text-link": _profile(links=[{"kind": "p2p", "num_ranks": 2, "num_nodes": 1, "size_bytes": 1, "time_s": "x"}]),
        "negative-link": _profile(links=[{"kind": "p2p", "num_ranks": 2, "num_nodes": 1, "size_bytes": 1, "time_s": -1}]),
        "text-base": _profile(base_bytes="x"), "no-series": _profile(series=None), "list": [], "devices": {**_profile(), "devices": 3},
    }  # fmt: skip
    texts = {
        "number": "5\n", "fields": '{"a": 1}\n', "types": '{"input": 1, "target": 2}\n', "half": '{"input": "a", "tar\n',
        "blank": "\n\n\n", "escape": f'{{"{ESCAPE}": 1}}\n', "deep": deep + "\n",
        "many": '{"input": "a", "target": "b"}\n' + '{"wrong": 1}\n' * 2000,
    }  # fmt: skip
    models = {
        "list": "[1, 2]\n", "family": "family: nothing\n",
        "twice": "family: gpt\nfamily: gpt\n",
        "negative": "family: gpt\nnum_layers: -4\n",

        "huge": f"family: gpt\nsize: small\nnum_layers: {10**12}\n", "nan": "family: gpt\nsize: small\ndropout: .nan\n",
        "dropout": "family: gpt\nsize: small\ndropout: 5\n", "text": "family: gpt\nsize: small\nhidden: x\n", "null": "family:\n",
        "escape": f"family: gpt\n{ESCAPE!r}: 4\n", "tag": "!!python/object/apply:os.system ['echo owned']\n",
        "deep": deep, "indent": "a: b: c\n",
        "width": f"family: gpt\nsize: small\nhidden: {10**30}\n", "alias": "a: &a [*a]\n",
    }  # fmt: skip
    clusters = {
        "list": "[1]\n", "empty-nodes": "nodes: []\n", "count": CLUSTER.replace("count: 2", "count: -2"),
        "memory": CLUSTER.replace("memory_gb: 40", "memory_gb: -1"), "nan": CLUSTER.replace("1.0e+14", ".nan"),
        "inf": CLUSTER.replace("1.0e+14", ".inf"), "huge": CLUSTER.replace("1.0e+14", "1.0e+300"),
        "device": CLUSTER.replace("device: box", "device: crate"), "twice": CLUSTER + "nodes: []\n",
        "escape": CLUSTER.replace("name: n", f"name: {json.dumps(ESCAPE)}").replace("device: box", f"device: {json.dumps(ESCAPE)}"),
        "text": "nodes: many\n", "deep": deep,
    }  # fmt: skip
    sources = {
        "syntax": "def make(:\n", "raises": "def make():\n    raise ValueError('\\x1b[2J')\n", "exits": "def make():\n    exit(0)\n",
        "exits-at-once": "import sys\nsys.exit(0)\n", "returns": "def make():\n    return 5\n", "none": "x = 5\n",
        "hard-exit": "import os\ndef make():\n    raise SystemExit('gone')\n",
        "no-parameters": "import torch\ndef make():\n    return torch.nn.ReLU(), (torch.ones(2, 4),)\n",
        "wrong-example": "import torch\ndef make():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 5),)\n",
        "no-example": "import torch\ndef make():\n    return torch.nn.Linear(4, 4), ()\n",
    }  # fmt: skip
    files = {
        "empty": b"", "binary": bytes(range(256)) * 8, "cut.json.gz": gzip.compress(b"x" * 9999)[:40], "deep.json": deep, "nan.json": "NaN",
        "list.json": "[1, 2, 3]", "null.json": "null", "text.json": '"text"', "twice.json": '{"format": 1, "format": 2}',
        "half.json": '{"format": "penst', "big.json": '{"a": ' + "9" * 5000 + "}", "latin.json": '{"a": "ä"}'.encode("latin-1"),
        "wide.json": json.dumps(PLAN).encode("utf-16"), "escape.json": json.dumps({"format": ESCAPE, ESCAPE: ESCAPE}),
        "surrogate.json": '{"format": "\\ud800"}', "zeros": b"\0" * 4096,
    }  # fmt: skip
    named: list[tuple[str, Mapping[str, Any], str]] = [
        ("lengths", lengths, "csv"), ("profile", profiles, "json"), ("texts", texts, "jsonl"), ("model", models, "yaml"),
        ("cluster", clusters, "yaml"), ("net", sources, "py"),
    ]  # fmt: skip
    made: dict[str, str | bytes] = dict(files)
    for kind, entries, suffix in named:
        made |= {f"{kind}-{name}.{suffix}": data if isinstance(data, str) else json.dumps(data) for name, data in entries.items()}
    return made


FILES = {
    "missing": "bad/nothing.json", "directory": "bad/directory", "pipe": "bad/pipe", "device": "/dev/zero", "loop": "bad/loop",
    "unreadable": "/proc/self/mem", "no-name": "", "dot": ".", "long": LONG, "below-a-file": "good/plan.json/x", "escape": f"bad/{ESCAPE}",
    "backwards": f"bad/{BACKWARDS}", "no-text": f"bad/{NO_TEXT}", **{name: f"bad/{name}" for name in (
        "empty", "binary", "cut.json.gz", "deep.json", "nan.json", "list.json", "null.json", "text.json", "twice.json", "half.json",
        "big.json", "latin.json", "wide.json", "escape.json", "surrogate.json", "zeros")},
}  # fmt: skip
"""Names of files to read; none of them is any file that a verb could take."""
TO_WRITE = {
    "dot": ".", "no-name": "", "long": LONG + ".json", "directory": "bad/directory", "below-a-file": "good/plan.json/x.json",
    "read-only": "/proc/x.json", "loop": "bad/loop", "deep": "/proc/none/a/b/x.json", "long-folder": f"{LONG}/x.json",
}  # fmt: skip
FOLDERS = {
    "file": "good/plan.json", "below-a-file": "good/plan.json/x", "read-only": "/proc/x", "long": LONG, "pipe": "bad/pipe",
    "loop": "bad/loop",
}  # fmt: skip
WHOLE = {
    "text": "x", "no-number": "", "negative": "-1", "fraction": "1.5", "huge": "9" * 30, "digits": "9" * 5000, "nan": "nan",
    "escape": ESCAPE, "no-text": NO_TEXT, "minus-huge": "-" + "9" * 30, "hex": "0x10",
}  # fmt: skip
REAL = {
    "text": "x", "no-number": "", "negative": "-1", "nan": "nan", "inf": "inf", "minus-inf": "-inf", "1e300": "1e300", "overflow": "1e999",
    "escape": ESCAPE,
}  # fmt: skip
NAMES = {
    "unknown": "no-such-thing", "escape": ESCAPE, "backwards": BACKWARDS, "long": LONG, "no-text": NO_TEXT, "dots": "../..", "colon": ":",
    "brackets": "[red]x[/red]", "digits": "9" * 5000, "comma": ",,",
}  # fmt: skip


def _of(kind: str, folder: Path, prefix: str = "") -> dict[str, str]:
    """The horrors of one kind of file."""
    return {path.stem: f"{prefix}bad/{path.name}" for path in sorted((folder / "bad").glob(f"{kind}-*"))}


def all_cases(folder: Path) -> list[Case]:
    """Every case; `folder` is laid out already."""
    plans = {path.stem: f"bad/plans/{path.name}" for path in sorted((folder / "bad" / "plans").iterdir())}
    unpriced = {name: path for name, path in plans.items() if not name.startswith("costs")}  # for those who read no costs
    cases: list[Case] = []

    def add(verb: str, slot: str, base: str, horrors: Mapping[str, str], statuses: tuple[int, ...] = WRONG) -> None:
        """`base` is a command line whose word `@` is the horror."""
        for horror, value in horrors.items():
            words = tuple(value if word == "@" else word.replace("@", value) for word in base.split())
            cases.append(Case(verb, slot, horror, (verb, *words), statuses))

    search = "--model gpt-small --cluster 2xcpu --global-batch 8"
    add("search", "--model", "--model @ --cluster 2xcpu --global-batch 8", NAMES | {"no-name": ""})
    add("search", "--model FILE", "--model @ --cluster 2xcpu --global-batch 8", _of("model", folder))
    add("search", "--model FILE", "--model @.yaml --cluster 2xcpu --global-batch 8", {"missing": "bad/nothing", "long": LONG})
    add("search", "--model FILE", "--model @ --cluster 2xcpu --global-batch 8", {k: v for k, v in FILES.items() if v.endswith(".json")})
    add("search", "--model hf:", "--model hf:@ --cluster 2xcpu --global-batch 8", FILES)
    add("search", "--cluster", "--model gpt-small --cluster @ --global-batch 8", NAMES | _of("cluster", folder) | {
        "zero": "0xa100-40gb", "negative": "-1xa100-40gb", "huge": f"{'9' * 30}xa100-40gb", "arabic": "٣xa100-40gb", "plus": "+",
        "missing": "nothing.yaml", "million": "1000000xa100-40gb"})  # fmt: skip
    add("search", "--global-batch", "--model gpt-small --cluster 2xcpu --global-batch @", WHOLE | {"zero": "0", "10^12": "1000000000000"})
    for option in ("--seq-length", "--steps", "--top"):
        add("search", option, f"{search} {option} @", WHOLE | {"zero": "0"})
    add("search", "--max-hops", f"{search} --max-hops @", WHOLE)
    for option in ("--tokens", "--time-budget", "--memory-limit"):
        add("search", option, f"{search} {option} @", REAL | {"zero": "0"})
    add("search", "--memory-limit", f"{search} --memory-limit @", {"tiny": "1e-9"}, REFUSED)
    add("search", "--costs", f"{search} --costs @", NAMES | {"no-folder": "aceso:nowhere", "no-tables": "fasop:bad/directory"})
    add("search", "--costs profile:", f"{search} --costs profile:@", FILES | _of("profile", folder))
    add(
        "search",
        "--objective",
        f"{search} --objective @",
        NAMES | {"nan": "time@cost<=nan", "negative": "cost@time<=-1", "text": "time@cost<=x"},
    )
    add(
        "search",
        "--micro-batches",
        f"{search} --micro-batches @",
        {k: v for k, v in WHOLE.items() if v} | {"zero": "0", "comma": "1,,2"},
        REFUSED,
    )
    add("search", "--schedules", f"{search} --schedules @", {k: v for k, v in NAMES.items() if k != "comma"})
    add(
        "search",
        "--lengths",
        f"{search} --lengths @",
        FILES | {k: v for k, v in _of("lengths", folder).items() if k != "lengths-twice"},
        REFUSED,
    )
    add("search", "--for", f"{search} --for @", {k: v for k, v in NAMES.items() if v})
    add("search", "--out", f"{search} --out @", TO_WRITE)
    add("search", "--export", f"{search} --export @", NAMES | {"no-path": "megatron:", "weights": "huggingface:weights"})
    add("search", "--export", f"{search} --export @", {"no-model": "torchtitan:recipe.py"})
    add("search", "--export PATH", f"{search} --export megatron:@", TO_WRITE)
    pool = "--model gpt-small --cluster 1xp4d.24xlarge --global-batch 8"
    add("pareto", "--model", "--model @ --cluster 1xp4d.24xlarge --global-batch 8", NAMES)
    add("pareto", "--cluster", "--model gpt-small --cluster @ --global-batch 8", NAMES | {"no-price": "2xcpu", "many": "9999xp4d.24xlarge"})
    add("pareto", "--global-batch", "--model gpt-small --cluster 1xp4d.24xlarge --global-batch @", WHOLE | {"zero": "0"})
    add("pareto", "--steps", f"{pool} --steps @", WHOLE | {"zero": "0"})
    add("pareto", "--tokens", f"{pool} --tokens @", REAL)
    add("pareto", "--out", f"{pool} --out @", FOLDERS)
    add("pareto", "--costs", f"{pool} --costs profile:@", FILES)
    add("reproduce", "NAME", "@", NAMES)
    add("reproduce", "--figure", "aceso --figure @", NAMES)
    add("reproduce", "--peer", "aceso --peer @", NAMES)
    add("reproduce", "--data", "dynpipe --figure 10 --data @", FOLDERS)
    for verb in ("explain", "simulate", "check"):
        add(verb, "PLAN", "@", FILES)
        add(verb, "PLAN field", "@", unpriced if verb == "check" else plans, REFUSED)
    add("explain", "--against", "good/plan.json --against @", FILES | unpriced, REFUSED)
    for verb in ("explain", "simulate"):
        add(verb, "--costs", "good/plan.json --costs @", NAMES)
        add(verb, "--costs profile:", "good/plan.json --costs profile:@", FILES | _of("profile", folder))
    add("simulate", "--schedule", "good/plan.json --schedule @", NAMES)
    add("simulate", "--trace", "good/plan.json --trace @", TO_WRITE)
    add("simulate", "--figure", "good/plan.json --figure @", {k: re.sub(r"\.json$", ".svg", v) for k, v in TO_WRITE.items()})
    add("simulate", "--lengths", "good/plan.json --lengths @", FILES | _of("lengths", folder), REFUSED)
    batch = "--lengths good/lengths.csv --plan good/plan.json"
    add("batch", "--lengths", "--plan good/plan.json --lengths @", FILES | _of("lengths", folder), REFUSED)
    add("batch", "--plan", "--lengths good/lengths.csv --plan @", FILES | plans, REFUSED)
    add("batch", "--budget-steps", f"{batch} --budget-steps @", WHOLE | {"10^12": "1000000000000"})
    add("batch", "--seed", f"{batch} --seed @", WHOLE | {"2^64": str(2**64)})
    add("batch", "--too-long", f"{batch} --too-long @", NAMES)
    add("batch", "--out", f"{batch} --out @", TO_WRITE)
    add("batch", "--costs", f"{batch} --costs @", NAMES | {"dynapipe": "dynapipe:nowhere/x"})
    train = "good/plan.json --data good --steps 1 --out run"
    add("train", "PLAN", "@ --data good --steps 1 --out run", FILES)
    add("train", "--adapt", f"{train} --adapt @", NAMES)
    add("train", "--out", "good/plan.json --data good --steps 1 --out @", FOLDERS)
    add("train", "--data", "good/plan.json --data @ --steps 1 --out run", FILES)
    add("train", "--steps", "good/plan.json --data good --steps @ --out run", WHOLE | {"zero": "0"})
    for option in ("--warmup", "--eval-every", "--planners", "--budget-steps", "--seed"):
        add("train", option, f"{train} {option} @", WHOLE)
    add("train", "--planners", f"{train} --planners @", {"1000": "1000"})
    add("train", "--seed", f"{train} --seed @", {"2^64": str(2**64)})
    for option in ("--lr", "--clip", "--store-timeout", "--reserve-memory"):
        add("train", option, f"{train} {option} @", REAL)
    add("train", "--device", f"{train} --device @", NAMES)
    add("train", "--torch-profile", f"{train} --torch-profile @", {k: v for k, v in WHOLE.items() if v})
    add("train", "--weights", f"{train} --weights @", FILES)
    job = "--model gpt-tiny --data good/texts.jsonl --out run"
    add("train", "--model", "--data good/texts.jsonl --out run --model @", NAMES)
    add("train", "--data of a job", "--model gpt-tiny --out run --data @", FILES)
    add("train", "--out of a job", "--model gpt-tiny --data good/texts.jsonl --out @", FOLDERS)
    add("train", "--set", f"{job} --set @", NAMES)
    add("train", "--cluster", f"{job} --cluster @", NAMES)
    add("train", "--costs", f"{job} --costs @", NAMES)
    add("train", "--tokenizer", f"{job} --tokenizer @", FILES)
    add("train", "--tokens-per-batch", f"{job} --tokens-per-batch @", WHOLE | {"zero": "0"})
    text = "good/texts.jsonl --train-tokenizer 300 --workers 1"
    add("prepare-data", "INPUT", "@ --train-tokenizer 300 --workers 1 --out data", FILES | _of("texts", folder))
    add("prepare-data", "INPUT h5", "@.h5 --out data", {"missing": "bad/nothing", "long": LONG})
    add("prepare-data", "INPUT bin", "@.bin --out data", {"missing": "bad/nothing", "long": LONG})
    add("prepare-data", "--out", f"{text} --out @", FOLDERS | {"dot": ".", "full": "good"})
    add("prepare-data", "--tokenizer", "good/texts.jsonl --workers 1 --out data --tokenizer @", FILES)
    sizes = WHOLE | {"zero": "0", "small": "10", "10^9": "1000000000"}
    add("prepare-data", "--train-tokenizer", "good/texts.jsonl --workers 1 --out data --train-tokenizer @", sizes)
    for option in ("--max-input", "--max-target", "--workers", "--image-size", "--vocab-size"):
        add("prepare-data", option, f"{text} --out data {option} @", WHOLE)
    shares = {name: value for name, value in REAL.items() if name != "1e300"}
    add("prepare-data", "--weights", f"{text} --out data --weights @", shares | {"two": "1,2", "zero": "0"})
    add(
        "prepare-data",
        "--split",
        f"{text} --out data --split @",
        {k: v for k, v in REAL.items() if k != "1e300"} | {"zero": "0", "four": "1,1,1,1"},
    )
    add("prepare-data", "--over-long", f"{text} --out data --over-long @", NAMES)
    add("prepare-data", "--end-token", f"{text} --out data --end-token @", NAMES)
    add("import", "SOURCE", "@ --out net.json", NAMES | {"no-name": "", "no-file": "module:", "no-function": "module:good/net.py"})
    add("import", "SOURCE FILE", "module:@:make --out net.json", FILES | _of("net", folder))
    add("import", "SOURCE function", "module:good/net.py:@ --out net.json", NAMES)
    for kind in ("aceso", "dynpipe", "fasop"):
        add(
            "import",
            f"{kind}:",
            f"{kind}:@ --model gpt-small --cluster 2xcpu {'' if kind == 'aceso' else '--global-batch 8'} --out p.json",
            FILES,
        )
    add("import", "--out", "module:good/net.py:make --out @", TO_WRITE)
    add("import", "--length", "module:good/net.py:make --out net.json --length @", WHOLE | {"zero": "0"})
    add("import", "--dtype", "module:good/net.py:make --out net.json --dtype @", NAMES)
    add("export", "PLAN", "@ --to torchrun:run.sh", FILES)
    add("export", "PLAN field", "@ --to megatron:flags.txt", unpriced, REFUSED)
    add("export", "--to", "good/plan.json --to @", NAMES | {"no-path": "megatron:"})
    add("export", "--to PATH", "good/plan.json --to torchrun:@", TO_WRITE)
    add("export", "--to folder", "good/plan.json --to huggingface:@", FOLDERS)
    add("export", "checkpoint", "@ --to huggingface:weights", FILES)
    for named in ("SOURCE", "--against"):
        add("report", named, f"{'' if named == 'SOURCE' else 'good/plan.json --against '}@ --out r.html", FILES)
    add("report", "SOURCE field", "@ --out r.html", plans, REFUSED)
    add("report", "--out", "good/plan.json --out @", TO_WRITE)
    add("report", "--csv", "good/plan.json --out r.html --csv @", FOLDERS)
    add("report", "--figures", "good/plan.json --out r.html --figures @", FOLDERS)
    add("report", "--steps", "good/plan.json --out r.html --steps @", WHOLE)
    add("simulate", "--batch", "good/plan.json --batch @", FILES)
    add("watch", "RUN", "@", FILES)
    add("watch", "--port", "good --port @", {"high": "65536", "text": "x"})
    add("trace", "RUN", "@ --out t.json", FILES)
    add("trace", "--out", "good --out @", TO_WRITE)
    add("events", "RUN", "@", FILES)
    add("join", "RUN", "@", FILES)
    add("join", "--node-rank", "good --node-rank @", WHOLE)
    add("replan", "RUN", "@ --plan good/plan.json", FILES)
    add("replan", "--plan", "good --plan @", FILES)
    add("replan", "--at", "good --plan good/plan.json --at @", WHOLE)
    add("list", "WHAT", "@", NAMES | {"no-name": ""})
    add("list", "WORD", "models @", NAMES)
    add("disturb", "RUN", "@ --slow 0=2", FILES)
    add("disturb", "--slow", "good --slow @", NAMES)
    add("disturb", "--link", "good --link @", NAMES)
    add("disturb", "--data", "good --data @", REAL)
    for option in ("--from", "--steps"):
        add("disturb", option, f"good --slow 0=2 {option} @", WHOLE)
    add("profile", "--out", "--model gpt-small --out @", TO_WRITE)
    add("profile", "--model", "--out p.json --model @", NAMES | _of("model", folder))
    add("profile", "--device", "--out p.json --model gpt-small --device @", NAMES)
    add("profile", "--tp", "--out p.json --model gpt-small --tp @", WHOLE | {"zero": "0"})
    add("profile", "--beside", "--out p.json --model gpt-small --beside @", {k: v for k, v in REAL.items() if v} | {"zero": "0"})
    add("profile", "--merge", "--out p.json --merge @", FILES | _of("profile", folder))
    add("profile", "--time-budget", "--out p.json --model gpt-small --time-budget @", REAL)
    add("demo", "--out", "--out @", FOLDERS)
    add("store", "--port", "start --port @", WHOLE | {"high": "65536"})
    add("store", "--out", "start --out @", TO_WRITE | {k: v for k, v in FILES.items() if k in ("binary", "list.json")})
    for verb in (
        "search",
        "train",
        "batch",
        "check",
        "export",
        "import",
        "prepare-data",
        "profile",
        "pareto",
        "simulate",
        "trace",
        "report",
        "reproduce",
        "watch",
        "events",
        "replan",
        "disturb",
        "demo",
        "explain",
        "list",
    ):
        add(verb, "option", "@", {"unknown": "--no-such-option", "escape": f"--{ESCAPE}", "no-text": f"--{NO_TEXT}"})
    add("", "verb", "@", NAMES | {"no-name": ""})
    return [Case(case.verb, case.slot, case.horror, case.arguments[case.verb == "" :], case.statuses) for case in cases]


def traces(folder: Path) -> set[str]:
    """Everything that lies in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def wrongs(case: Case, status: int | None, out: str, err: str, left: set[str]) -> list[str]:
    """What is wrong with how a case ended; `status` None: it did not. `left` is what lies there that did not before."""
    if status is None:
        return ["did not end in time"]
    found = []
    if status not in case.statuses:
        found.append(f"status {status}, expected {' or '.join(map(str, case.statuses))}")
    if status in (2, 3) and (count := len(re.findall(r"^error: ", err, re.MULTILINE))) != 1:
        found.append(f"{count} error messages")
    if "Traceback" in out + err or "not expected. To see where" in err:
        found.append("a traceback, or an error without words of its own")
    if raw := _RAW.search(out + err.replace("\r", "")):
        found.append(f"raw {raw.group()!r}")
    if len(err) > 20_000:
        found.append(f"{len(err)} letters of error")
    if status and left:
        found.append(f"left behind: {', '.join(sorted(left)[:4])}")
    return found


def clean(folder: Path, names: set[str]) -> None:
    """Removes what a case left."""
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
