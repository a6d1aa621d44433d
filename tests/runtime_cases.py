"""Plans of every kind on tiny models, random micro-batchings for them, and the plain single-process training they must equal."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, groupby, islice
from typing import Any

import msgspec
import torch
from oracles.optimizers import torch_optimizer
from small_models import SIZES
from torch.nn import functional as F
from training_jobs import RandomSource

from penstock.models.micro_batch import MicroBatch
from penstock.models.modules import build_chain
from penstock.models.modules.build import build_op
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import model_of
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.source import load_share
from penstock.schedules.actions import FORWARD
from penstock.schedules.orders import gpipe
from penstock.schedules.rules import schedule_of

MODELS: dict[str, dict[str, Any]] = {
    **{family: {"family": family, **SIZES[family]} for family in SIZES},
    "resnet": {"family": "resnet", "blocks": [1, 1], "base_width": 8, "num_classes": 6, "image_size": 32},
    "vgg": {"family": "vgg", "convs": [1, 1], "widths": [8, 16], "classifier_width": 24, "num_classes": 6, "image_size": 16},
}
MODELS["gpt"] |= {"dropout": 0.1}
MODELS["t5"] |= {"dropout": 0.1}

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "family": tuple(MODELS),
    "pp": (1, 2, 3, 4),
    "tp": (1, 2),
    "dp": (1, 2),
    "replicas": (1, 2),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "layout": ("padded", "packed"),
    "recompute": ("none", "some", "all"),
    "cuts": ("even", "uneven"),
    "degrees": ("equal", "per stage", "per op"),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
}
Choice = dict[str, Any]


def is_possible(choice: Choice, most_ranks: int = 8) -> bool:
    """Whether such a plan exists and is small enough."""
    c = choice
    conv = c["family"] in ("resnet", "vgg")
    ranks = c["pp"] * c["tp"] * c["dp"] * c["replicas"]
    return not (
        ranks > most_ranks
        or (c["layout"] == "packed" and (conv or c["family"] == "t5"))
        or (c["schedule"] in ("interleaved", "zero-bubble") and c["pp"] == 1)
        or (c["schedule"] == "interleaved" and c["pp"] > 2)
        or (c["schedule"] == "interleaved" and c["degrees"] == "per stage")
        or (c["schedule"] == "zero-bubble" and c["recompute"] != "none")
        or (c["degrees"] == "per op" and c["tp"] * c["dp"] == 1)
        or (c["degrees"] == "per stage" and c["pp"] == 1)
        or (c["sequence_parallel"] and c["tp"] == 1)
        or (c["sequence_parallel"] and conv)
        or (c["family"] == "resnet" and c["degrees"] != "equal")  # its statistics depend on how each op's samples are divided
        or (c["zero"] and c["dp"] * c["replicas"] == 1)
        or (c["zero"] > 1 and c["pp"] > 1)
    )


def covering_choices(at_least: int = 0) -> tuple[Choice, ...]:
    """Choices in which every possible pair of values of two dimensions occurs, on rather few ranks each; and others, if that is too few."""
    chosen, drawn = _covering_and_drawn()
    return (*chosen, *drawn[: max(0, at_least - len(chosen))])


@cache
def _covering_and_drawn() -> tuple[list[Choice], list[Choice]]:
    generator = random.Random(0)
    drawn = ({name: generator.choice(values) for name, values in DIMENSIONS.items()} for _ in range(60_000))
    candidates = list(islice(filter(is_possible, drawn), 4000))
    bits: dict[tuple[Any, ...], int] = {}
    covered = [_bits_of(((a, choice[a], b, choice[b]) for a, b in combinations(DIMENSIONS, 2)), bits) for choice in candidates]
    dear = [(1.5 + choice["pp"] * choice["tp"] * choice["dp"] * choice["replicas"]) ** 0.3 for choice in candidates]
    left, chosen = 2 ** len(bits) - 1, []
    while left:
        best = max(range(len(candidates)), key=lambda index: (covered[index] & left).bit_count() / dear[index])
        chosen.append(candidates[best])
        left &= ~covered[best]
    return chosen, candidates


def _bits_of(pairs: Iterable[tuple[Any, ...]], bits: dict[tuple[Any, ...], int]) -> int:
    """A set as the bits of a number, which are far quicker to count; `bits` has the place of each element."""
    return sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)


@dataclass(frozen=True)
class Case:
    """One plan with its micro-batches for some iterations."""

    plan: Plan
    model: Model
    works: tuple[tuple[ReplicaWork, ...], ...]
    """Of each iteration."""

    def programs(self) -> list[tuple[Program, ...]]:
        """Of each iteration, for all ranks."""
        return list(self._programs)

    @cached_property
    def _programs(self) -> tuple[tuple[Program, ...], ...]:
        return tuple(lower(self.plan, self.model, work, iteration) for iteration, work in enumerate(self.works))


def make_case(choice: Choice, seed: int, iterations: int = 2, precision: str = "fp32", **changes: Any) -> Case:
    """A plan as chosen, all that is left open drawn from `seed`. The second iteration begins with weights that the first has changed."""
    generator = random.Random(seed)
    fields = MODELS[choice["family"]] | changes
    plan = Plan(fields, "64xcpu", 8, (), MicroBatching(choice["layout"], "dynamic"), choice["replicas"], choice["schedule"],
                seq_length=fields.get("seq_length", 0), dec_length=fields.get("dec_length", 0), precision=precision)  # fmt: skip
    model = model_of(plan)
    plan = replace(plan, stages=tuple(_stages(model, choice, generator)))
    works = tuple(make_works(plan, model, generator) for _ in range(iterations))
    return Case(plan, model, works)


def _stages(model: Model, choice: Choice, generator: random.Random, most_ranks: int = 8) -> Iterator[Stage]:
    pp, chunks = choice["pp"], 2 if choice["schedule"] == "interleaved" else 1
    count, ops = pp * chunks, model.num_ops
    inner = [round(ops * k / count) for k in range(1, count)] if choice["cuts"] == "even" else sorted(
        generator.sample(range(1, ops), count - 1))  # fmt: skip
    cuts = [0, *inner, ops]
    sizes = [(choice["tp"], choice["dp"])] * pp
    if choice["degrees"] == "per stage":
        sizes, room = [(choice["tp"], choice["dp"])], most_ranks // choice["replicas"] - choice["tp"] * choice["dp"]
        for left in range(pp - 2, -1, -1):
            shapes = [(tp, dp) for tp in (1, 2) for dp in (1, 2) if tp * dp <= room - left]
            sizes.append(generator.choice(shapes))
            room -= sizes[-1][0] * sizes[-1][1]
    starts = [0]
    for tp, dp in sizes:
        starts.append(starts[-1] + tp * dp * choice["replicas"])
    for number in range(count):
        (tp, dp), start = sizes[number % pp], starts[number % pp]
        devices = tuple(tuple(range(start + replica * tp * dp, start + (replica + 1) * tp * dp)) for replica in range(choice["replicas"]))
        first, last = cuts[number], cuts[number + 1]
        runs = _runs(model, first, last, tp, dp, generator) if choice["degrees"] == "per op" else ()
        yield Stage(first, last, devices, Degrees(tp, dp), runs, _patterns(first, last, choice["recompute"], generator), choice["zero"],
                    choice["sequence_parallel"])  # fmt: skip


def _runs(model: Model, first: int, last: int, tp: int, dp: int, generator: random.Random) -> tuple[OpRun, ...]:
    """Some ops with other degrees or the other split; shared weights keep the stage's."""
    tied = {place.op.tied_to for place in model.ops} - {""}
    runs, op = [], first
    while op < last:
        width = generator.randint(1, 4)
        span = model.ops[op : min(op + width, last)]
        free = all(place.name not in tied and not place.op.tied_to for place in span)
        if free and generator.random() < 0.5:
            other = generator.choice([(1, tp * dp), (tp * dp, 1), (tp, dp)])
            algo = min(generator.randint(0, 1), *(len(place.op.splits) - 1 for place in span))
            if all(not place.op.tp_limit or place.op.tp_limit % other[0] == 0 for place in span):
                runs.append(OpRun(span[0].index, span[-1].index + 1, *other, algo))
        op += width
    return tuple(runs)


