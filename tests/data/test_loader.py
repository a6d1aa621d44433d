"""Planning joined to training: the same programs inline and from planners, each rank's own samples, and planners that fail."""

from __future__ import annotations

import json
import multiprocessing.synchronize
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data.faulty_planner import TIMES_LOST, FaultyPlanner, start_and_die
from stores.conftest import require_redis

from penstock.batching.example import small_costs
from penstock.data import open_data
from penstock.data.batches import GlobalBatch
from penstock.data.bundled import bundled_files
from penstock.data.dataset import DataSet
from penstock.data.forms import form_of
from penstock.data.images import prepare_images
from penstock.data.indexed import IndexedWriter
from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.loader import ProgramLoader
from penstock.data.manifest import DataManifest, DataSplit, TaskRange, write_manifest
from penstock.data.planners import BatchSource, PlannerPool, entries_of, open_entry
from penstock.data.planning import PlanningError, ProgramPlanner, sample_ids
from penstock.data.samples import Samples, _shares
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.errors import InputError
from penstock.models.catalog import model_from_mapping
from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.batch import Batch
from penstock.models.ops import Model
from penstock.models.shapes import Layout
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.processes.fork_server import FORKED, warm_up
from penstock.programs.binary import encode
from penstock.programs.instructions import Place, Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.source import load_share
from penstock.schedules.rules import schedule_of
from penstock.stores import Job, StoreError
from penstock.stores.server import start_redis
from penstock.stores.tcp_server import TcpServer

LIMITS = (30, 20)
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 8, "heads": 4, "seq_length": 64, "vocab": 600},
    "t5": {"layers": 1, "hidden": 8, "heads": 4, "head_width": 2, "ffn": 12, "seq_length": 64, "dec_length": 64, "vocab": 600},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bundled"
    prepare_text(TextRequest(tuple(bundled_files()), path, train_tokenizer=600))
    return path


def make_planner(folder: Path, family: str = "gpt", dp: int = 1, replicas: int = 1, **options: Any) -> ProgramPlanner:
    """Two stages, the second with `dp` ranks in each replica."""
    model = model_from_mapping({"family": family, "dtype": "fp32", **SIZES[family]}, "test", family)
    cut, size = model.num_ops // 2, 1 + dp
    devices = [[tuple(range(r * size, r * size + 1)), tuple(range(r * size + 1, (r + 1) * size))] for r in range(replicas)]
    first, second = (tuple(own[stage] for own in devices) for stage in (0, 1))
    stages = Stage(0, cut, first, Degrees(1, 1)), Stage(cut, model.num_ops, second, Degrees(1, dp))
    plan = Plan("test", "cpu", 1, stages, MicroBatching(policy="dynamic"), replicas, "1f1b")
    layouts = ("padded",) if family == "t5" else ("padded", "packed")
    costs = small_costs(2, replicas, layouts=layouts, has_decoder=family == "t5")  # type: ignore[arg-type]
    return ProgramPlanner(plan, model, costs, form_of(model, open_data(folder)), **options)


def make_source(folder: Path, num_steps: int | None = 6, **options: Any) -> BatchSource:
    return BatchSource(str(folder), limits=Limits(LIMITS), num_steps=num_steps, **{"samples_per_batch": 24, **options})


def inline(folder: Path, planner: ProgramPlanner, num_steps: int = 6) -> dict[int, list[bytes]]:
    """The programs of every rank, planned here."""
    source = make_source(folder, num_steps)
    return {rank: [encode(program) for _, program in ProgramLoader(source, planner, rank, planners=0)] for rank in planner.plan.ranks}


def as_batch(source: Any, program: Program, micro: MicroBatch, bounds: tuple[int, int], needs: tuple[str, ...]) -> Batch | None:
    """The tensors that the runtime makes of samples."""
    return load_share(source, program, micro, bounds, needs, torch.device("cpu"), 0)


