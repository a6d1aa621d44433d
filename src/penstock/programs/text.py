"""The readable form of a program, one instruction a line, which parses back to the same program.

    penstock-program 1
    program rank 1 iteration 0 replica 0/1 stages 2 loss-tokens 24 samples 2
    place s1 ops 9:17 index 0 entry tp1 dp1 exit tp1 dp1
    micro-batch m0 padded samples 0,1 lengths 12,12 rows 12
    receive-start activation c0 m0 from 0 b0 hidden:fp32[24x32]
    load s1 m0 b1 labels
    receive-wait activation c0 m0 from 0
    forward s1 m0 p0 batch b1 source b0
    free b0 b1

`s` is a stage, `m` a micro-batch, `p` a recomputation pattern, `b` a buffer, `c` the cut after a stage. A part of a tensor is
`name:dtype[SHAPE]@ROWS,COLUMNS`, with `*` for all of them, and a `+` in front where it is added. A `#` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.errors import InputError, near_misses
from penstock.programs import instructions as i
from penstock.programs.words import Unreadable, Words, to_numbers, to_range

__all__ = ["TITLE", "describe", "format_instruction", "format_program", "parse_instruction", "parse_program"]

TITLE = "penstock-program"
_VERSION = 1
Value = TypeVar("Value")
_PART = re.compile(r"(\+?)([^:\[\]@]+):([a-z0-9]+)\[([0-9x]*)\](?:@([0-9:*]+),([0-9:*]+))?")
_TIED = re.compile(r"s(\d+):s(\d+):r(\d+)(?:@(\d+:\d+))?", re.ASCII)


def _numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _range(value: tuple[int, int] | None) -> str:
    return "*" if value is None else f"{value[0]}:{value[1]}"


def _tensor(tensor: i.Tensor) -> str:
    return f"{tensor.name}:{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]"


def _part(part: i.Part) -> str:
    cut = "" if part.rows is None and part.columns is None else f"@{_range(part.rows)},{_range(part.columns)}"
    return f"{'+' if part.add else ''}{part.name}:{part.dtype}[{'x'.join(map(str, part.shape))}]{cut}"


def _part_fields(text: str) -> tuple[str, str, str, tuple[int, ...], str | None, str | None]:
    found = _PART.fullmatch(text)
    if not found:
        raise Unreadable(f"'{text}' is no tensor; expected name:dtype[ROWSxCOLUMNS] or name:dtype[SHAPE]@ROWS,COLUMNS")
    sizes = found[4].split("x") if found[4] else []
    if "" in sizes:
        raise Unreadable(f"'{text}' has a shape with a size missing")
    return found[1], found[2], found[3], tuple(map(int, sizes)), found[5], found[6]


def _to_tensor(text: str) -> i.Tensor:
    plus, name, dtype, shape, rows, _ = _part_fields(text)
    if plus or rows is not None:
        raise Unreadable(f"'{text}' must be a whole tensor")
    return i.Tensor(name, dtype, shape)  # type: ignore[arg-type]


def _to_part(text: str) -> i.Part:
    plus, name, dtype, shape, rows, columns = _part_fields(text)
    ranges = [None if cut in (None, "*") else to_range(cut) for cut in (rows, columns)]
    return i.Part(name, dtype, shape, ranges[0], ranges[1], bool(plus))  # type: ignore[arg-type]


def _buffers(step: i.Forward | i.Backward | i.BackwardInput) -> str:
    source = "" if step.source is None else f" source b{step.source}"
    result = "" if step.result is None else f" result b{step.result}"
    return source + result + "".join(f" {_tensor(tensor)}" for tensor in step.tensors)


def _format_load(step: i.Load) -> str:
    return f"s{step.stage} m{step.micro_batch} b{step.buffer}" + "".join(f" {need}" for need in step.needs)


def _parse_load(words: Words) -> i.Load:
    return i.Load(words.number("s"), words.number("m"), words.number("b"), tuple(words.rest()))  # type: ignore[arg-type]


def _format_forward(step: i.Forward) -> str:
    return f"s{step.stage} m{step.micro_batch} p{step.pattern} batch b{step.batch}{_buffers(step)}"


def _parse_forward(words: Words) -> i.Forward:
    return i.Forward(words.number("s"), words.number("m"), words.number("p"), words.named("batch", "b"), *_parse_buffers(words))


def _parse_buffers(words: Words) -> tuple[int | None, int | None, tuple[i.Tensor, ...]]:
    return words.optional("source", "b"), words.optional("result", "b"), tuple(map(_to_tensor, words.rest()))


def _format_backward(step: i.Backward | i.BackwardInput) -> str:
    return f"s{step.stage} m{step.micro_batch}{_buffers(step)}"


def _parse_backward(words: Words) -> i.Backward:
    return i.Backward(words.number("s"), words.number("m"), *_parse_buffers(words))


def _parse_backward_input(words: Words) -> i.BackwardInput:
    return i.BackwardInput(words.number("s"), words.number("m"), *_parse_buffers(words))


def _format_backward_weight(step: i.BackwardWeight) -> str:
    return f"s{step.stage} m{step.micro_batch}"


def _parse_backward_weight(words: Words) -> i.BackwardWeight:
    return i.BackwardWeight(words.number("s"), words.number("m"))


def _format_start(step: i.SendStart | i.ReceiveStart) -> str:
    toward = "to" if isinstance(step, i.SendStart) else "from"
    parts = " ".join(map(_part, step.parts))
    return f"{step.what} c{step.cut} m{step.micro_batch} {toward} {step.peer} b{step.buffer}{' ' if parts else ''}{parts}"


def _format_wait(step: i.SendWait | i.ReceiveWait) -> str:
    toward = "to" if isinstance(step, i.SendWait) else "from"
    return f"{step.what} c{step.cut} m{step.micro_batch} {toward} {step.peer}"


def _transfer(words: Words, toward: str) -> tuple[Any, int, int, int]:
    return words.word(), words.number("c"), words.number("m"), words.named(toward)


def _start(kind: Callable[..., Any], toward: str) -> Callable[[Words], Any]:
    return lambda words: kind(*_transfer(words, toward), words.number("b"), tuple(map(_to_part, words.rest())))


def _wait(kind: Callable[..., Any], toward: str) -> Callable[[Words], Any]:
    return lambda words: kind(*_transfer(words, toward))


def _format_free(step: i.Free) -> str:
    return " ".join(f"b{buffer}" for buffer in step.buffers)


def _parse_free(words: Words) -> i.Free:
    return i.Free(tuple(words.number("b") for _ in words.words[1:]))


def _format_reduce_start(step: i.ReduceStart) -> str:
    last = "" if step.micro_batch is None else f" during m{step.micro_batch}"
    return f"s{step.stage}{last}{_groups(step)}"


def _groups(step: i.ReduceStart | i.StepStage) -> str:
    return "".join(f" {group.first}:{group.last}@{_numbers(group.ranks)}" for group in step.groups)


def _parse_reduce_start(words: Words) -> i.ReduceStart:
    stage, last = words.number("s"), words.optional("during", "m")
    return i.ReduceStart(stage, _parse_groups(words), last)


def _parse_groups(words: Words) -> tuple[i.ReduceGroup, ...]:
    groups = []
    for word in words.rest():
        ops, at, ranks = word.partition("@")
        groups.append(i.ReduceGroup(*to_range(ops), to_numbers(ranks) if at else ()))
    return tuple(groups)


def _format_step_stage(step: i.StepStage) -> str:
    return f"s{step.stage} m{step.micro_batch}{_groups(step)}"


def _parse_step_stage(words: Words) -> i.StepStage:
    return i.StepStage(words.number("s"), words.number("m"), _parse_groups(words))


def _format_reduce_wait(step: i.ReduceWait) -> str:
    return f"s{step.stage}"


def _parse_reduce_wait(words: Words) -> i.ReduceWait:
    return i.ReduceWait(words.number("s"))


def _format_sync_tied(step: i.SyncTied) -> str:
    sides = (("send", step.sends), ("receive", step.receives))
    ends = [f" {word} {' '.join(map(_tied, side))}" for word, side in sides if side]
    return step.op + "".join(ends)


def _tied(end: i.TiedRows) -> str:
    return f"s{end.own}:s{end.stage}:r{end.peer}" + ("" if end.rows is None else f"@{_range(end.rows)}")


def _parse_sync_tied(words: Words) -> i.SyncTied:
    op = words.word()
    sides: dict[str, list[i.TiedRows]] = {"send": [], "receive": []}
    side = ""
    for word in words.rest():
        found = _TIED.fullmatch(word)
        if word in sides:
            side = word
        elif found and side:
            rows = to_range(found[4]) if found[4] else None
            sides[side].append(i.TiedRows(int(found[1]), int(found[2]), int(found[3]), rows))
        else:
            raise Unreadable(f"expected send or receive and sOWN:sSTAGE:rRANK@FIRST:END, got '{word}'")
    return i.SyncTied(op, tuple(sides["send"]), tuple(sides["receive"]))


_KINDS: dict[str, tuple[type[i.Instruction], Callable[[Any], str], Callable[[Words], i.Instruction]]] = {
    "load": (i.Load, _format_load, _parse_load),
    "forward": (i.Forward, _format_forward, _parse_forward),
    "backward": (i.Backward, _format_backward, _parse_backward),
    "backward-input": (i.BackwardInput, _format_backward, _parse_backward_input),
    "backward-weight": (i.BackwardWeight, _format_backward_weight, _parse_backward_weight),
    "send-start": (i.SendStart, _format_start, _start(i.SendStart, "to")),
    "send-wait": (i.SendWait, _format_wait, _wait(i.SendWait, "to")),
    "receive-start": (i.ReceiveStart, _format_start, _start(i.ReceiveStart, "from")),
    "receive-wait": (i.ReceiveWait, _format_wait, _wait(i.ReceiveWait, "from")),
    "free": (i.Free, _format_free, _parse_free),
    "reduce-start": (i.ReduceStart, _format_reduce_start, _parse_reduce_start),
    "reduce-wait": (i.ReduceWait, _format_reduce_wait, _parse_reduce_wait),
    "sync-tied": (i.SyncTied, _format_sync_tied, _parse_sync_tied),
    "step": (i.Step, lambda step: "", lambda words: i.Step()),
    "step-stage": (i.StepStage, _format_step_stage, _parse_step_stage),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}


def format_instruction(step: i.Instruction) -> str:
    """One line, such as `forward s1 m0 p0 batch b1 source b0`."""
    name = _NAMES[type(step)]
    return f"{name} {_KINDS[name][1](step)}".rstrip()


def parse_instruction(line: str) -> i.Instruction:
    """The instruction that `format_instruction` wrote; raises `Unreadable` or `ValueError`."""
    words = Words(line)
    name = words.word()
    if name not in _KINDS:
        raise Unreadable(f"there is no instruction '{name}'. {near_misses(name, _KINDS)[:-1]}")
    step = _KINDS[name][2](words)
    words.end()
    return _checked(step)


def _checked(value: Value) -> Value:
    """The value, its fields held to their types and limits as those of the binary form are."""
    try:
        return msgspec.convert(msgspec.to_builtins(value), type(value))
    except msgspec.ValidationError as error:
        raise Unreadable(str(error)) from None


def _format_micro_batch(micro: i.MicroBatch) -> str:
    lists = (
        ("samples", micro.samples), ("lengths", micro.lengths), ("dec-lengths", micro.dec_lengths), ("row-sizes", micro.row_sizes),
        ("counted", micro.counted),
    )  # fmt: skip
    text = f"micro-batch m{micro.index} {micro.layout}" + "".join(f" {name} {_numbers(values)}" for name, values in lists if values)
    if micro.row_length or micro.dec_row_length:
        text += f" rows {micro.row_length},{micro.dec_row_length}"
    return text + "".join(f" dp{dp} {_numbers(bounds)}" for dp, bounds in micro.bounds.items())


def _parse_micro_batch(words: Words) -> i.MicroBatch:
    index, layout = words.number("m"), words.word()
    names = ("samples", "lengths", "dec-lengths", "row-sizes", "counted", "rows")
    samples, lengths, dec_lengths, row_sizes, counted, rows = map(words.numbers_after, names)
    if len(rows) not in (0, 2):
        raise Unreadable("expected two lengths after 'rows', the encoder's and the decoder's (0 for none)")
    row, dec_row = rows or (0, 0)
    bounds: dict[int, tuple[int, ...]] = {}
    while words.peek():
        dp = words.number("dp")
        bounds[dp] = to_numbers(words.word())
    return i.MicroBatch(index, samples, layout, lengths, dec_lengths, row, dec_row, row_sizes, counted, bounds)  # type: ignore[arg-type]


def _format_place(place: i.Place) -> str:
    degrees = f"entry tp{place.entry_tp} dp{place.entry_dp} exit tp{place.exit_tp} dp{place.exit_dp}"
    return f"place s{place.stage} ops {place.first}:{place.last} index {place.index} {degrees}"


def _parse_place(words: Words) -> i.Place:
    stage = words.number("s")
    words.keyword("ops")
    first, last = to_range(words.word())
    index = words.named("index")
    words.keyword("entry")
    entry = words.number("tp"), words.number("dp")
    words.keyword("exit")
    return i.Place(stage, first, last, index, *entry, words.number("tp"), words.number("dp"))


def _format_head(program: i.Program) -> str:
    p, several = program, f" ends {','.join(map(str, program.ends))}" if program.ends else ""
    return (
        f"program rank {p.rank} iteration {p.iteration} replica {p.replica}/{p.num_replicas} stages {p.num_stages} "
        f"loss-tokens {p.loss_tokens} samples {p.num_samples}{'' if p.training else ' evaluation'}{several}"
    )


def _parse_head(words: Words) -> dict[str, Any]:
    head: dict[str, Any] = {"rank": words.named("rank"), "iteration": words.named("iteration")}
    words.keyword("replica")
    replica, _, replicas = words.word().partition("/")
    if not (replica.isascii() and replica.isdigit() and replicas.isascii() and replicas.isdigit()):
        raise Unreadable("expected NUMBER/NUMBER after 'replica'")
    head |= {"replica": int(replica), "num_replicas": int(replicas), "num_stages": words.named("stages")}
    head |= {"loss_tokens": words.named("loss-tokens"), "num_samples": words.named("samples")}
    head["training"] = words.peek() != "evaluation"
    if not head["training"]:
        words.word()
    if words.peek() == "ends":
        words.word()
        head["ends"] = to_numbers(words.word())
    return head


def format_program(program: i.Program) -> str:
    """The whole program, a line for each instruction."""
    lines = [f"{TITLE} {_VERSION}", _format_head(program), *map(_format_place, program.places)]
    lines += [*map(_format_micro_batch, program.micro_batches), *map(format_instruction, program.instructions)]
    return "\n".join(lines) + "\n"


def parse_program(text: str, where: str = "the program") -> i.Program:
    """The program that `format_program` wrote, or a person; `where` names it in the error."""
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line]
    title = lines[0][1].split() if lines else []
    if len(title) != 2 or title[0] != TITLE or not (title[1].isascii() and title[1].isdigit()):
        raise InputError(f"{where} is not a program: its first line is not '{TITLE} {_VERSION}'.")
    if int(title[1]) > _VERSION:
        raise InputError(f"{where} has version {title[1]}, but this Penstock reads versions up to {_VERSION}. Update Penstock.")
    head: dict[str, Any] = {}
    places: list[i.Place] = []
    micro_batches: list[i.MicroBatch] = []
    steps: list[i.Instruction] = []
    for number, line in lines[1:]:
        try:
            _read_line(line, head, places, micro_batches, steps)
        except (Unreadable, ValueError) as error:  # ValueError: a number of thousands of digits
            raise InputError(f"{where}, line {number}: '{line}' cannot be read: {error}.") from None
    if not head:
        raise InputError(f"{where} has no line that begins with 'program rank'.")
    return i.Program(**head, places=tuple(places), micro_batches=tuple(micro_batches), instructions=tuple(steps))


def _read_line(
    line: str, head: dict[str, Any], places: list[i.Place], micro_batches: list[i.MicroBatch], steps: list[i.Instruction]
) -> None:
    words = Words(line)
    name = words.peek()
    if name not in ("program", "place", "micro-batch"):
        steps.append(parse_instruction(line))
        return
    words.word()
    if name == "program":
        if head:
            raise Unreadable("there is a second line 'program'")
        head |= _parse_head(words)
        _checked(i.Program(**head, places=(), micro_batches=(), instructions=()))
    elif name == "place":
        places.append(_checked(_parse_place(words)))
    else:
        micro_batches.append(_checked(_parse_micro_batch(words)))
    words.end()


def describe(step: i.Instruction) -> str:
    """`forward of stage 1, micro-batch 3`, for people who read errors."""
    name = format_instruction(step).split(" ", 1)[0]
    stage, micro_batch, peer = i.stage_of(step), getattr(step, "micro_batch", None), getattr(step, "peer", None)
    where = [f"stage {stage}"] if stage >= 0 else []
    where += [f"micro-batch {micro_batch}"] if micro_batch is not None else []
    where += [f"with rank {peer}"] if peer is not None else []
    return f"{name} of {', '.join(where)}" if where else name