def _patterns(first: int, last: int, recompute: str, generator: random.Random) -> tuple[tuple[tuple[int, int], ...], ...]:
    if recompute == "none":
        return ()
    if recompute == "all":
        return (((first, last),),)
    middle = generator.randint(first, last - 1)
    return ((), ((middle, last),))


def make_works(plan: Plan, model: Model, generator: random.Random) -> tuple[ReplicaWork, ...]:
    """Every replica has its own number of micro-batches, each its own number of samples, lengths and dp bounds.

    Fewer than stages, as many, or one more, which is the first in a pipeline's steady state: more of them show nothing new.
    """
    works, sample = [], 0
    for _ in range(plan.num_replicas):
        count = generator.randint(2, max(3, plan.num_stages + 1))
        micros = []
        for index in range(count):
            size = max(1, _least(plan, model) * max(_dp_degrees(plan), default=1)) + generator.randint(0, 2)
            micros.append(_micro_batch(plan, model, index, range(sample, sample + size), generator))
            sample += size
        schedule = schedule_of(plan.schedule, plan.num_stages, count, plan.num_chunks)
        patterns = tuple(tuple(generator.randrange(max(1, len(stage.recompute))) for stage in plan.stages) for _ in micros)
        works.append(ReplicaWork(tuple(micros), schedule, patterns))
    return tuple(works)