@pytest.mark.parametrize(("family", "dp", "replicas"), [("gpt", 1, 1), ("gpt", 2, 2), ("t5", 2, 1), ("t5", 1, 2)])
def test_ranks_hold_their_own_samples_which_make_up_the_batch(folder: Path, family: str, dp: int, replicas: int) -> None:
    planner, source = make_planner(folder, family, dp, replicas), make_source(folder, 2)
    data, batches = source.open()
    iterators = {rank: iter(ProgramLoader(source, planner, rank, planners=0)) for rank in planner.plan.ranks}
    for step in range(2):
        seen: dict[int, list[int]] = {0: [], 1: []}
        weight, labels = 0.0, []
        for rank in planner.plan.ranks:
            own = next(iterators[rank])
            micro_batches, program = own
            (place,) = program.places
            needs = ("inputs",) if place.stage == 0 else ("dec_inputs", "labels") if family == "t5" else ("labels",)
            for loaded in micro_batches:
                first, last = bounds = loaded.micro.share(place.entry_dp, place.entry_share)
                assert set(loaded.samples) == set(loaded.micro.samples[first:last])  # no other rank's
                batch = as_batch(own, program, loaded.micro, bounds, needs)
                if batch is None:
                    continue
                seen[place.stage] += loaded.micro.samples[first:last]
                assert batch.shape == loaded.micro.shape(place.entry_dp, place.entry_share) and batch.step == step
                if batch.weights is not None and batch.labels is not None:
                    weight += float(batch.weights.sum())
                    labels += batch.labels[batch.weights > 0].tolist()
        batch_ids = sample_ids(batches[step], len(data))
        assert sorted(seen[0]) == sorted(seen[1]) == sorted(batch_ids)
        assert weight == pytest.approx(1.0, abs=1e-5)
        targets = [data[sample % len(data)]["target"][: LIMITS[1]] for sample in batch_ids]
        assert sorted(labels) == sorted(token for target in targets for token in target.tolist())


def hand_made(planner: ProgramPlanner, data: DataSet, batch: GlobalBatch, layout: Layout) -> tuple[Program, ...]:
    """Programs of micro-batches of eight samples each, in the order in which they come."""
    own, _ = planner.form.positions(batch.lengths)
    ids, micro_batches = sample_ids(batch, len(data)), []
    for start in range(0, len(ids), 8):
        lengths = tuple(own[start : start + 8].tolist())
        counted = tuple(
            planner.form.counted(int(n), length, 0) for n, length in zip(batch.lengths[start : start + 8, 0], lengths, strict=True)
        )
        row = max(lengths) + 3 if layout == "padded" else 0
        micro_batches.append(MicroBatch(len(micro_batches), tuple(ids[start : start + 8]), layout, lengths, (), row, counted=counted))
    work = ReplicaWork(tuple(micro_batches), schedule_of("1f1b", 2, len(micro_batches)))
    return lower(planner.plan, planner.model, [work], batch.step)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_decoder_reads_each_token_and_predicts_the_next(folder: Path, layout: Layout) -> None:
    planner, (data, batches) = make_planner(folder), make_source(folder).open()
    programs = hand_made(planner, data, batches[0], layout)
    samples, program = Samples(data, planner.form, Limits(LIMITS)), programs[1]
    assert all(loaded.samples for one in programs for loaded in samples.load(one, planner.plan).micro_batches)
    for micro in program.micro_batches:
        ids, labels = (as_batch(samples, program, micro, (0, len(micro.samples)), (need,)) for need in ("inputs", "labels"))
        assert ids is not None and labels is not None and labels.labels is not None and labels.weights is not None
        at = 0
        for identity, length in zip(micro.samples, micro.lengths, strict=True):
            sample = data[identity % len(data)]
            prompt = sample["input"][: LIMITS[0]]
            tokens = np.concatenate([prompt, sample["target"][: LIMITS[1]]])
            assert ids.side("own").ids[at : at + length].tolist() == tokens[:-1].tolist()
            assert labels.labels[at : at + length].tolist() == tokens[1:].tolist()
            counts = (labels.weights[at : at + length] * program.loss_tokens).round().int().tolist()
            assert counts == [0] * (len(prompt) - 1) + [1] * (len(tokens) - len(prompt))
            at += length if layout == "packed" else micro.row_length


