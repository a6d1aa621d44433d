"""A loop of your own around a model of transformers: Penstock plans, and cuts batches for the lengths of your texts.

    torchrun --nproc-per-node 2 examples/own_loop.py --model FOLDER --data chats.jsonl

The plan is the best of those that copy the model, one copy on each device; every rank gets its own micro-batches of each global batch.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import penstock


def main() -> None:
    """Trains one epoch, and says the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--data", required=True, help='JSONL of {"text": "…"}')
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    parser.add_argument("--out", default="trained")
    given = parser.parse_args()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.model)
    with open(given.data, encoding="utf-8") as lines:
        rows = [{"input_ids": tokenizer(json.loads(line)["text"])["input_ids"]} for line in lines]

    plans = penstock.find_plans(f"hf:{given.model}", data=rows, tokens_per_batch=given.tokens_per_batch)
    plan = next(plan for plan in plans if plan.num_stages == 1 and plan.stages[0].degrees.tp == 1)
    loader = penstock.DynamicLoader(rows, plan)

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    first = dist.get_rank() == 0
    if first:
        print(plan)
    model = AutoModelForCausalLM.from_pretrained(given.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for step, micro_batches in loader.dicts():
        loss = torch.zeros((), device=device)
        for one in micro_batches:
            part = model(**{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in one.items()}).loss
            part.backward()
            loss += part.detach()
        for weight in model.parameters():  # once a step, not by DDP: ranks have different numbers of micro-batches
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if first:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if first:
        model.save_pretrained(given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
