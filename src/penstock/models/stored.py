"""Which weights the ops of a model have: under which names they are stored, which of them several ops share, and which are trained.

An op of ours shares at most its `weight`, with the op that it is tied to. A unit of somebody's module says it of each of its weights, see
`models.modules.cutting.weights`.
"""

from __future__ import annotations

from collections import defaultdict

from penstock.models.ops import Model, Op, PlacedOp

__all__ = ["GLUE", "is_trained", "shared_weights", "stored_name"]

GLUE = ":"
"""Begins the name of a weight that belongs to no unit, and which the module itself uses beside one."""


def stored_name(place: PlacedOp, weight: str) -> str:
    """The name of an op's weight in checkpoints: that of the first op which has it."""
    op = place.op
    if "weights" not in op.config:
        return f"{op.tied_to if op.tied_to and weight == 'weight' else place.name}.{weight}"
    if weight in op.config.get("shared", {}):
        return str(op.config["shared"][weight])
    path = place.name.partition("#")[0]  # the second call of a unit is an op of its own
    return weight.removeprefix(GLUE) if weight.startswith(GLUE) or path == "module" else f"{path}.{weight}"


def shared_weights(model: Model) -> dict[str, tuple[int, ...]]:
    """The weights that several ops use, by their stored names, each with those ops in order."""
    found: dict[str, list[int]] = defaultdict(list)
    numbers = {place.name: place.index for place in model.ops}
    for place in model.ops:
        if "weights" in place.op.config:
            for name in place.op.config.get("shared", {}).values():
                found[name].append(place.index)
        elif place.op.tied_to in numbers:
            found[stored_name(place, "weight")] += [numbers[place.op.tied_to], place.index]
    return {name: tuple(sorted(set(ops))) for name, ops in found.items()}


def is_trained(op: Op, weight: str) -> bool:
    """Whether steps change a weight."""
    return op.trainable and weight not in op.config.get("frozen", ())
