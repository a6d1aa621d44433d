"""Predicting how much a foreign load slows a stage that a rank does not have yet: constant, scalar, by class of op, and a random forest.

    python benchmarks/interference.py                      simulated loads on real mixes of ops
    python benchmarks/interference.py --dynpipe FOLDER     DynPipe's published measurements too

Simulated: a load slows arithmetic, attention and memory-bound ops differently, every op a little apart from its class. The rank sees
passes of one stage of a model (ragged samples, 5 % noise) and predicts stages of other models. *Constant* is the mean slow-down of all
loads, *scalar* that of the rank's own passes; *passes* is `class_slowdowns` from these, *classes* the same with eight passes in which
ops were timed one by one.

DynPipe's data has one load per row and nothing else that was measured under it: scalar and classes cannot be scored there. Its forest
predicts from 26 counters of the GPU; as all rows are of one model, batch sizes are left out in place of models.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from class_slowdowns import fit_slowdowns
from numpy.typing import NDArray

from penstock.clusters import resolve_cluster
from penstock.costs.sources import open_costs
from penstock.costs.speeds import OpClass, class_of
from penstock.models.catalog import resolve_model
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.timing.pass_times import op_passes

__all__ = ["forest_errors", "simulated_errors"]

Floats = NDArray[np.float64]
MODELS = ("gpt-350m", "llama-1b", "bert-large", "t5-large", "resnet-50")
CLASSES = tuple(OpClass)
OWN_SPREAD = 0.05
NOISE = 0.05
NUM_TIMED = 8
DATASET = "interference_dataset_out_json.csv"


def _shapes(model: Model, generator: np.random.Generator, count: int) -> list[Shape]:
    if not model.seq_length:
        return [Shape.images(int(size)) for size in generator.integers(8, 128, count)]
    lengths = np.exp(generator.uniform(np.log(64), np.log(2048), count)).astype(int)
    return [Shape.padded(max(1, 8192 // int(length)), int(length), int(length) // 4 if model.dec_length else 0) for length in lengths]


def _op_seconds(model: Model, shapes: list[Shape]) -> tuple[Floats, NDArray[np.int64], NDArray[np.int32]]:
    """[passes, ops of the chain] predicted seconds, forward and backward passes in turn; the class of each op; which ops are equal."""
    cluster = resolve_cluster("a100-80gb")
    table = open_costs("roofline", cluster).table(model, list(dict.fromkeys(shapes)), [1], cluster)
    rows = []
    for number, shape in enumerate(shapes):
        own = op_passes(model, table, shape, device=table.devices[0], ops=table.chain)
        rows.append(own.forward_s if number % 2 == 0 else own.backward_s)
    return np.stack(rows), np.array([CLASSES.index(class_of(place.op)) for place in model.ops]), table.chain


def _load(generator: np.random.Generator) -> Floats:
    """Slow-downs of the classes beside a burner of arithmetic, of memory, or of both, light or heavy."""
    arithmetic, memory = [(1.0, 0.15), (0.15, 1.0), (1.0, 1.0)][generator.integers(3)] * generator.uniform(0.1, 2.0, 2)
    return 1 + np.array([arithmetic, 0.5 * (arithmetic + memory), memory])


def _stage(generator: np.random.Generator, num_ops: int) -> slice:
    """A run of a quarter of the chain or less: some stages are all convolutions, some all logits."""
    length = int(generator.integers(2, max(3, num_ops // 4)))
    first = int(generator.integers(0, num_ops - length))
    return slice(first, first + length)


def _with_timed_ops(
    predicted: dict[OpClass, Floats], measured: Floats, op_s: Floats, factors: Floats, classes: NDArray[np.int64],
    generator: np.random.Generator,
) -> tuple[dict[OpClass, Floats], Floats]:  # fmt: skip
    """The passes, and what the ops of each class took in a few of them, as passes of one class."""
    rows, times = [np.stack(list(predicted.values()), axis=1)], [measured]
    for at in range(len(CLASSES)):
        if (classes == at).any():
            own = op_s[:NUM_TIMED, classes == at]
            rows.append(own.sum(axis=1)[:, None] * np.eye(len(CLASSES))[at])
            times.append((own * factors[classes == at] * np.exp(generator.normal(0, NOISE, own.shape))).sum(axis=1))
    table = np.concatenate(rows)
    return {one: table[:, at] for at, one in enumerate(CLASSES)}, np.concatenate(times)


def simulated_errors(num_loads: int = 200, num_passes: int = 96, seed: int = 0) -> dict[str, float]:
    """Mean error of each predictor over loads and pairs of models, as a share of the truth; `covered`: share inside of intervals."""
    generator = np.random.default_rng(seed)
    chains = {name: resolve_model(name) for name in MODELS}
    seconds = {name: _op_seconds(model, _shapes(model, generator, num_passes)) for name, model in chains.items()}
    constant = float(np.mean([_load(generator) for _ in range(1000)]))
    errors: dict[str, list[float]] = {"constant": [], "scalar": [], "passes": [], "classes": []}
    covered = []
    for _ in range(num_loads):
        load = _load(generator)
        for seen in MODELS:
            own_s, own_classes, _ = seconds[seen]
            apart = {name: load[classes] * np.exp(generator.normal(0, OWN_SPREAD, len(classes)))[chain]
                     for name, (_, classes, chain) in seconds.items()}  # fmt: skip
            mine = _stage(generator, own_s.shape[1])
            measured = (own_s[:, mine] * apart[seen][mine]).sum(axis=1) * np.exp(generator.normal(0, NOISE, len(own_s)))
            predicted = {one: (own_s[:, mine] * (own_classes[mine] == at)).sum(axis=1) for at, one in enumerate(CLASSES)}
            alone = fit_slowdowns(predicted, measured)
            found = fit_slowdowns(*_with_timed_ops(predicted, measured, own_s[:, mine], apart[seen][mine], own_classes[mine], generator))
            scalar = float(np.median(measured / own_s[:, mine].sum(axis=1)))
            for other in MODELS:
                if other == seen:
                    continue
                its_s, its_classes, _ = seconds[other]
                part = _stage(generator, its_s.shape[1])
                truth = float((its_s[:, part] * apart[other][part]).sum() / its_s[:, part].sum())
                mix = {one: float((its_s[:, part] * (its_classes[part] == at)).sum()) for at, one in enumerate(CLASSES)}
                guess = found.of_stage(mix)
                covered.append(guess.low <= truth <= guess.high)
                guesses = {"constant": constant, "scalar": scalar, "passes": alone.of_stage(mix).factor, "classes": guess.factor}
                for name, value in guesses.items():
                    errors[name].append(abs(value - truth) / truth)
    return {name: float(np.mean(own)) for name, own in errors.items()} | {"covered": float(np.mean(covered))}


class _Tree:
    """A regression tree by least squares, on random thirds of the features at each split."""

    def __init__(self, x: Floats, y: Floats, generator: np.random.Generator, least: int = 2) -> None:
        self.value, self.feature = float(y.mean()), -1
        if len(y) < 2 * least or y.std() == 0:
            return
        best = (np.inf, -1, 0.0)
        for feature in generator.choice(x.shape[1], max(1, x.shape[1] // 3), replace=False).tolist():
            order = np.argsort(x[:, feature], kind="stable")
            values, targets = x[order, feature], y[order]
            counts = np.arange(1, len(y))
            left, squares = np.cumsum(targets)[:-1], np.cumsum(targets**2)
            lost = squares[-1] - left**2 / counts - (targets.sum() - left) ** 2 / (len(y) - counts)
            lost[(values[1:] == values[:-1]) | (counts < least) | (len(y) - counts < least)] = np.inf
            at = int(np.argmin(lost))
            if lost[at] < best[0]:
                best = (float(lost[at]), feature, float((values[at] + values[at + 1]) / 2))
        if best[1] < 0:
            return
        _, self.feature, self.limit = best
        below = x[:, self.feature] <= self.limit
        self.below, self.above = _Tree(x[below], y[below], generator, least), _Tree(x[~below], y[~below], generator, least)

    def __call__(self, row: Floats) -> float:
        if self.feature < 0:
            return self.value
        return self.below(row) if row[self.feature] <= self.limit else self.above(row)


def forest_errors(path: Path, num_trees: int = 100) -> dict[str, float]:
    """Mean error of a constant and of a forest over DynPipe's counters, each batch size predicted from the others."""
    with path.open(encoding="utf-8") as file:
        rows = np.array(list(csv.reader(file))[1:], dtype=np.float64)
    rows = rows[rows[:, -1] != 1.0]  # as DynPipe does: undisturbed runs are dropped
    x, y, batches = rows[:, :-1], rows[:, -1], rows[:, 26]
    generator = np.random.default_rng(42)
    errors: dict[str, list[float]] = {"constant": [], "forest": []}
    for batch in np.unique(batches):
        seen, left = batches != batch, batches == batch
        draws = [generator.integers(0, seen.sum(), seen.sum()) for _ in range(num_trees)]
        trees = [_Tree(x[seen][draw], y[seen][draw], generator) for draw in draws]
        guesses = np.array([np.mean([tree(row) for tree in trees]) for row in x[left]])
        errors["constant"] += (np.abs(y[seen].mean() - y[left]) / y[left]).tolist()
        errors["forest"] += (np.abs(guesses - y[left]) / y[left]).tolist()
    return {name: float(np.mean(own)) for name, own in errors.items()}


def main() -> int:
    """Prints the tables; 1 if classes are not at most 0.7 of scalar, or intervals hold less than 85 % or more than 95 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynpipe", type=Path, help="folder with DynPipe's published data")
    folder = parser.parse_args().dynpipe
    found = simulated_errors()
    print("simulated loads, another model's stages: mean error")
    for name in ("constant", "scalar", "passes", "classes"):
        print(f"  {name:10} {found[name]:6.1%}   {found[name] / found['scalar']:5.2f} of scalar's")
    print(f"  90 % intervals of classes hold {found['covered']:.1%}")
    if folder is None or not (folder / DATASET).is_file():
        print("DynPipe's measurements: skipped, give their folder with --dynpipe")
    else:
        print("DynPipe's measurements, another batch size: mean error")
        for name, error in forest_errors(folder / DATASET).items():
            print(f"  {name:10} {error:6.1%}")
    return 0 if found["classes"] <= 0.7 * found["scalar"] and 0.85 <= found["covered"] <= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