def test_an_encoder_reads_the_input_and_a_decoder_the_target_shifted(folder: Path) -> None:
    planner, source, data = make_planner(folder, "t5"), make_source(folder, 1), open_data(folder)
    iteration = next(iter(ProgramLoader(source, planner, 1, planners=0)))
    for loaded in iteration.micro_batches:
        batch = as_batch(iteration, iteration.program, loaded.micro, (0, len(loaded.micro.samples)), ("inputs", "dec_inputs", "labels"))
        assert batch is not None and batch.labels is not None
        for row, identity in enumerate(loaded.micro.samples):
            sample = data[identity % len(data)]
            source_ids, target = sample["input"][: LIMITS[0]].tolist(), sample["target"][: LIMITS[1]].tolist()
            own = batch.side("own").ids.reshape(-1, loaded.micro.row_length)[row].tolist()
            dec = batch.side("decoder").ids.reshape(-1, loaded.micro.dec_row_length)[row].tolist()
            out = batch.labels.reshape(-1, loaded.micro.dec_row_length)[row].tolist()
            assert own == source_ids + [0] * (len(own) - len(source_ids))
            assert dec == [0, *target[:-1]] + [0] * (len(dec) - len(target))
            assert out == target + [0] * (len(out) - len(target))


def fixed_plan(model: Model, samples: int) -> Plan:
    """One stage on two ranks, which divide the samples of each micro-batch."""
    return Plan(
        "test", "cpu", 1, (Stage(0, model.num_ops, ((0, 1),), Degrees(1, 2)),), MicroBatching("padded", "fixed", samples), 1, "1f1b"
    )


def test_micro_batches_that_the_plan_fixes(folder: Path) -> None:
    """With labels of the target alone, in rows as long as the longest of each micro-batch."""
    dynamic = make_planner(folder)
    planner = replace(dynamic, costs=None, plan=fixed_plan(dynamic.model, 5))
    data, batches = make_source(folder).open()
    programs = planner.programs(data, batches[0])
    assert [len(micro.samples) for micro in programs[0].micro_batches] == [5, 5, 5, 5, 4]
    assert [identity for micro in programs[0].micro_batches for identity in micro.samples] == batches[0].samples.tolist()
    assert all(micro.row_length == max(micro.lengths) for micro in programs[0].micro_batches)
    two_sided = make_planner(folder, "t5")
    planned = replace(two_sided, costs=None, plan=fixed_plan(two_sided.model, 5)).batch_plan(data, batches[0])
    micros = [micro for replica in planned.replicas for micro in replica.micro_batches]
    assert all((micro.row_length, micro.dec_row_length) == (max(micro.lengths), max(micro.dec_lengths)) for micro in micros)
    assert any(micro.row_length != micro.dec_row_length for micro in micros)
    with pytest.raises(InputError, match="costs are needed"):
        replace(dynamic, costs=None)


