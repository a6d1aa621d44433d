"""The weights of a module's units as a description names them, so that plans, programs and checkpoints need no module.

    weights   {"attn.q.weight": [64, 64], ":places": [128, 64]}   by their names inside the unit; `:` begins a weight of the glue
    shared    {"weight": "embed.weight"}                          those that other ops use too, by their names in the module
    frozen    ["attn.q.weight"]                                   those that are not trained
    buffers   {"running_mean": [64], ":final_bias": [97]}         what a checkpoint keeps besides
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from penstock.models.modules.cutting.chain import UnitChain
from penstock.models.stored import GLUE

__all__ = ["WeightTable"]


class WeightTable:
    """Which op of a chain has which weights; those that no op uses stay with the first, as they are."""

    def __init__(self, chain: UnitChain) -> None:
        self._chain = chain
        self.home = {id(p): name for name, p in chain.module.named_parameters()}
        """The name in the module of each weight: the first, where it has several."""
        self.ops = [self._own(index, path) for index, path in enumerate(chain.calls)]
        used = {id(p) for own in self.ops for p in own.values()}
        self.unused = {id(p) for p in chain.module.parameters()} - used
        for name, p in chain.module.named_parameters():
            if id(p) in self.unused and self.ops:
                self.ops[0][f"{GLUE}{name}"] = p
        self._uses = Counter(id(p) for own in self.ops for p in own.values())

    def _own(self, index: int, path: str) -> dict[str, nn.Parameter]:
        chain = self._chain
        own = dict(chain.units[path].named_parameters())
        inside = {id(p) for p in own.values()}
        for weight in chain.glue_weights:
            if index in weight.calls and (p := weight.owner._parameters[weight.attribute]) is not None and id(p) not in inside:
                own[f"{GLUE}{self.home[id(p)]}"] = p
        return own

    def config(self, index: int) -> dict[str, Any]:
        """What the description of an op says of its weights."""
        own = self.ops[index]
        found: dict[str, Any] = {
            "weights": {name: list(p.shape) for name, p in own.items()},
            "shared": {name: self.home[id(p)] for name, p in own.items() if self._uses[id(p)] > 1},
            "frozen": [name for name, p in own.items() if not p.requires_grad or id(p) in self.unused],
            "buffers": {name: list(b.shape) for name, b in self.buffers(index).items()},
        }
        return {name: value for name, value in found.items() if value}

    def buffers(self, index: int) -> dict[str, torch.Tensor]:
        """Those of an op that are part of the module's state, as they are now."""
        unit = self._chain.units[self._chain.calls[index]]
        kept = unit.state_dict(keep_vars=True)
        found = {name: b for name, b in unit.named_buffers() if name in kept}
        return found | {f"{GLUE}{one.name}": one.tensor() for one in self._chain.glue_buffers if one.call == index}

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """A weight is another tensor from now on."""
        for own in self.ops:
            for name, p in own.items():
                if p is old:
                    own[name] = new
        self.home[id(new)] = self.home.pop(id(old))
        if id(old) in self.unused:
            self.unused = self.unused - {id(old)} | {id(new)}