def _dp_degrees(plan: Plan) -> set[int]:
    return {dp for stage in plan.stages for dp in (stage.degrees.dp, *(run.dp for run in stage.runs))} - {1}


def _least(plan: Plan, model: Model) -> int:
    """Samples that each dp rank must have: none at all where ranks may skip a micro-batch, more than one for batch statistics."""
    return 2 if model.family == "resnet" else int(any(stage.runs for stage in plan.stages))


def _micro_batch(plan: Plan, model: Model, index: int, samples: range, generator: random.Random) -> MicroBatch:
    count, layout = len(samples), plan.micro_batching.layout
    least = _least(plan, model)
    bounds = {}
    for dp in _dp_degrees(plan):
        inner = sorted(generator.randint(0, count - least * dp) for _ in range(dp - 1))
        bounds[dp] = (0, *(cut + least * (number + 1) for number, cut in enumerate(inner)), count)
    if not model.seq_length:
        return MicroBatch(index, tuple(samples), "padded", bounds=bounds)
    lengths = tuple(generator.randint(1, 9) for _ in samples)
    dec_lengths = tuple(generator.randint(1, 6) for _ in samples) if model.dec_length else ()
    rows = (0, 0) if layout == "packed" else (max(lengths) + generator.randint(0, 2), max(dec_lengths, default=-1) + 1)
    return MicroBatch(index, tuple(samples), layout, lengths, dec_lengths, *rows, bounds=bounds)