def test_each_batch_is_searched_from_a_seed_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same in every process, whichever batches it plans."""
    asked: list[Any] = []
    monkeypatch.setattr("penstock.batching.planner.plan_batch", lambda samples, costs, **options: asked.append(options))
    planner, (data, batches) = make_planner(folder, seed=5, search_steps=7, too_long="truncate"), make_source(folder).open()
    for step in (3, 0):
        planner.batch_plan(data, batches[step])
    assert asked == [{"steps": 7, "seed": seed, "too_long": "truncate"} for seed in (8, 5)]


def test_a_rank_reads_its_share_wherever_degrees_change() -> None:
    """The last of four ranks: a quarter at the entry, half inside, where it is one of two tensor-parallel ranks, and all at the exit."""
    stage = Stage(0, 9, ((0, 1, 2, 3),), Degrees(1, 4), (OpRun(3, 6, 2, 2), OpRun(6, 9, 4, 1)))
    assert set(_shares(Place(0, 0, 9, 3, 1, 4, 4, 1), stage)) == {(4, 3), (2, 1), (1, 0)}
    assert set(_shares(Place(0, 0, 9, 1, 1, 4, 4, 1), replace(stage, runs=()))) == {(4, 1), (1, 0)}


def test_unequal_shares_that_the_plan_fixes(folder: Path) -> None:
    """Every replica gets its own number of micro-batches, in the order of samples; a batch cut short keeps the proportion."""
    dynamic = make_planner(folder)
    stage = Stage(0, dynamic.model.num_ops, ((0,), (1,), (2,)))
    plan = Plan("test", "cpu", 24, (stage,), MicroBatching("padded", "fixed", 4, per_replica=(3, 1, 2)), 3, "1f1b")
    planner = replace(dynamic, costs=None, plan=plan)
    data, batches = make_source(folder).open()
    programs = planner.programs(data, batches[0])
    assert [[len(micro.samples) for micro in program.micro_batches] for program in programs] == [[4, 4, 4], [4], [4, 4]]
    assert [n for program in programs for micro in program.micro_batches for n in micro.samples] == batches[0].samples.tolist()
    data, batches = make_source(folder, samples_per_batch=12).open()
    fewer = planner.programs(data, batches[0])
    assert [sum(len(micro.samples) for micro in program.micro_batches) for program in fewer] == [6, 2, 4]


def whole_batches(folder: Path, model: Model, samples: int, limits: Limits = NO_LIMITS) -> tuple[list[Batch], DataSet]:
    """All shares of all micro-batches of one global batch, as tensors, with the data."""
    data = open_data(folder)
    planner = ProgramPlanner(fixed_plan(model, samples), model, None, form_of(model, data))
    source, found = BatchSource(str(folder), samples_per_batch=samples + 3, num_steps=1, limits=limits), []
    for rank in (0, 1):
        for iteration in ProgramLoader(source, planner, rank, planners=0):
            for loaded in iteration.micro_batches:
                batch = as_batch(iteration, iteration.program, loaded.micro, loaded.micro.share(2, rank), ("inputs", "labels"))
                found += [batch] if batch is not None else []
    return found, data


def test_images(tmp_path: Path) -> None:
    records = np.random.default_rng(0).integers(0, 256, (9, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    prepare_images([tmp_path / "data_batch_1.bin"], tmp_path / "out", (1.0, 0.0, 0.0))
    sizes = {"blocks": (1, 1), "base_width": 4, "num_classes": 10, "image_size": 32}
    found, _ = whole_batches(tmp_path / "out", model_from_mapping({"family": "resnet", "dtype": "fp32", **sizes}, "test", "resnet"), 6)
    pairs = []
    for batch in found:
        assert batch.images is not None and batch.targets is not None and batch.images.dtype == torch.float32
        pixels = ((batch.images + 1) * 127.5).round().to(torch.uint8).numpy()
        pairs += [bytes([int(label)]) + image.tobytes() for label, image in zip(batch.targets, pixels, strict=True)]
    assert sorted(pairs) == sorted(record.tobytes() for record in records)
    assert sum(float(batch.weights.sum()) for batch in found if batch.weights is not None) == pytest.approx(1.0)


@pytest.mark.parametrize("longest", [24, 8])
def test_masked_tokens(tmp_path: Path, longest: int) -> None:
    """Written as `prepare_bert` writes them, since h5py may not be there; what was masked behind a cut counts no more."""
    rng, count = np.random.default_rng(0), 7
    samples = []
    with ExitStack() as stack:
        parts = ("input", "segments", "masked_positions", "masked_ids")
        writers = [stack.enter_context(IndexedWriter(tmp_path / f"train_{part}", "uint16")) for part in parts]
        for _ in range(count):
            length = int(rng.integers(5, 20))
            places = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
            samples.append((rng.integers(0, 13, length), rng.integers(0, 2, length), places, rng.integers(0, 13, 3)))
            for writer, values in zip(writers, samples[-1], strict=True):
                writer.add(values)
    follows = rng.integers(0, 2, count)
    np.save(tmp_path / "train_labels.npy", follows)
    write_manifest(tmp_path, DataManifest("bert", ["input"], {"train": DataSplit(count, {}, [TaskRange("bert", 0, count)])}, 13))
    sizes = {"layers": 1, "hidden": 8, "heads": 4, "ffn": 12, "seq_length": 24, "vocab": 13}
    model = model_from_mapping({"family": "bert", "dtype": "fp32", **sizes}, "test", "bert")
    found, data = whole_batches(tmp_path, model, 4, Limits((longest,)))
    assert any(longest in places for _, _, places, _ in samples) == (longest == 8)
    seen = []
    for batch in found:
        own = batch.side("own")
        assert own.types is not None and batch.labels is not None and batch.weights is not None and batch.next_sentence is not None
        rows = [tensor.reshape(own.num_rows, -1) for tensor in (own.ids, own.types, batch.labels, batch.weights)]
        for row, (identity, length) in enumerate(zip(own.samples.tolist(), own.lengths, strict=True)):
            ids, types, places, masked = samples[identity % len(data)]
            assert length == min(len(ids), longest)
            assert rows[0][row, :length].tolist() == ids[:longest].tolist() and rows[1][row, :length].tolist() == types[:longest].tolist()
            counted = rows[3][row].nonzero()[:, 0].tolist()
            assert counted == places[places < longest].tolist() and rows[2][row, counted].tolist() == masked[places < longest].tolist()
            assert int(batch.next_sentence[row]) == follows[identity % len(data)]
            seen.append(identity)
    assert sorted(seen) == sorted(range(count))
    assert sum(float(batch.weights.sum()) for batch in found if batch.weights is not None) == pytest.approx(1.0)


def test_a_small_data_set_fills_a_batch_more_than_once(folder: Path) -> None:
    planner, source = make_planner(folder), make_source(folder, 1, split="validation", samples_per_batch=200)
    data, batches = source.open()
    assert len(data) < 200
    ids = sample_ids(batches[0], len(data))
    assert len(set(ids)) == 200 and [identity % len(data) for identity in ids] == batches[0].samples.tolist()
    programs = planner.programs(data, batches[0])
    assert programs[0].num_samples == 200
    samples = Samples(data, planner.form)
    for place in range(3):
        first, again = (samples.sample(0, identity, 5, 0) for identity in (place, place + 2 * len(data)))
        assert first.inputs.tolist() == again.inputs.tolist() and first.labels.tolist() == again.labels.tolist()


KEY = bytes(32)


@pytest.fixture
def server() -> Iterator[TcpServer]:
    with TcpServer(KEY) as served:
        yield served


def run_ranks(
    source: BatchSource, planner: ProgramPlanner, server: TcpServer, pace_s: float = 0.0, **options: Any
) -> tuple[dict[int, list[bytes]], int]:
    """All ranks as threads, with planners as processes; the programs of each, and how many planners were replaced."""
    job = Job("job", KEY, len(planner.plan.ranks), capacity=3, first=options.get("first_step", 0))
    address = f"tcp://127.0.0.1:{server.port}"
    loaders = {rank: ProgramLoader(source, planner, rank, address=address, job=job, timeout=250, **options) for rank in planner.plan.ranks}

    def run(rank: int) -> list[bytes]:
        found, coming = list[bytes](), None
        for loaded in loaders[rank]:
            assert coming is None or coming is loaded
            found.append(encode(loaded.program))
            coming = loaders[rank].coming()
            while coming is None and len(found) == 1:  # once it is seen for sure before it is asked for
                time.sleep(0.01)
                coming = loaders[rank].coming()
        return found

    try:
        with ThreadPoolExecutor(len(loaders)) as pool:
            found = dict(zip(loaders, pool.map(run, loaders, timeout=250), strict=True))
        pool_of_first = loaders[0].pool
        return found, pool_of_first.num_replaced if pool_of_first else 0
    finally:
        for loader in loaders.values():
            loader.close()


def test_planners_give_what_planning_inline_gives(folder: Path, server: TcpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run that resumes at iteration 2, with logs and dumps asked for."""
    for name, value in (("PENSTOCK_LOG_LEVEL", "debug"), ("PENSTOCK_LOG_DIR", tmp_path / "logs"), ("PENSTOCK_DUMP", tmp_path / "dump")):
        monkeypatch.setenv(name, str(value))
    planner = make_planner(folder, replicas=2)
    counting = FaultyPlanner(planner.plan, planner.model, planner.costs, planner.form, counts=str(tmp_path / "planned"))
    found, replaced = run_ranks(make_source(folder), counting, server, planners=2, first_step=2)
    assert sorted((tmp_path / "planned").read_bytes()) == [2, 3, 4, 5]  # once, though dumped
    assert found == {rank: programs[2:] for rank, programs in inline(folder, planner).items()} and replaced == 0
    logs = "".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))
    assert [logs.count(f"iteration {step} planned in") for step in range(6)] == [0, 0, 1, 1, 1, 1]  # each once
    dumps = [json.loads(path.read_text()) for path in sorted((tmp_path / "dump").glob("*.json"))]
    assert [dump["step"] for dump in dumps] == [2, 3, 4, 5] and len(dumps[0]["lengths"]) == dumps[0]["samples"] == 24
    assert sum(len(micro["samples"]) for replica in dumps[0]["plan"]["replicas"] for micro in replica["micro_batches"]) == 24
    written = {path.name for path in (tmp_path / "dump" / "iteration-000002").iterdir()}
    assert written >= {"lengths.csv", "shapes.csv", "memory.csv", "schedule.txt", "trace.json"} and any("rank" in name for name in written)


