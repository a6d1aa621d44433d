"""Parts of tensors that travel: cut out of what a rank holds, and put where they belong at the other end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import torch

from penstock.programs.instructions import Part

__all__ = ["DTYPES", "Landing", "outgoing", "prepare"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int64": torch.int64}


def _view(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The part inside the tensor that holds it."""
    if part.rows is not None:
        tensor = tensor[part.rows[0] : part.rows[1]]
    if part.columns is not None:
        tensor = tensor[..., part.columns[0] : part.columns[1]]
    return tensor


def outgoing(tensors: Mapping[str, torch.Tensor], parts: Iterable[Part]) -> list[torch.Tensor]:
    """The tensors to send, each contiguous; parts without elements are left out at both ends."""
    views = (_view(tensors[part.name], part) for part in parts)
    return [view.contiguous() for view in views if view.numel()]


@dataclass(frozen=True, slots=True)
class Landing:
    """The tensor in which one part arrives; `finish` puts it in place if it could not arrive there at once."""

    arrives: torch.Tensor
    target: torch.Tensor
    add: bool

    def finish(self) -> None:
        """Puts the part in place; called once it has arrived."""
        if self.add:
            self.target.add_(self.arrives)
        elif self.arrives is not self.target:
            self.target.copy_(self.arrives)


def prepare(tensors: MutableMapping[str, torch.Tensor], parts: Iterable[Part], device: torch.device) -> list[Landing]:
    """Allocates what `tensors` does not hold yet, and says where each part with elements arrives."""
    landings = []
    for part in parts:
        whole = tensors.get(part.name)
        if whole is None:
            whole = tensors[part.name] = torch.empty(part.shape, dtype=DTYPES[part.dtype], device=device)
        target = _view(whole, part)
        if target.numel():
            direct = target.is_contiguous() and not part.add
            arrives = target if direct else torch.empty(target.shape, dtype=target.dtype, device=device)
            landings.append(Landing(arrives, target, part.add))
    return landings
