"""Preparing and drawing data: tokens per second of `prepare-data`, and what a ten-million-sample index costs to open.

    python benchmarks/data.py [--megabytes 60] [--workers 2] [--samples 10000000]

Prints one JSON line per measurement. Each runs in a fresh process; memory is the largest resident size of that process (mapped
pages included), time is from before the import of penstock.data until the result is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_VOCABULARY = 30_000


def write_texts(path: Path, megabytes: int) -> None:
    """Pairs of made-up words, frequent ones short, lengths log-normal as in instruction data."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=min(12, 2 + rank.bit_length() // 2 + rng.randint(0, 3)))) for rank in range(1, _VOCABULARY)]
    frequencies = np.cumsum([1 / rank for rank in range(1, _VOCABULARY)]).tolist()
    written = 0
    with open(path, "w", encoding="utf-8") as stream:
        while written < megabytes << 20:
            count = min(2000, max(1, round(90 * rng.lognormvariate(0, 1.1))))
            text = " ".join(rng.choices(words, cum_weights=frequencies, k=count))
            answer = " ".join(rng.choices(words, cum_weights=frequencies, k=min(300, max(1, round(12 * rng.lognormvariate(0, 1.2))))))
            written += stream.write(json.dumps({"input": text, "target": answer}) + "\n")


def prepare(folder: Path, megabytes: int, workers: int) -> dict[str, object]:
    """Tokens per second of the verb, its start and the training of its tokenizer left out."""
    from penstock.data.text.prepare import TextRequest, prepare_text

    write_texts(folder / "texts.jsonl", megabytes)
    write_texts(folder / "small.jsonl", 4)
    prepare_text(TextRequest((folder / "small.jsonl",), folder / "first", train_tokenizer=16_000, workers=workers))
    start, cpu = time.perf_counter(), _cpu_s()
    request = TextRequest((folder / "texts.jsonl",), folder / "out", str(folder / "first" / "tokenizer.json"), workers=workers)
    manifest = prepare_text(request)
    time_s, cpu_s = time.perf_counter() - start, _cpu_s() - cpu
    tokens = sum(sum(split.tokens.values()) for split in manifest.splits.values())
    return {"what": "prepare-data", "workers": workers, "megabytes": megabytes, "tokens": tokens, "time_s": round(time_s, 2),
            "cpu_s": round(cpu_s, 2), "tokens_per_s": round(tokens / time_s), "tokens_per_cpu_s": round(tokens / cpu_s)}  # fmt: skip


def _cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


_OPEN = """
import json, sys, time
start = time.perf_counter()
from penstock.data import Limits, open_data
data, asked = open_data(sys.argv[1]), json.loads(sys.argv[2])
batches = data.batches(**{**asked, "limits": Limits(tuple(asked.get("limits", ())))})
batch = batches[0]
tokens = [len(data[int(sample)]["input"]) for sample in batch.samples]
time_s = time.perf_counter() - start
memory_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
late = time.perf_counter()
far = batches[5000]
print(json.dumps({"what": "open and draw", **json.loads(sys.argv[2]), "samples": len(data), "time_s": round(time_s, 3),
                  "memory_mb": memory_kb // 1024, "samples_in_batch": len(batch.samples),
                  "seek_to_step_5000_s": round(time.perf_counter() - late, 3)}))
"""


def write_index(folder: Path, samples: int) -> None:
    """A prepared folder of many samples, whose token file is a hole on disk."""
    from penstock.data.indexed import _HEAD, _MAGIC
    from penstock.data.manifest import DataManifest, DataSplit, TaskRange, write_manifest

    folder.mkdir()
    for side, median in (("input", 105), ("target", 16)):
        lengths = np.clip(np.random.default_rng(0).lognormal(np.log(median), 1.14, samples), 1, 4096).astype("<i4")
        ends = np.cumsum(lengths, dtype="<i8") * 2
        with open(folder / f"train_{side}.idx", "wb") as stream:
            stream.write(_HEAD.pack(_MAGIC, 1, 8, samples, samples + 1))
            for part in (lengths, np.concatenate([np.zeros(1, "<i8"), ends[:-1]]), np.arange(samples + 1, dtype="<i8")):
                part.tofile(stream)
        with open(folder / f"train_{side}.bin", "wb") as stream:
            stream.truncate(int(ends[-1]))
    write_manifest(folder, DataManifest("text", ["input", "target"], {"train": DataSplit(samples, {}, [TaskRange("all", 0, samples)])}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=10_000_000)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        write_index(folder / "index", arguments.samples)
        for how in ({"samples_per_batch": 512}, {"tokens_per_batch": 65536}, {"tokens_per_batch": 65536, "limits": [2048, 512]}):
            subprocess.run([sys.executable, "-c", _OPEN, str(folder / "index"), json.dumps(how)], check=True, env=os.environ)
        print(json.dumps(prepare(folder, arguments.megabytes, arguments.workers)), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