def reference(
    case: Case, settings: TrainingSettings, *, whole: bool = False, noise: float = 0.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of one process that runs the same micro-batches one after the other with plain torch.

    Where the model has batch statistics, the parts into which dp divides a micro-batch are run one by one, and their gradients added
    rank by rank: a rounding that differs once in a million steps over a kink (ReLU, max) would otherwise be seen as a difference.
    With `whole` all samples run at once. Initial weights are off by up to `noise` of their size.
    """
    model = case.model
    chain = build_chain(model, seed=settings.seed)
    generator = torch.Generator().manual_seed(0)
    for parameter in chain.parameters():
        parameter.data *= 1.0 + noise * (2.0 * torch.rand(parameter.shape, generator=generator) - 1.0)
    optimizer = torch_optimizer(settings.optimizer, list(chain.parameters()), settings.rate.peak)
    source = RandomSource(model)
    losses = []
    for iteration, programs in enumerate(case.programs()):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate.at(iteration)
        total, sums = 0.0, []
        for _, own in groupby(_shares(case, programs, whole), key=lambda share: share[0]):
            optimizer.zero_grad()
            for _, program, micro, bounds in own:
                needs = ("inputs", "dec_inputs", "labels")
                loss = chain(load_share(source, program, micro, bounds, needs, torch.device("cpu"), settings.seed))["loss"]
                loss.backward()
                total += loss.item()
            sums.append([parameter.grad for parameter in chain.parameters()])
        for parameter, *parts in zip(chain.parameters(), *sums, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) if parts[0] is not None else None
        losses.append(total)
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in chain.parameters() if p.grad is not None], settings.clip_norm)
        optimizer.step()
    return losses, {name: value.detach() for name, value in _named(chain, model)}


def evaluation_programs(case: Case) -> tuple[Program, ...]:
    """Forward passes alone over the micro-batches of the first iteration, for all ranks."""
    works = []
    for work in case.works[0]:
        full = gpipe(case.plan.num_stages, len(work.micro_batches))
        forwards = tuple(tuple(action for action in actions if action.kind == FORWARD) for actions in full)
        works.append(replace(work, schedule=forwards, patterns=()))
    return lower(case.plan, case.model, works, 3, training=False)


@torch.no_grad()
def plain_evaluation(case: Case, settings: TrainingSettings) -> tuple[float, float]:
    """(loss, accuracy) of the same micro-batches by torch's own mean cross entropy over all labels that count, and the most likely ones."""
    chain, source = build_chain(case.model, seed=settings.seed), RandomSource(case.model)
    programs = {program.replica: program for program in evaluation_programs(case)}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    follows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for program in programs.values():
        for micro in program.micro_batches:
            needs = ("inputs", "dec_inputs", "labels")
            batch = load_share(source, program, micro, (0, len(micro.samples)), needs, torch.device("cpu"), settings.seed)
            batch.training = False  # whatever the loader says
            carry: dict[str, torch.Tensor] = {}
            for op in list(chain.ops)[:-1]:
                carry = op(carry, batch)
            labels = batch.targets if batch.labels is None else batch.labels
            live = batch.weights > 0
            seen.append((carry["logits"][live], labels[live]))
            if batch.next_sentence is not None:
                follows.append((carry["next_sentence"], batch.next_sentence))
    logits, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    loss = F.cross_entropy(logits, labels).item()
    if follows:
        loss += F.cross_entropy(*(torch.cat(parts) for parts in zip(*follows, strict=True))).item()
    return loss, (logits.argmax(-1) == labels).double().mean().item()


def _named(chain: Any, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    for place, module in zip(model.ops, chain.ops, strict=True):
        for name, value in module.named_parameters():  # a shared weight under the name of each op that has it
            yield f"{place.index}.{name}", value


def _shares(case: Case, programs: Sequence[Program], whole: bool) -> Iterator[tuple[int, Program, MicroBatch, tuple[int, int]]]:
    """(holder, program, micro-batch, samples): what is run, by the rank that would run it where that matters."""
    firsts = [program for _, program in sorted({program.replica: program for program in programs}.items())]
    if whole:
        program, micro = _joined(firsts)
        yield 0, program, micro, (0, len(micro.samples))
    elif case.model.family == "resnet":
        dp = case.plan.stages[0].degrees.dp
        for program in firsts:
            for share in range(dp):
                yield from ((program.replica * dp + share, program, micro, micro.share(dp, share)) for micro in program.micro_batches)
    else:
        for program in firsts:
            yield from ((0, program, micro, (0, len(micro.samples))) for micro in program.micro_batches)


def _joined(programs: Sequence[Program]) -> tuple[Program, MicroBatch]:
    """One micro-batch of all samples."""
    micros = [micro for program in programs for micro in program.micro_batches]
    lengths, dec_lengths = (tuple(n for micro in micros for n in getattr(micro, name)) for name in ("lengths", "dec_lengths"))
    packed = micros[0].layout == "packed"
    rows = (0, 0) if packed else (max(lengths, default=0), max(dec_lengths, default=0))
    samples = tuple(n for micro in micros for n in micro.samples)
    return programs[0], MicroBatch(0, samples, micros[0].layout, lengths, dec_lengths, *rows)


def largest_difference(case: Case, outcomes: Sequence[Any], weights: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any rank's weights from the reference's, relative to the largest value of the weight."""
    worst, where, seen = 0.0, "", set()
    for rank, outcome in enumerate(outcomes):
        for own in outcome.weights:
            place = case.model.ops[own.op]
            module = build_op(place, TensorParallel(own.tp_rank, own.tp_size), own.algo, device="meta")
            whole = weights[f"{own.op}.{own.name}"]
            shard = module.shards[own.name]
            wanted = whole if shard is None else shard(whole)
            scale = max(whole.abs().max().item(), 1e-30)
            difference = (own.values - wanted).abs().max().item() / scale if wanted.numel() else 0.0
            seen.add(f"{own.op}.{own.name}")
            if difference > worst:
                worst, where = difference, f"rank {rank}, {place.name}.{own.name}"
    missing = {name for name in weights if not _is_copy(case, name)} - seen
    if missing:
        raise AssertionError(f"no rank holds {sorted(missing)}")
    return worst, where


def _is_copy(case: Case, name: str) -> bool:
    op, _, parameter = name.partition(".")
    return parameter == "weight" and bool(case.model.ops[int(op)].op.tied_to)


def with_count(case: Case, count: int) -> Case:
    """The case with `count` micro-batches in each iteration of one replica: its own, again and again, each time of other samples."""
    works = []
    for (work,) in case.works:
        micros: list[MicroBatch] = []
        patterns = []
        for index in range(count):
            micro = work.micro_batches[index % len(work.micro_batches)]
            shift = sum(len(one.samples) for one in work.micro_batches) * (index // len(work.micro_batches))
            micros.append(msgspec.structs.replace(micro, index=index, samples=tuple(sample + shift for sample in micro.samples)))
            patterns.append(work.patterns[index % len(work.patterns)])
        schedule = schedule_of(case.plan.schedule, case.plan.num_stages, count, case.plan.num_chunks)
        works.append((ReplicaWork(tuple(micros), schedule, tuple(patterns)),))
    return replace(case, works=tuple(works))
