"""Whether a divided module computes what the whole one does: its ranks as threads of this process, loss and gradients compared.

A plan of divisions can be wrong and fit all the same, as one that divides a weight of queries, keys and values in a row; then every shape
is right, and every number wrong.
"""

from __future__ import annotations

import copy
import threading
from contextlib import suppress

import torch
from torch import nn

from penstock.models.modules.cutting.dividing import Division, Styles, divided_weights
from penstock.models.modules.cutting.seen import Loss, SeenMicroBatch
from penstock.models.modules.parallel import TensorParallel

__all__ = ["trains_alike"]

_TOLERANCE = 1e-4
_LENGTH = 11


class _Meeting:
    """Threads that hand tensors to each other."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[torch.Tensor] = [torch.empty(0)] * count

    def exchange(self, place: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What all of them gave, in order."""
        self.given[place] = x.detach()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


def trains_alike(module: nn.Module, loss: Loss, styles: Styles, degree: int, vocab: int) -> str:
    """Empty where loss and gradients of the module, divided over `degree`, are those of the whole; else what is not. It needs weights."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(1, vocab, (2, 1, 2, _LENGTH), generator=generator)[:, 0]
    batch = SeenMicroBatch(ids, labels, torch.rand(ids.shape, generator=generator), torch.arange(_LENGTH).expand(ids.shape))
    whole = copy.deepcopy(module).eval()
    wanted = loss(whole, batch)
    wanted.backward()
    try:
        ranks = _divided(module, loss, styles, degree, batch)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"with tp {degree} it fails: {next(iter(str(error).splitlines()), type(error).__name__)}"
    if any(abs(found - wanted.item()) > _TOLERANCE * abs(wanted.item()) for _, found in ranks):
        return f"with tp {degree} its loss is {ranks[0][1]:.6g} where it should be {wanted.item():.6g}"
    # Where a gradient is zero but for rounding, as that of keys' biases, it is held against what others are.
    largest = max((p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None and p.numel()), default=0.0)
    least = 1e-3 * max(1.0, largest)
    for name, p in whole.named_parameters():
        parts = [dict(one.named_parameters())[name].grad for one, _ in ranks]
        if p.grad is None or any(part is None for part in parts):
            continue
        path, _, attribute = name.rpartition(".")
        dim = divided_weights("", styles.get(path, "")).get(attribute)
        made = [torch.cat(parts, dim)] if dim is not None else parts  # type: ignore[arg-type]
        if any((one - p.grad).abs().max() > _TOLERANCE * p.grad.abs().max().clamp_min(least) for one in made if one is not None):
            return f"with tp {degree} the gradient of '{name}' is another"
    return ""


def _divided(module: nn.Module, loss: Loss, styles: Styles, degree: int, batch: SeenMicroBatch) -> list[tuple[nn.Module, float]]:
    """The module as each rank has it, with its gradients, and its loss."""
    meeting = _Meeting(degree)
    found: dict[int, tuple[nn.Module, float]] = {}
    errors: list[BaseException] = []

    def rank(place: int) -> None:
        try:
            own, tp = copy.deepcopy(module).eval(), TensorParallel(place, degree, exchange=meeting.exchange)
            _cut(own, styles, tp)
            Division(own, styles, dict.fromkeys(styles, tp))
            result = loss(own, SeenMicroBatch(batch.ids, batch.labels, batch.weights, batch.positions))
            result.backward()  # type: ignore[no-untyped-call]
            found[place] = own, result.item()
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank, args=(place,), daemon=True) for place in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(StopIteration):
        raise next(error for error in errors if not isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise RuntimeError("its ranks call other collectives")
    return [found[place] for place in range(degree)]


@torch.no_grad()
def _cut(module: nn.Module, styles: Styles, tp: TensorParallel) -> None:
    """Leaves this rank's parts of the weights, shared ones once."""
    done: dict[int, nn.Parameter] = {}
    for path, style in styles.items():
        part = module.get_submodule(path)
        for name, dim in divided_weights("", style).items():
            p = part._parameters.get(name)
            if p is not None:
                here = tp.shard(p.shape[dim])
                if id(p) not in done:
                    done[id(p)] = nn.Parameter(p.narrow(dim, here.start, here.stop - here.start).clone(), requires_grad=p.requires_grad)
                part._parameters[name] = done[id(p)]
