"""Rules on what programs say of themselves: stages complete on every replica, samples exactly once, loss weights that sum to one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from penstock.errors import plural
from penstock.models.micro_batch import MicroBatch
from penstock.programs.instructions import Place, Program
from penstock.programs.problems import Problem

__all__ = ["header_problems"]

_COMMON = ("iteration", "num_replicas", "num_stages", "loss_tokens", "num_samples", "training", "ends")


def header_problems(programs: Sequence[Program]) -> Iterator[Problem]:
    """Problems of what programs say of themselves: their stages, samples and loss weights. Instructions are not looked at."""
    twice = [rank for rank, count in Counter(program.rank for program in programs).items() if count > 1]
    if twice:
        yield Problem(-1, -1, f"ranks {twice} have more than one program")
    first = programs[0]
    for program in programs[1:]:
        for field in _COMMON:
            mine, its = getattr(program, field), getattr(first, field)
            if mine != its:
                yield Problem(program.rank, -1, f"{field} is {mine}, but {its} on rank {first.rank}")
    for program in programs:
        if program.replica >= program.num_replicas:
            yield Problem(program.rank, -1, f"replica is {program.replica} of {program.num_replicas}")
    yield from _stage_problems(programs)
    yield from _sample_problems(programs)


def _stage_problems(programs: Sequence[Program]) -> Iterator[Problem]:
    """Every replica has every stage, on as many ranks as its degrees want, and the stages follow each other op by op."""
    held: dict[tuple[int, int], list[tuple[int, Place]]] = defaultdict(list)
    for program in programs:
        for place in program.places:
            held[program.replica, place.stage].append((program.rank, place))
            if place.stage >= program.num_stages or place.last <= place.first:
                text = f"stage {place.stage} (ops {place.first}:{place.last}) is none of {program.num_stages} stages with ops"
                yield Problem(program.rank, -1, text)
    ranges: dict[int, tuple[int, int]] = {}
    for (replica, stage), places in sorted(held.items()):
        rank, one = places[0]
        degrees = (one.entry_tp, one.entry_dp, one.exit_tp, one.exit_dp)
        size = one.entry_tp * one.entry_dp
        if any((p.entry_tp, p.entry_dp, p.exit_tp, p.exit_dp) != degrees for _, p in places) or size != one.exit_tp * one.exit_dp:
            yield Problem(rank, -1, f"stage {stage} of replica {replica} has unequal degrees on its ranks")
        elif len(places) != size or sorted(p.index for _, p in places) != list(range(size)):
            text = f"stage {stage} of replica {replica} needs indices 0 to {size - 1} once, has {sorted(p.index for _, p in places)}"
            yield Problem(rank, -1, text)
        for other, place in places:
            if ranges.setdefault(stage, (place.first, place.last)) != (place.first, place.last):
                yield Problem(
                    other, -1, f"stage {stage} has ops {place.first}:{place.last}, elsewhere {ranges[stage][0]}:{ranges[stage][1]}"
                )
    wanted = ((replica, stage) for replica in range(programs[0].num_replicas) for stage in range(programs[0].num_stages))
    for replica, stage in islice((pair for pair in wanted if pair not in held), 1):  # one stands for all, of which there may be many
        yield Problem(-1, -1, f"replica {replica}: no rank has stage {stage}")
    for stage, (first, _) in sorted(ranges.items()):
        before = ranges[stage - 1][1] if stage - 1 in ranges else 0
        if first != before and (stage == 0 or stage - 1 in ranges):
            yield Problem(-1, -1, f"stage {stage} begins at op {first}, but the ops before it end at {before}")


def _sample_problems(programs: Sequence[Program]) -> Iterator[Problem]:
    """Ranks of a replica agree on its micro-batches; every sample of a batch is in one; the loss weights sum to one."""
    tables: dict[int, Program] = {}
    for program in programs:
        first = tables.setdefault(program.replica, program)
        if first.micro_batches is not program.micro_batches and first.micro_batches != program.micro_batches:
            yield Problem(program.rank, -1, f"its micro-batches differ from those of rank {first.rank}, which is of the same replica")
    seen: Counter[tuple[int, int]] = Counter()
    tokens = 0
    for program in tables.values():
        degrees = {dp for place in program.places for dp in (place.entry_dp, place.exit_dp)} - {1}
        if [micro.index for micro in program.micro_batches] != list(range(len(program.micro_batches))):
            yield Problem(program.rank, -1, f"micro-batches are numbered {[micro.index for micro in program.micro_batches]}, not from 0 on")
        if program.ends and (list(program.ends) != sorted({0, *program.ends})[1:] or program.ends[-1] != len(program.micro_batches)):
            text = f"its global batches end after micro-batches {list(program.ends)}"
            yield Problem(program.rank, -1, f"{text}: rising numbers up to {len(program.micro_batches)} are needed")
        for number, micro in enumerate(program.micro_batches):
            seen.update((program.iteration_of(number), sample) for sample in micro.samples)
            problems = list(_micro_batch_problems(micro, degrees))
            yield from (Problem(program.rank, -1, f"micro-batch {micro.index}: {text}") for text in problems)
            tokens += 0 if problems else micro.loss_tokens()
    twice = [sample for (_, sample), count in seen.items() if count > 1]
    if twice:
        yield Problem(-1, -1, f"samples {sorted(twice)[:8]} are in more than one micro-batch, or twice in one")
    if seen.total() != programs[0].num_samples:
        yield Problem(-1, -1, f"the micro-batches have {plural(seen.total(), 'sample')}, but num_samples is {programs[0].num_samples}")
    if tokens != programs[0].loss_tokens:
        weight = f"1/{programs[0].loss_tokens}"
        yield Problem(-1, -1, f"loss weights do not sum to one: {plural(tokens, 'position')} in the loss, each with weight {weight}")


def _micro_batch_problems(micro: MicroBatch, degrees: set[int]) -> Iterator[str]:
    """Finds where a micro-batch contradicts itself, or lacks the shares of ranks for one of these degrees of dp."""
    count = len(micro.samples)
    if not count:
        yield "has no samples"
    for name in ("lengths", "dec_lengths", "counted"):
        if len(getattr(micro, name)) not in (0, count):
            yield f"has {len(getattr(micro, name))} {name} for {count} samples"
            return
    if micro.layout == "padded" and not micro.row_sizes and max(micro.lengths, default=0) > micro.row_length:
        yield f"has a sample of {plural(max(micro.lengths), 'token')} in rows of {micro.row_length}"
    if micro.layout == "padded" and not micro.row_sizes and max(micro.dec_lengths, default=0) > micro.dec_row_length:
        yield f"has a decoder's sample of {plural(max(micro.dec_lengths), 'token')} in rows of {micro.dec_row_length}"
    if micro.layout == "packed" and (micro.row_length or micro.dec_row_length or micro.row_sizes):
        yield "is packed, but has rows"
    if micro.row_sizes and sum(micro.row_sizes) != count:
        yield f"has rows of {plural(sum(micro.row_sizes), 'sample')}, but {plural(count, 'sample')}"
    limits = micro.dec_lengths or micro.lengths
    if micro.counted and limits and any(counted > length for counted, length in zip(micro.counted, limits, strict=True)):
        yield "counts more positions in the loss than a sample has"
    for dp in sorted(degrees - set(micro.bounds)):
        yield f"has no bounds for dp {dp}"
    for dp, bounds in micro.bounds.items():
        if len(bounds) != dp + 1 or bounds[0] != 0 or bounds[-1] != count or any(a > b for a, b in pairwise(bounds)):
            yield f"has bounds {bounds} for dp {dp}: {dp + 1} rising positions from 0 to {count} are needed"