def test_a_planner_that_hangs_is_replaced(folder: Path, server: TcpServer, tmp_path: Path) -> None:
    planner = make_planner(folder)
    faulty = FaultyPlanner(planner.plan, planner.model, planner.costs, planner.form, step=3, way="hang", once=str(tmp_path / "failed"))
    expected = inline(folder, planner)  # first, so that no planner is taken for hanging while it compiles
    found, replaced = run_ranks(make_source(folder), faulty, server, hang_s=4.0)
    assert found == expected and replaced >= 1 and (tmp_path / "failed").exists()


def test_planners_and_a_redis_server_are_killed_and_training_goes_on(folder: Path) -> None:
    require_redis()
    planner, num_steps = make_planner(folder), 40
    source, expected = make_source(folder, num_steps), inline(folder, planner, num_steps)
    servers, job, told = [start_redis()], Job.new(2, capacity=3), list[tuple[int, str]]()

    def restart() -> None:
        servers[-1].process.kill()
        servers[-1].process.wait()
        servers.append(start_redis(servers[0].host, servers[0].port, password=servers[0].password))

    def run(loader: ProgramLoader) -> list[bytes]:
        got = []
        for step, (_, program) in enumerate(loader):
            if loader.rank == 0 and step in (5, 20):
                for pid in pool.process_ids:
                    os.kill(pid, signal.SIGKILL if step == 5 else signal.SIGSTOP)
            if loader.rank == 0 and step in (12, 30):
                restart()
            got.append(encode(program))
        return got

    try:
        with ThreadPoolExecutor(2) as threads, PlannerPool(source, planner, servers[0].address, job) as pool:
            pool.on_replaced = lambda step, text: told.append((step, text))
            options: dict[str, Any] = {"address": servers[0].address, "job": job, "starts_planners": False, "timeout": 250}
            futures = [threads.submit(run, ProgramLoader(source, planner, rank, **options)) for rank in (0, 1)]
            assert {rank: future.result(250) for rank, future in enumerate(futures)} == expected
            assert pool.num_replaced == 2 and len(servers) == 3
            assert [text.partition(" at ")[0] for _, text in told] == [
                f"planner 0 {how}, and another plans in its place" for how in ("died with status -9", "hung")
            ]
    finally:
        for server in servers:
            server.stop()


