"""Fine-tune a model of transformers on your own texts, divided as the best plan says, in a loop of your own.

    torchrun --nproc-per-node gpu examples/finetune.py --model FOLDER --data chats.jsonl
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from transformers import AutoTokenizer

import penstock


def main() -> None:
    """Once through the texts; the trained model is a folder that `from_pretrained` loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--data", required=True, help='JSONL of {"text": "…"}')
    parser.add_argument("--tokens-per-batch", type=int, default=262_144)
    parser.add_argument("--out", default="trained")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with open(given.data, encoding="utf-8") as lines:
        rows = [{"input_ids": tokenizer(json.loads(line)["text"])["input_ids"]} for line in lines]

    plan = penstock.find_plans(f"hf:{given.model}", data=rows, tokens_per_batch=given.tokens_per_batch)[0]
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(plan)
    model = penstock.parallelize(f"hf:{given.model}", plan)  # or your own module
    optimizer = model.optimizer(torch.optim.AdamW, lr=2e-5)
    for step, batch in penstock.DynamicLoader(rows, plan):
        loss = model.step(batch)  # the same on every rank
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.export(given.out)


if __name__ == "__main__":
    main()
