"""Measuring collectives and transfers among the ranks that torchrun started; a single rank measures none."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from penstock.costs.profile import LinkPoint
from penstock.runtime.transport.rendezvous import join_group

__all__ = ["join_ranks", "measure_links"]

SIZES = tuple(4**k * 1024 for k in range(9))
"""1 kB to 64 MB."""
_REPEATS = 7


def join_ranks(device: str) -> int:
    """Joins torchrun's ranks if there are any; returns this process's rank (0 when alone)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        join_group("nccl" if device == "cuda" else "gloo")
    return dist.get_rank()


def measure_links(device: torch.device) -> list[LinkPoint]:
    """Times of every collective among the first 2, 4, 8 … ranks and of transfers between neighbours."""
    if not dist.is_initialized():
        return []
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    points: list[LinkPoint] = []
    count = 2
    while count <= world:
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            points += _measure_group(group, count, -(-count // per_node), device)
        dist.barrier()
        count *= 2
    return points


def _measure_group(group: dist.ProcessGroup, count: int, num_nodes: int, device: torch.device) -> list[LinkPoint]:
    points = []
    for size in SIZES:
        tensor = torch.zeros(size // 4 // count * count, device=device)
        for kind, action in _actions(tensor, group, count).items():
            time_s = _median_s(action, device) / (2 if kind == "transfer" else 1)
            points.append(LinkPoint(kind, count, num_nodes, tensor.numel() * 4, time_s))
    return points


def _actions(tensor: torch.Tensor, group: dist.ProcessGroup, count: int) -> dict[str, Callable[[], object]]:
    """Each collective on a whole tensor of this size."""
    parts = list(tensor.chunk(count))
    mine = torch.empty_like(parts[0])
    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "all_gather": lambda: dist.all_gather(parts, mine, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
    }
    if dist.get_backend(group) == "nccl":
        other = torch.empty_like(tensor)
        actions["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(mine, tensor, group=group)
        actions["all_to_all"] = lambda: dist.all_to_all_single(other, tensor, group=group)
    if count == 2:
        actions["transfer"] = lambda: _there_and_back(tensor, group)
    return actions


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A sender alone cannot tell when its message has arrived."""
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def _median_s(action: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(2 + _REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