def test_a_batch_at_which_planners_always_die_is_named(folder: Path, server: TcpServer) -> None:
    planner = make_planner(folder)
    faulty = FaultyPlanner(planner.plan, planner.model, planner.costs, planner.form, step=2)
    with pytest.raises(
        PlanningError, match=r"iteration 2 cannot be planned: its planner died with status 9, 3 times\. Its samples are \d+, "
    ):
        run_ranks(make_source(folder), faulty, server)


def test_a_planner_that_loses_its_store_again_and_again_is_replaced_each_time(folder: Path, server: TcpServer, tmp_path: Path) -> None:
    """No fault of the iteration that it was at."""
    planner = make_planner(folder)
    faulty = FaultyPlanner(planner.plan, planner.model, planner.costs, planner.form, step=2, way="no store", once=str(tmp_path / "lost"))
    found, replaced = run_ranks(make_source(folder), faulty, server)
    assert found == inline(folder, planner) and replaced == TIMES_LOST == (tmp_path / "lost").stat().st_size


def test_a_batch_that_does_not_fit_names_its_samples(folder: Path, server: TcpServer) -> None:
    planner = replace(make_planner(folder), costs=small_costs(2, limit_bytes=150.0, has_decoder=False))
    _, batches = make_source(folder).open()
    names = ", ".join(map(str, sample_ids(batches[0], 10**6)[:5]))
    for planners in (0, 1):
        with pytest.raises(PlanningError, match=f"iteration 0 cannot be planned: .*Its samples are {names}, "):
            run_ranks(make_source(folder), planner, server, planners=planners)


