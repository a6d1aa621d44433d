"""A GPT trained by torch.distributed.pipelining, two stages under 1F1B on processors: started as a program, since it forks ranks.

    python -m penstock.reproduce.peers.torch_pipelining '{"layers": 8, "hidden": 128, …}'

prints one JSON object: seconds of each step after the warm-up, and the losses. The model is written with torch's own layers, as a user of
that library would; its sizes and its batches of full rows are those of our side.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from penstock.reproduce.peers.checkout import PeerError

__all__ = ["PipelineSizes", "PipelineSteps", "train_stage", "train_with_torch"]

_STAGES, _WARM_UP, _LIMIT_S = 2, 2, 600.0


@dataclass(frozen=True)
class PipelineSizes:
    """A GPT with untied embeddings, and how it is trained."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_length: int
    rows: int
    """Samples of a micro-batch."""
    micro_batches: int
    steps: int
    """Timed ones; two more come before."""


@dataclass(frozen=True)
class PipelineSteps:
    """What was measured on the last rank."""

    times_s: list[float]
    losses: list[float]


def train_with_torch(sizes: PipelineSizes) -> PipelineSteps:
    """Trains in processes of their own, one thread each, as our ranks on as many processors."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(sizes))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PeerError(f"torch.distributed.pipelining had not trained after {_LIMIT_S:g} s.") from None
    if done.returncode:
        raise PeerError(f"torch.distributed.pipelining failed: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
    return PipelineSteps(**json.loads(done.stdout.strip().splitlines()[-1]))


def _module(sizes: PipelineSizes, rank: int) -> Any:
    """This rank's half of the layers; the embedding is before the first, the head after the last."""
    import torch
    from torch import nn

    class Embedding(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(sizes.seq_length, sizes.hidden)

        def forward(self, ids: Any) -> Any:
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    class Block(nn.TransformerEncoderLayer):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)

    torch.manual_seed(0)
    blocks = [Block(sizes.hidden, sizes.heads, 4 * sizes.hidden, 0.0, nn.functional.gelu, batch_first=True, norm_first=True)
              for _ in range(sizes.layers)]  # fmt: skip
    half = sizes.layers // _STAGES
    if rank == 0:
        return nn.Sequential(Embedding(), *blocks[:half])
    return nn.Sequential(*blocks[half:], nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False))


def _rank(rank: int, sizes: PipelineSizes, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_STAGES)
    found = train_stage(rank, sizes)
    if rank == _STAGES - 1:
        print(json.dumps(asdict(found)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train_stage(rank: int, sizes: PipelineSizes) -> PipelineSteps:
    """Trains one stage in a process group that is there; losses are known to the last."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = _module(sizes, rank)
    schedule = Schedule1F1B(
        PipelineStage(module, rank, _STAGES, torch.device("cpu")), sizes.micro_batches,
        lambda logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    ids = torch.randint(sizes.vocab, (sizes.rows * sizes.micro_batches, sizes.seq_length + 1), generator=torch.Generator().manual_seed(1))
    times_s, losses = [], []
    for step in range(_WARM_UP + sizes.steps):
        dist.barrier()
        start, found = time.perf_counter(), list[Any]()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids[:, :-1].contiguous())
        else:
            schedule.step(target=ids[:, 1:].contiguous(), losses=found)
        optimizer.step()
        dist.barrier()
        if step >= _WARM_UP:
            times_s.append(time.perf_counter() - start)
        losses += [float(torch.stack(found).mean())] if found else []
    return PipelineSteps(times_s, losses)


def main(text: str) -> None:
    """Starts both ranks."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (PipelineSizes(**json.loads(text)), port), nprocs=_STAGES)


if __name__ == "__main__":
    main(sys.argv[1])
