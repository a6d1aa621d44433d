"""FASOP's cost model as arrays: what a stage takes, keeps and sends under each choice of GPU kind, tp and dp.

Micro-batches of the pipeline hold the same number of samples at every stage; a stage of dp replicas runs each on its share. Backward
takes twice the forward, tensor-parallel communication is inside the layer times, and every other message is charged here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InfeasibleError, InputError, near_misses, plural
from penstock.models.shapes import Shape
from penstock.systems.fasop.inputs import FasopModel, NodeKind
from penstock.systems.fasop.tables import FasopTables

__all__ = ["Case", "Counted", "FasopProblem", "Option", "Sketches", "build_case", "micro_batches_of", "options_of"]

INTER_OVERHEAD, INTRA_OVERHEAD = 1.05, 3.5
"""FASOP's fitted ratios of a link's bandwidth to what one message reaches."""
WIRE_BITS = 16
BYTES_PER_PARAMETER = 18
MEMORY_MARGIN = 1.10
_TOLERANCE = 1 + 1e-12
"""Memory that is full to the last bit counts as full: sums in another order must not make a plan fit."""


@dataclass(frozen=True)
class FasopProblem:
    """One model on a cluster of nodes; `counts` gives the nodes of each kind, in the order of `kinds`."""

    model: FasopModel
    kinds: Mapping[str, NodeKind]
    """Node kinds that the cluster has, by name."""
    counts: tuple[int, ...]
    times_s: Mapping[tuple[str, int, int], Floats]
    """Seconds of each layer by (GPU, tp, micro-batch of one replica)."""
    per_node: int
    """Most GPUs of any node kind that the tables know: the tied embedding is slowed by at most this many replicas."""

    @classmethod
    def of(cls, tables: FasopTables, setting: str) -> FasopProblem:
        """The cluster that one of the experiments spells, a letter per node."""
        settings = tables.settings()
        if setting not in settings:
            raise InputError(f"{tables.name} has no setting '{setting}'. {near_misses(setting, settings)}")
        found = settings[setting]
        known = tables.node_kinds(found.node_table)
        odd = [letter for letter in found.nodes if letter not in known]
        if odd or not found.nodes:
            raise InputError(
                f"setting '{setting}' does not spell a cluster: '{found.nodes}' is not a row of {', '.join(known)}. "
                "Search it as a Pareto set over clusters."
            )
        return cls.on(tables, found.model, known, {kind: found.nodes.count(kind) for kind in known})

    @classmethod
    def on(cls, tables: FasopTables, model: str, known: Mapping[str, NodeKind], counts: Mapping[str, int]) -> FasopProblem:
        """Any cluster of known node kinds."""
        times = tables.layer_times_s(model)
        present = {name: kind for name, kind in known.items() if counts.get(name, 0) > 0}
        if not present:
            raise InputError(f"no nodes given; known kinds are {', '.join(known)}.")
        per_node = max(kind.gpus_per_node for kind in known.values())
        return cls(tables.models[model], present, tuple(counts[name] for name in present), times, per_node)

    @property
    def num_devices(self) -> int:
        """GPUs of all nodes."""
        return sum(kind.gpus_per_node * count for kind, count in zip(self.kinds.values(), self.counts, strict=True))

    @property
    def required_cuts(self) -> tuple[int, ...]:
        """A second embedding opens the decoder, which begins a stage of its own in a pipeline."""
        return tuple(i for i, layer in enumerate(self.model.layer_types) if layer == "embedding_layer")[1:]

    @property
    def tied_bits(self) -> float:
        """What the first and the last stage reduce of the tied embedding; nothing in models with an encoder and a decoder."""
        return 0.0 if self.required_cuts else float(self.model.hidden_size * self.model.vocab_size * WIRE_BITS)


@dataclass(frozen=True)
class Option:
    """What a stage may run on: GPUs of some kinds (the slowest sets the pace), at these degrees."""

    kinds: tuple[int, ...]
    tp: int
    dp: int

    @property
    def num_devices(self) -> int:
        """GPUs of the stage."""
        return self.tp * self.dp


class Case(NamedTuple):
    """A cluster and a number of samples per micro-batch as arrays for kernels: C options, L layers, N nodes, P pools of nodes.

    Times, memory and gradients are prefix sums over layers. A pool is a set of nodes from which a stage takes its GPUs.
    """

    pool: np.ndarray  # [C] pool of an option
    tp: np.ndarray  # [C]
    dp: np.ndarray  # [C]
    times: np.ndarray  # [C, L + 1] seconds of forward and backward
    fixed: np.ndarray  # [C, L + 1] bytes, however many micro-batches are in flight
    flight: np.ndarray  # [C, L + 1] bytes of each micro-batch in flight
    capacity: np.ndarray  # [C] bytes
    gradient_bits: np.ndarray  # [L + 1]
    inside: np.ndarray  # [L + 1] required cuts before a layer
    members: np.ndarray  # [P, N] whether a pool holds a node
    node_size: np.ndarray  # [N] GPUs
    intra: np.ndarray  # [N] bits per second
    inter: np.ndarray  # [N] bits per second
    samples: int  # of a micro-batch, over all replicas
    num_micro_batches: int
    sample_bits: float  # of what one sample sends to the next stage
    tied_bits: float
    per_node: int


class Counted(NamedTuple):
    """A case in which GPUs are counted by kind and not placed on nodes, for rough plans: C options, K kinds."""

    kind: np.ndarray  # [C] the kind of an option's GPUs, -1 for several
    units: np.ndarray  # [C] GPUs that a stage takes, in the units in which they are counted
    limit: np.ndarray  # [K] units of a kind
    node: np.ndarray  # [K] units of one node
    intra_s: np.ndarray  # [C] a message to the next stage, inside a node
    inter_s: np.ndarray  # [C] the same between nodes
    tied_s: np.ndarray  # [C] the tied embedding, half of it for the first and half for the last stage
    ring: np.ndarray  # [C] bits per second of the first stage's gradients


class Sketches(NamedTuple):
    """Rough plans as a programme's tables [kinds + 1, layers + 1, states]: the kind of the stage at hand (the last index for none), the
    layer it begins with, and the mixed-radix number of GPUs used from it on."""

    value: np.ndarray  # least seconds
    depth: np.ndarray  # stages
    back: np.ndarray  # (kind and state of the stage behind, first layer of it, option) in one number

    @classmethod
    def empty(cls, num_kinds: int, num_layers: int, num_states: int) -> Sketches:
        """Room for the programme to work in."""
        shape = (num_kinds + 1, num_layers + 1, num_states)
        return cls(np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int64))

    def options(self, num_options: int) -> list[np.ndarray]:
        """The options of the best rough plan with each kind in front."""
        num_layers, num_states = self.value.shape[1] - 1, self.value.shape[2]
        found = []
        for kind in range(self.value.shape[0] - 1):
            state = int(np.argmin(self.value[kind, 0]))
            if not np.isfinite(self.value[kind, 0, state]):
                continue
            chosen: list[int] = []
            layer, at = 0, kind
            while layer < num_layers:
                behind, option = divmod(int(self.back[at, layer, state]), num_options)
                behind, layer = divmod(behind, num_layers + 1)
                at, state = divmod(behind, num_states)
                chosen.append(option)
            found.append(np.array(chosen))
        return found


def micro_batches_of(problem: FasopProblem) -> list[int]:
    """Samples that a micro-batch may hold over all replicas: divisors of the global batch that some option can run."""
    batch = problem.model.global_batch_size
    return [size for size in range(1, batch + 1) if batch % size == 0 and options_of(problem, size)]


def options_of(problem: FasopProblem, samples: int) -> list[Option]:
    """Every (kinds, tp, dp) with a complete profile and enough GPUs; several kinds only where one alone has too few."""
    kinds = list(problem.kinds.values())
    found = []
    profiled = sorted({(tp, mbs) for _, tp, mbs in problem.times_s if samples % mbs == 0})
    for tp, mbs in profiled:
        dp = samples // mbs
        rooms = [0] * len(kinds)
        for index, (kind, count) in enumerate(zip(kinds, problem.counts, strict=True)):
            row = problem.times_s.get((kind.gpu, tp, mbs))
            if row is not None and np.isfinite(row).all():
                rooms[index] = kind.gpus_per_node // tp * count
        found += [Option((index,), tp, dp) for index, room in enumerate(rooms) if room >= dp]
        usable = tuple(index for index, room in enumerate(rooms) if room)
        if len(usable) > 1 and max(rooms) < dp <= sum(rooms):
            found.append(Option(usable, tp, dp))
    return sorted(found, key=lambda option: (len(option.kinds), option.kinds, option.num_devices, option.tp))


def build_case(problem: FasopProblem, samples: int, options: Sequence[Option]) -> Case:
    """The arrays of one micro-batch size."""
    kinds, model = list(problem.kinds.values()), problem.model
    types = model.layer_types
    node_kind = [index for index, count in enumerate(problem.counts) for _ in range(count)]
    pools = sorted({option.kinds for option in options}, key=lambda pool: (len(pool), pool))
    rows = []
    for option in options:
        tables = [problem.times_s[kinds[index].gpu, option.tp, samples // option.dp] for index in option.kinds]
        rows.append(np.max(tables, axis=0))
    weights = np.array([model.parameters(layer) for layer in types])
    fixed, flight = [], []
    for option in options:
        once, each = _kept_bytes(model, option.tp, samples // option.dp)
        fixed.append(BYTES_PER_PARAMETER * weights / option.tp + once)
        flight.append(each)
    inside = np.zeros(len(types) + 1, np.int64)
    for cut in problem.required_cuts:
        inside[cut + 1 :] += 1
    return Case(
        np.array([pools.index(option.kinds) for option in options]), np.array([option.tp for option in options]),
        np.array([option.dp for option in options]), _prefix(rows), _prefix(fixed), _prefix(flight),
        np.array([min(kinds[index].usable_mem_gib for index in option.kinds) * 2**30 / MEMORY_MARGIN / _TOLERANCE for option in options]),
        _prefix([weights * WIRE_BITS])[0], inside,
        np.array([[kind in pool for kind in node_kind] for pool in pools]),
        np.array([kinds[kind].gpus_per_node for kind in node_kind]), np.array([kinds[kind].intra_bits_per_s for kind in node_kind]),
        np.array([kinds[kind].inter_bits_per_s for kind in node_kind]), samples, model.global_batch_size // samples,
        float(model.sequence_length * model.hidden_size * WIRE_BITS), problem.tied_bits, problem.per_node,
    )  # fmt: skip


def _prefix(rows: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.array(rows, float), axis=1)], axis=1)


def _kept_bytes(model: FasopModel, tp: int, mbs: int) -> tuple[Floats, Floats]:
    """Activations of each layer: those of one micro-batch at a time (the head's), and those of every one in flight."""
    amounts = {layer: model.kept_bytes(layer).at(Shape(mbs), tp) for layer in set(model.layer_types)}  # few types, many layers
    kept = np.array([amounts[layer] for layer in model.layer_types])
    head = np.array([layer == "post_process" for layer in model.layer_types])
    return np.where(head, kept, 0.0), np.where(head, 0.0, kept)


def too_small(problem: FasopProblem) -> InfeasibleError:
    """Why nothing fits, with the least memory that one stage of one layer would need."""
    model = problem.model
    least = math.inf
    for _, tp, mbs in problem.times_s:
        once, each = _kept_bytes(model, tp, mbs)
        weights = np.array([model.parameters(layer) for layer in model.layer_types])
        least = min(least, float((BYTES_PER_PARAMETER * weights / tp + once + each).max() * MEMORY_MARGIN / 2**30))
    largest = max(kind.usable_mem_gib for kind in problem.kinds.values())
    return InfeasibleError(
        f"no plan fits {plural(problem.num_devices, 'GPU')}: the largest layer alone needs {least:.1f} GiB on a GPU that holds "
        f"{largest:.1f} GiB at most, and all {len(model.layer_types)} layers must find room. Add nodes or GPUs with more memory."
    )