class BrokenPlanner(ProgramPlanner):
    """Has a fault of its own."""

    def batch_plan(self, data: DataSet, batch: GlobalBatch) -> Any:
        raise KeyError("padded")


def test_a_fault_of_the_planner_reaches_every_rank(folder: Path) -> None:
    planner = make_planner(folder)
    broken = BrokenPlanner(planner.plan, planner.model, planner.costs, planner.form)
    entries, told = entries_of(broken, *make_source(folder).open(), 3)
    assert sorted(entries) == [0, 1] and "KeyError: 'padded'" in str(told)
    for entry in entries.values():
        with pytest.raises(PlanningError, match=r"iteration 3 cannot be planned: KeyError: 'padded'\. Its samples are \d+, "):
            open_entry(entry, "test")
    with pytest.raises(StoreError, match="neither a program nor a failure"):
        open_entry(b"x", "test")


def test_planners_need_nothing_that_has_a_name_in_memory(folder: Path, server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A semaphore would stay for good where all processes of a run are killed at once, as with a container."""
    monkeypatch.setattr(multiprocessing.synchronize, "SemLock", lambda *_, **__: pytest.fail("a semaphore"))
    job, address = Job("job", KEY, 1), f"tcp://127.0.0.1:{server.port}"
    with PlannerPool(make_source(folder), make_planner(folder), address, job) as pool:
        assert pool.process_ids


def test_planners_end_with_the_process_that_started_them(folder: Path, server: TcpServer, tmp_path: Path) -> None:
    """Also with one that is killed: a process starts a planner, tells its id, and kills itself."""
    job, address = Job("job", KEY, 2), f"tcp://127.0.0.1:{server.port}"
    warm_up()
    receiver, sender = FORKED.Pipe(duplex=False)
    starter = FORKED.Process(target=start_and_die, args=(make_source(folder, None), make_planner(folder), address, job, sender))
    starter.start()
    assert receiver.poll(250)
    pid = receiver.recv()
    starter.join()
    while Path(f"/proc/{pid}").exists():  # until the test's time-out
        time.sleep(0.1)


def test_a_run_goes_on_where_it_was(folder: Path) -> None:
    planner = make_planner(folder)
    whole = inline(folder, planner)[0]
    resumed = ProgramLoader(make_source(folder), planner, 0, planners=0, first_step=4)
    assert [encode(program) for _, program in resumed] == whole[4:]
    assert resumed.state_dict()["step"] == 6
    by_tokens = make_source(folder, samples_per_batch=None, tokens_per_batch=400)
    loader = ProgramLoader(by_tokens, planner, 0, planners=0)
    expected = [encode(program) for _, program in loader]
    state = loader.batches.state(4)
    resumed = ProgramLoader(replace(by_tokens, state=state), planner, 0, planners=0, first_step=4)
    assert sorted(resumed.batches._starts) == [0, 4] and [encode(program) for _, program in resumed] == expected[4:]


def test_what_cannot_be_loaded(folder: Path) -> None:
    planner, source = make_planner(folder), make_source(folder)
    wrong = (
        ({"rank": 7, "planners": 0}, "no rank 7"), ({"rank": 0}, "set PENSTOCK_STORE and"), ({"rank": 0, "planners": -1}, "no sense"),
        ({"rank": 0, "job": Job.new(2, first=3), "address": "memory:"}, "begins at iteration 3"),
    )  # fmt: skip
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            ProgramLoader(source, planner, **options)  # type: ignore[arg-type]
    small = model_from_mapping({"family": "gpt", "dtype": "fp32", **SIZES["gpt"], "vocab": 100}, "test", "gpt")
    with pytest.raises(InputError, match="vocabulary of 600, model 'gpt' of 100"):
        form_of(small, open_data(folder))


def test_a_store_that_is_gone_ends_the_wait(folder: Path) -> None:
    job = Job.new(2)
    with TcpServer(job.key) as server:
        address = f"tcp://127.0.0.1:{server.port}"
        loader = ProgramLoader(make_source(folder), make_planner(folder), 1, address=address, job=job, starts_planners=False, timeout=1)
        with pytest.raises(StoreError, match="nothing came for 1 s"):
            next(iter(loader))


def test_waits_for_programs_and_for_samples_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: planning takes 2 s, reading samples 3 s. Samples are read last, so a short wait is for them."""
    now = [0.0]
    planner = make_planner(folder)
    load = Samples.load

    def later(time_s: float, found: Any) -> Any:
        now[0] += time_s
        return found

    monkeypatch.setattr("penstock.data.loader.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Samples, "load", lambda *given: later(3.0, load(*given)))
    slow: Any = SimpleNamespace(plan=planner.plan, form=planner.form, window=lambda *given: later(2.0, planner.window(*given)))
    loader = ProgramLoader(make_source(folder), slow, 0, planners=0)
    loader.next_planned_here()
    assert (loader.wait_s, loader.data_wait_s) == (5.0, 3.0)
    waits = iter([4.0, 1.0])
    found = SimpleNamespace(program=SimpleNamespace(iteration=9, num_batches=1))
    loader._feed = SimpleNamespace(next=lambda: later(next(waits), (found, 3.0)), end=lambda: None)  # type: ignore[assignment]
    loader._fetched()
    assert (loader.wait_s, loader.data_wait_s) == (5.0 + 4.0, 3.0 + 3.0)
    loader._fetched()
    assert (loader.wait_s, loader.data_wait_s) == (9.0 + 1.0, 6.0 + 1.0)


def test_a_rank_plans_for_itself_until_planners_have_followed(folder: Path) -> None:
    """What they hand over too late is dropped; from the first program that comes in time on, they are waited for again."""
    planner = make_planner(folder)
    loader = ProgramLoader(make_source(folder), planner, 0, planners=0, first_step=3)
    loader.adopt(3, planner)
    handed = [SimpleNamespace(program=SimpleNamespace(iteration=step, num_batches=1)) for step in (3, 4, 5, 6)]
    ready: list[Any] = []

    class Feed:
        is_ready = property(lambda self: bool(ready))
        first = property(lambda self: ready[0] if ready else None)

        def next(self) -> tuple[Any, float]:
            return ready.pop(0), 0.0

    loader._feed = Feed()  # type: ignore[assignment]
    assert [loader._fetched().program.iteration for _ in range(2)] == [3, 4]
    ready += handed[:2]
    assert loader._fetched().program.iteration == 5 and not ready  # 3 and 4 were planned here
    ready += handed[2:]
    assert loader.coming() is None  # 5 was planned here
    assert loader._fetched() is handed[3] and loader.step == 7
    late, coming = ([SimpleNamespace(program=SimpleNamespace(iteration=step, num_batches=1))] for step in (6, 7))
    for ready[:], expected in ((late, None), (coming, coming[0]), ([], None)):
        assert loader.coming() is expected
