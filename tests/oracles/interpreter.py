"""All programs of an iteration run for real on numpy arrays, one rank after the other, with blocking sends and no cleverness.

Every tensor that crosses a cut has known values in every row and column of the whole micro-batch; a pass checks that it was given
its own rows and columns of them, and hands its own part of the next on. How a rank's part is cut is written down here once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.models.ops import Model, TensorSpec
from penstock.plans.plan import Plan
from penstock.programs import instructions as i

PARTS = {"qkv": 3, "kv": 2}
"""Tensors whose equal parts tensor parallelism divides one by one."""
DTYPES = {"fp32": np.float32, "int64": np.int64}


def run_programs(programs: Sequence[i.Program], plan: Plan, model: Model) -> dict[str, int]:
    """Runs them to the end; counts of what was done. Fails where anything is not as it should be."""
    return _World(programs, plan, model).run()


def _pieces(count: int, parts: int, index: int) -> tuple[int, int]:
    size = (count + parts - 1) // parts
    return min(count, index * size), min(count, index * size + size)


class _World:
    def __init__(self, programs: Sequence[i.Program], plan: Plan, model: Model) -> None:
        self.programs = {program.rank: program for program in programs}
        self.plan, self.model = plan, model
        self.posted: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
        self.values: dict[tuple[Any, ...], Any] = {}
        self.arrived: set[tuple[Any, ...]] = set()
        self.done: dict[str, int] = defaultdict(int)
        self.sums: dict[tuple[Any, ...], Any] = defaultdict(float)
        self.wanted_sums: dict[tuple[Any, ...], Any] = defaultdict(float)

    def run(self) -> dict[str, int]:
        alive = {rank: self.rank(program) for rank, program in self.programs.items()}
        while alive:
            moved = False
            for rank in list(alive):
                try:
                    moved |= next(alive[rank])
                except StopIteration:
                    del alive[rank]
                    moved = True
            assert moved, f"ranks {sorted(alive)} wait for each other"
        for key, total in self.wanted_sums.items():
            np.testing.assert_allclose(self.sums[key], total, err_msg=str(key))
        return dict(self.done)

    # What the whole micro-batch looks like

    def rows(self, micro: i.MicroBatch, spec: TensorSpec, first: int, last: int) -> int:
        """Rows of samples [first, last)."""
        if spec.dims[0] == "samples":
            return last - first
        lengths, row = (micro.lengths, micro.row_length) if spec.dims[0] == "tokens" else (micro.dec_lengths, micro.dec_row_length)
        return sum(lengths[first:last]) if micro.layout == "packed" else row * (last - first)

    def whole(self, micro: i.MicroBatch, spec: TensorSpec, tag: tuple[Any, ...]) -> Any:
        """Known values of a whole tensor."""
        dims = list(spec.dims)
        if dims and isinstance(dims[0], str):
            dims[0] = self.rows(micro, spec, 0, len(micro.samples))
        seed = abs(hash((tag, spec.name))) % 2**32
        dtype = DTYPES["fp32" if spec.dtype == "compute" else spec.dtype]
        return np.random.default_rng(seed).integers(0, 1000, size=dims).astype(dtype)

    def local(self, micro: i.MicroBatch, spec: TensorSpec, whole: Any, tp: int, dp: int, index: int, parallel: bool) -> Any:
        """What one rank holds of it."""
        share, place = divmod(index, tp)
        if spec.dims and isinstance(spec.dims[0], str):
            bounds = micro.bounds[dp] if dp > 1 else (0, len(micro.samples))
            start = self.rows(micro, spec, 0, bounds[share])
            whole = whole[start : start + self.rows(micro, spec, bounds[share], bounds[share + 1])]
            if parallel and tp > 1 and not spec.split and spec.dims[0] != "samples":
                first, last = _pieces(len(whole), tp, place)
                whole = whole[first:last]
        if spec.split and tp > 1:
            parts = np.split(whole, PARTS.get(spec.name, 1), axis=-1)
            whole = np.concatenate([part[..., slice(*_pieces(part.shape[-1], tp, place))] for part in parts], axis=-1)
        return whole

    def side(self, stage: int, entry: bool) -> tuple[int, int, bool]:
        own = self.plan.stages[stage]
        run = own.run_of(own.first if entry else own.last - 1)
        return run.tp, run.dp, own.sequence_parallel

    def carry(self, cut: int, gradient: bool) -> list[TensorSpec]:
        specs = self.model.ops[self.plan.stages[cut].last - 1].op.carry
        return [spec for spec in specs if spec.differentiable or not gradient]

    def expected(self, program: i.Program, stage: int, cut: int, m: int, gradient: bool, entry: bool) -> dict[str, Any]:
        """The tensors of a cut on a rank."""
        micro, index = program.micro_batches[m], program.place(stage).index
        tp, dp, parallel = self.side(stage, entry)
        found = {}
        for spec in self.carry(cut, gradient):
            tag: tuple[Any, ...] = (program.replica, cut, m, gradient)
            if gradient and (not spec.dims or not isinstance(spec.dims[0], str)) and entry:
                tag += (index // tp,)  # each share has its own part of the sum
            found[spec.name] = self.local(micro, spec, self.whole(micro, spec, tag), tp, dp, index, parallel)
        return found

    # Ranks

    def rank(self, program: i.Program) -> Iterator[bool]:
        rank, buffers = program.rank, {}
        adding: dict[tuple[Any, ...], list[tuple[Any, i.Part]]] = {}
        reduced = set()
        for step in program.instructions:
            self.done[type(step).__name__] += 1
            if isinstance(step, i.Load):
                assert step.buffer not in buffers
                buffers[step.buffer] = ("batch", step.stage, step.micro_batch)
            elif isinstance(step, i.Forward | i.Backward | i.BackwardInput):
                self.compute(program, step, buffers)
            elif isinstance(step, i.SendStart):
                key = (rank, step.peer, step.what, step.cut, step.micro_batch)
                self.values[key] = [self.cut(buffers[step.buffer][part.name], part).copy() for part in step.parts]
                self.post(rank, step.peer, key)
            elif isinstance(step, i.ReceiveStart):
                key = (step.peer, rank, step.what, step.cut, step.micro_batch)
                tensors = buffers.setdefault(step.buffer, {})
                for part in step.parts:
                    tensors.setdefault(part.name, np.full(part.shape, np.nan if part.dtype == "fp32" else -1, DTYPES[part.dtype]))
                adding[key] = [(tensors[part.name], part) for part in step.parts]
                self.post(rank, step.peer, key)
            elif isinstance(step, i.SendWait):
                key = (rank, step.peer, step.what, step.cut, step.micro_batch)
                while key not in self.arrived:
                    yield False
            elif isinstance(step, i.ReceiveWait):
                key = (step.peer, rank, step.what, step.cut, step.micro_batch)
                while key not in self.arrived:
                    yield False
                for (target, part), value in zip(adding.pop(key), self.values.pop(key), strict=True):
                    place = self.cut(target, part)
                    place[...] = place + value if part.add else value
            elif isinstance(step, i.Free):
                for buffer in step.buffers:
                    del buffers[buffer]
            elif isinstance(step, i.ReduceStart):
                reduced.add(step.stage)
            elif isinstance(step, i.ReduceWait):
                assert step.stage in reduced
            elif isinstance(step, i.SyncTied):
                self.share(program, step)
            yield True
        assert not buffers and not adding

    def share(self, program: i.Program, step: i.SyncTied) -> None:
        """Each end of a shared weight ends with the sum over all of them, in every row of its shard."""
        ends = self.tied_stages(step.op)
        for own in {end.own for end in step.receives}:
            total = self.shard(program, step.op, own)
            for other in set(ends) - {own}:
                got = np.full_like(total, np.nan)
                seen: dict[int, int] = defaultdict(int)
                for end in step.receives:
                    if (end.own, end.stage) != (own, other):
                        continue
                    peer = self.programs[end.peer]
                    theirs = next(one for one in peer.instructions if isinstance(one, i.SyncTied) and one.op == step.op)
                    sends = [one for one in theirs.sends if (one.own, one.stage, one.peer) == (other, own, program.rank)]
                    sent = sends[seen[end.peer]]
                    seen[end.peer] += 1
                    value = self.shard(peer, step.op, other)[slice(*(sent.rows or (None, None)))]
                    place = got[slice(*(end.rows or (None, None)))]
                    assert np.isnan(place).all() and place.shape == value.shape
                    place[...] = value
                total = total + got
            whole = sum(self.gradient(program.replica, step.op, stage) for stage in ends)
            np.testing.assert_allclose(total, self.shard(program, step.op, own, whole))

    def tied_stages(self, op: str) -> list[int]:
        places = [place.index for place in self.model.ops if op in (place.name, place.op.tied_to)]
        return [number for number, stage in enumerate(self.plan.stages) if any(stage.first <= at < stage.last for at in places)]

    def gradient(self, replica: int, op: str, stage: int) -> Any:
        return np.random.default_rng([replica, stage]).random(self.model.config["vocab"])

    def shard(self, program: i.Program, op: str, stage: int, whole: Any = None) -> Any:
        """A rank's rows of the gradient of one end."""
        own = self.plan.stages[stage]
        place = next(p for p in self.model.ops[own.first : own.last] if op in (p.name, p.op.tied_to))
        tp = own.run_of(place.index).tp
        values = self.gradient(program.replica, op, stage) if whole is None else whole
        return values[slice(*_pieces(len(values), tp, program.place(stage).index % tp))]

    @staticmethod
    def cut(tensor: Any, part: i.Part) -> Any:
        assert tensor.shape == part.shape
        if part.rows is not None:
            tensor = tensor[slice(*part.rows)]
        return tensor if part.columns is None else tensor[..., slice(*part.columns)]

    def post(self, rank: int, peer: int, key: tuple[Any, ...]) -> None:
        """Transfers of a pair take place in the order in which both ends begin them."""
        mine, its = self.posted[rank, peer], self.posted[peer, rank]
        mine.append(key)
        while mine and its and mine[0] == its[0]:
            self.arrived.add(mine.pop(0))
            its.pop(0)

    def compute(self, program: i.Program, step: i.Forward | i.Backward | i.BackwardInput, buffers: dict[int, Any]) -> None:
        stage, m, gradient = step.stage, step.micro_batch, not isinstance(step, i.Forward)
        if isinstance(step, i.Forward):
            assert buffers[step.batch] == ("batch", stage, m)
        entering, leaving = (stage, stage - 1) if gradient else (stage - 1, stage)
        if 0 <= entering < len(self.plan.stages) - 1:
            self.compare(program, stage, entering, m, gradient, buffers[step.source])
        else:
            assert step.source is None
        if 0 <= leaving < len(self.plan.stages) - 1:
            assert step.result not in buffers
            made = self.expected(program, stage, leaving, m, gradient, entry=gradient)
            assert {(t.name, t.shape) for t in step.tensors} == {(name, value.shape) for name, value in made.items()}
            buffers[step.result] = made
            self.count(program, stage, leaving, m, gradient, made, self.wanted_sums)
        else:
            assert step.result is None

    def count(
        self, program: i.Program, stage: int, cut: int, m: int, gradient: bool, tensors: dict[str, Any], sums: dict[tuple[Any, ...], Any]
    ) -> None:
        """Adds up gradients of tensors without rows, over the shares of the side that has them."""
        tp, _, _ = self.side(stage, entry=sums is self.wanted_sums)
        if not gradient or (sums is self.wanted_sums and program.place(stage).index % tp):
            return
        other = self.side(cut, entry=False)[0] if sums is self.wanted_sums else tp
        for spec in self.carry(cut, True):
            if spec.dims and not isinstance(spec.dims[0], str) and spec.name in tensors:
                for place in range(other) if sums is self.wanted_sums else [program.place(stage).index % tp]:
                    sums[program.replica, cut, m, spec.name, place] = sums[program.replica, cut, m, spec.name, place] + tensors[spec.name]

    def compare(self, program: i.Program, stage: int, cut: int, m: int, gradient: bool, given: dict[str, Any]) -> None:
        expected = self.expected(program, stage, cut, m, gradient, entry=not gradient)
        self.count(program, stage, cut, m, gradient, given, self.sums)
        for name, value in expected.items():
            rows = next(spec for spec in self.carry(cut, gradient) if spec.name == name).dims
            if gradient and not isinstance(rows[0], str):
                continue  # compared as sums
            np.testing.assert_array_equal(given[name], value, err_msg=f"{name} over cut {cut}")
