"""Checkpoints: any way of dividing loads what any other saved, damage is told, and no kill loses the last whole one."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_pieces import chain_layouts, chain_pieces
from disk_order import DiskOrder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import small_batch, small_model

from penstock.errors import InputError
from penstock.models.modules import Chain, TensorParallel, build_chain
from penstock.models.ops import Model
from penstock.runtime.checkpoints.folder import BEST, LATEST, abandon_newer, best_checkpoint, latest_checkpoint, step_of, whole_checkpoints
from penstock.runtime.checkpoints.layout import TensorPiece, stored_shapes
from penstock.runtime.checkpoints.manifest import MANIFEST
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import BEST_LOSS, CheckpointError, CheckpointWriter
from penstock.runtime.optimizing.optimizer import MasterAdamW

KINDS = ("weights", "exp_avg", "exp_avg_sq")
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(folder: Path, ranks: Sequence[Iterable[TensorPiece]], step: int = 1, state: Any = None, **more: Any) -> Checkpoint:
    """A checkpoint of what all ranks hold, each with a writer of its own."""
    writers = [CheckpointWriter(folder, rank=rank, world_size=len(ranks), token="one", **more) for rank in range(len(ranks))]
    for writer, pieces in zip(writers, ranks, strict=True):
        writer.save(step, pieces, state or {})
    for writer in writers:
        writer.wait()
    return Checkpoint(folder)


def random_rows(data: st.DataObject, rows: int) -> list[tuple[int, int]]:
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    return list(pairwise(cuts))


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name_and_before_it_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut at any moment leaves what was whole before, and `latest` names nothing that is not there."""
    disk = DiskOrder(monkeypatch)
    ranks = [[TensorPiece("weights/w", (4,), ((2 * rank, 2 * rank + 2),), torch.zeros(2))] for rank in range(2)]
    whole = save(tmp_path, ranks).path
    files = sorted(path.name for path in whole.iterdir())
    assert files == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    assert all(disk.is_synced_before(whole / name, whole) for name in files)
    assert disk.is_synced_before(whole, whole) and disk.is_synced_after(whole, whole / MANIFEST)
    assert disk.is_synced_before(tmp_path, tmp_path / LATEST)
    named = disk.events.index(("named", str(whole)))
    assert ("synced", str(tmp_path)) in disk.events[named : disk.events.index(("named", str(tmp_path / LATEST)))]
    assert disk.is_synced_after(tmp_path, tmp_path / LATEST)


@quick
@given(data=st.data())
def test_any_division_loads_under_any_other(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Boxes cut at random, in both dimensions, saved by several ranks; read as other boxes and in another dtype."""
    shape = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7)))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    boxes = [(r, c) for r in random_rows(data, shape[0]) for c in random_rows(data, shape[1])]
    ranks: list[list[TensorPiece]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for box in boxes:
        ranks[data.draw(st.integers(0, len(ranks) - 1))].append(TensorPiece("weights/w", shape, box, _cut(whole, box)))
    checkpoint = save(tmp_path_factory.mktemp("any"), ranks)
    assert torch.equal(checkpoint.read("weights/w"), whole)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    for rows in random_rows(data, shape[0]):
        for columns in random_rows(data, shape[1]):
            target = torch.full([rows[1] - rows[0], columns[1] - columns[0]], -1, dtype=dtype)
            checkpoint.load([TensorPiece("weights/w", shape, (rows, columns), target)])
            assert torch.equal(target, _cut(whole, (rows, columns)).to(dtype))
            assert torch.equal(checkpoint.read("weights/w", (rows, columns)), _cut(whole, (rows, columns)))


def _cut(whole: torch.Tensor, box: Any) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in box)]


def parts(model: Model, cuts: Sequence[int], tps: Sequence[int], algo: int = 0, **more: Any) -> list[Chain]:
    """The chains of all ranks of a pipeline with one tp degree for each stage."""
    algos = [min(algo, len(placed.op.splits) - 1) for placed in model.ops]
    return [
        build_chain(model, first, last, tp=TensorParallel(rank, tp), algos=algos[first:last], **more)
        for first, last, tp in zip([0, *cuts], [*cuts, model.num_ops], tps, strict=True)
        for rank in range(tp)
    ]


def same(chains: Iterable[Chain], whole: Chain, dtype: torch.dtype = torch.float32) -> None:
    """Every part holds what cutting the whole weight gives."""
    wanted = {f"{op.name}.{name}": tensor for op in whole.ops for name, tensor in op.named_parameters()}
    for chain in chains:
        for op in chain.ops:
            for name, tensor in op.named_parameters():
                source = wanted[f"{op.name}.{name}"].detach()
                assert torch.equal(tensor.detach(), (op.shards[name](source) if op.shards[name] else source).to(dtype)), f"{op.name}.{name}"


PLANS = [((), (1,), 0), ((), (2,), 1), ((5,), (2, 1), 0), ((3, 9), (1, 2, 2), 1), ((1,), (1, 2), 0)]


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5"])
def test_models_move_between_plans(family: str, tmp_path: Path) -> None:
    """Tied weights on other stages, fused weights, uneven vocabularies, both splits: every plan reads what every plan wrote."""
    model = small_model(family)
    for number, (cuts, tps, algo) in enumerate(PLANS):
        folder = tmp_path / str(number)
        checkpoint = save(folder, [chain_pieces(chain, owned=True) for chain in parts(model, cuts, tps, algo, seed=number)])
        checkpoint.check(stored_shapes(model))
        checkpoint.verify()
        whole = build_chain(model, seed=number)
        for other_cuts, other_tps, other_algo in PLANS:
            for dtype in (torch.float32, torch.bfloat16):
                chains = parts(model, other_cuts, other_tps, other_algo, seed=99, dtype=dtype)
                for chain in chains:
                    checkpoint.load(chain_pieces(chain))
                same(chains, whole, dtype)


def adamw_pieces(chain: Chain, optimizer: MasterAdamW) -> list[TensorPiece]:
    """fp32 masters and moments, which lie in flat runs over many parameters."""
    layouts = {id(tensor): layout for layout, tensor in chain_layouts(chain)}
    found: list[TensorPiece] = []
    for run in optimizer._pieces:
        state = run.optimizer.state[run.master]
        for kind, flat in (("weights", run.master.detach()), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            for (parameter, start, _), part in zip(run.spans, run.split(flat), strict=True):
                found.extend(layouts[id(parameter)].flat_pieces(part, start, kind))
    return found


def train(model: Model, chain: Chain, optimizer: MasterAdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = chain(small_batch(model, [9, 4, 7], seed=step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    """Masters and moments in pieces of one size, loaded into pieces of another: the same curve as without the break."""
    model = small_model("gpt", dtype="bf16")
    chain = build_chain(model)
    optimizer = MasterAdamW(chain.parameters(), lr=1e-3, weight_decay=0.01, chunk=5000)
    train(model, chain, optimizer, range(3))
    held = adamw_pieces(chain, optimizer)
    names = {piece.name.partition("/")[2] for piece in held}
    checkpoint = save(tmp_path, [held[rank::3] for rank in range(3)], step=3, state={"optimizer_steps": 3})
    checkpoint.check(stored_shapes(model, KINDS))
    assert set(checkpoint.kinds) == set(KINDS)
    assert checkpoint.manifest.tensors["weights/embedding.weight"].dtype == "F32" and len(names) == len(list(chain.parameters()))
    wanted = train(model, chain, optimizer, range(3, 6))

    other = build_chain(model, seed=7)
    again = MasterAdamW(other.parameters(), lr=1e-3, weight_decay=0.01, chunk=700)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    again.step()  # makes the moments
    checkpoint.load(adamw_pieces(other, again))
    checkpoint.load(chain_pieces(other))
    for run in again._pieces:
        run.optimizer.state[run.master]["step"].fill_(checkpoint.state["optimizer_steps"])
    assert train(model, other, again, range(3, 6)) == wanted


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    weight = torch.ones(1000, 1000)
    writer = CheckpointWriter(tmp_path)
    writer.save(1, [TensorPiece("weights/w", (1000, 1000), ((0, 1000), (0, 1000)), weight)], {})
    weight.zero_()  # after save returns the tensor may change
    writer.wait()
    assert torch.equal(Checkpoint(tmp_path).read("weights/w"), torch.ones(1000, 1000))
    copies = [tensor.data_ptr() for tensor in writer._copies.values()]
    writer.save(2, [TensorPiece("weights/w", (1000, 1000), ((0, 1000), (0, 1000)), weight)], {})
    writer.wait()
    assert [tensor.data_ptr() for tensor in writer._copies.values()] == copies  # the same memory again
    assert not Checkpoint(tmp_path).read("weights/w").any()


def one(step: int, value: float = 0.0) -> list[TensorPiece]:
    return [TensorPiece("weights/w", (3, 2), ((0, 3), (0, 2)), torch.full((3, 2), value or float(step)))]


def test_all_sorts_of_tensors(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "half": torch.randn(3).half(), "whole": torch.arange(5),
        "flag": torch.tensor([True, False]), "deep": torch.randn(2, 3, 4, 5), "turned": torch.randn(4, 6).t(),
    }  # fmt: skip
    pieces = [TensorPiece(f"weights/{n}", tuple(t.shape), tuple((0, s) for s in t.shape), t) for n, t in tensors.items()]
    checkpoint = save(tmp_path, [pieces], state={"seed": 2**62, "data": {"position": 17, "epoch": [1, 2]}, "scale": 2.0})
    for name, tensor in tensors.items():
        found = checkpoint.read(f"weights/{name}")
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    checkpoint.load(pieces)
    checkpoint.verify()
    assert checkpoint.state == {"seed": 2**62, "data": {"position": 17, "epoch": [1, 2]}, "scale": 2.0} and checkpoint.step == 1


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    """A page of a large tensor: the rest is a hole in the file, which a read of everything would have to bring in."""
    whole = torch.zeros(4096, 4096)
    whole[7, 9] = 5
    checkpoint = save(tmp_path, [[TensorPiece("weights/w", (4096, 4096), ((0, 4096), (0, 4096)), whole)]])
    del whole
    gc.collect()
    before = _resident_bytes()
    assert checkpoint.read("weights/w", ((7, 8), (0, 4096)))[0, 9] == 5
    assert _resident_bytes() - before < 8 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (10, 20, 30, 20):  # the last one after going back
        writer.save(step, one(step), {})
        writer.wait()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["save-000003-step-30", "save-000004-step-20"]
    assert (tmp_path / LATEST).read_text() == "save-000004-step-20\n" and Checkpoint(tmp_path).step == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "save-000003-step-30", "save-000004-step-20"]
    assert Checkpoint(tmp_path / "save-000003-step-30").step == 30


def test_the_best_is_kept_besides(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, state in ((10, {BEST_LOSS: 2.5}), (20, {}), (30, {BEST_LOSS: 2.25}), (40, {}), (50, {})):
        writer.save(step, one(step), state)
        writer.wait()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["save-000003-step-30", "save-000005-step-50"]
    assert best_checkpoint(tmp_path) == (tmp_path / "save-000003-step-30", 2.25) and step_of(whole_checkpoints(tmp_path)[0]) == 30
    assert (tmp_path / BEST).read_text() == "save-000003-step-30 2.25\n"
    shutil.rmtree(tmp_path / "save-000003-step-30")
    assert best_checkpoint(tmp_path) is None and best_checkpoint(tmp_path / "nowhere") is None


def test_the_best_is_kept_though_its_run_did_not_live_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two renames."""
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, state in ((10, {BEST_LOSS: 1.0}), (20, {BEST_LOSS: 0.5}), (30, {}), (40, {})):
        with monkeypatch.context() as patched:
            if step == 20:
                patched.setattr("penstock.runtime.checkpoints.writer.mark_best", lambda *_: sys.exit("killed"))
            writer.save(step, one(step), state)
            with suppress(SystemExit):
                writer.wait()
    assert [step_of(path) for path in whole_checkpoints(tmp_path)] == [20, 40]
    assert best_checkpoint(tmp_path) == (tmp_path / "save-000002-step-20", 0.5)
    assert (tmp_path / BEST).read_text() == "save-000002-step-20 0.5\n"


def test_what_a_run_has_left_counts_as_older_than_all_others(tmp_path: Path) -> None:
    """From the moment it goes back, and not from its first checkpoint after that; nor is a number that was left given again."""
    folder, writer = tmp_path / "checkpoints", CheckpointWriter(tmp_path / "checkpoints", keep=3)

    def save(step: int) -> None:
        writer.save(step, one(step), {})
        writer.wait()

    def known() -> tuple[list[int], int, str]:
        return [step_of(path) for path in whole_checkpoints(folder)], Checkpoint(tmp_path).step, (folder / LATEST).read_text()

    for step in (50, 80, 90):
        save(step)
    abandon_newer(folder, folder / "save-000003-step-90")  # goes on where it was
    assert known() == ([50, 80, 90], 90, "save-000003-step-90\n")
    abandon_newer(folder, folder / "save-000001-step-50")
    assert known() == ([80, 90, 50], 50, "save-000001-step-50\n") and latest_checkpoint(folder) == folder / "save-000001-step-50"
    shutil.rmtree(folder / "save-000003-step-90")
    save(70)
    assert known() == ([80, 50, 70], 70, "save-000004-step-70\n")
    save(75)
    assert known() == ([50, 70, 75], 75, "save-000005-step-75\n")
    abandon_newer(folder, folder / "save-000004-step-70")
    save(60)
    assert known() == ([50, 70, 60], 60, "save-000006-step-60\n")
    abandon_newer(folder, tmp_path / "elsewhere")
    assert latest_checkpoint(folder) is None and known()[:2] == ([50, 70, 60], 60)


def test_what_has_no_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    save(tmp_path, [one(1)])
    for name in ("save-000003-step-3", "save-x-step-4", "save-000004-step-", ".partial-9-x"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-9-x" / MANIFEST).write_text("{}")
    assert latest_checkpoint(tmp_path) == tmp_path / "save-000001-step-1"
    writer = CheckpointWriter(tmp_path)
    writer.save(5, one(5), {})
    writer.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "save-000004-step-5"  # numbers are never used twice


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    save(tmp_path, [one(1)])
    for name in (".partial-5-old", ".trash-save-000001-step-1", ".partial-5-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00001.json").write_text("{}")
    CheckpointWriter(tmp_path, rank=1, world_size=2, token="mine")
    assert (tmp_path / ".partial-5-old").exists()  # only rank 0 cleans
    CheckpointWriter(tmp_path, rank=0, world_size=2, token="mine")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".partial-5-mine"]


def test_parts_of_a_killed_start_are_never_taken(tmp_path: Path) -> None:
    """Rank 1 of an earlier start wrote its part of step 5, rank 0 did not: the next start must not put its own beside it."""
    old = CheckpointWriter(tmp_path, rank=1, world_size=2, token="first")
    old.save(5, [TensorPiece("weights/w", (4,), ((2, 4),), torch.full((2,), 1.0))], {})
    old.wait()
    new = [CheckpointWriter(tmp_path, rank=rank, world_size=2, token="second", limit_s=250) for rank in (0, 1)]
    new[0].save(5, [TensorPiece("weights/w", (4,), ((0, 2),), torch.full((2,), 2.0))], {})
    time.sleep(0.1)
    assert new[0].busy and latest_checkpoint(tmp_path) is None
    new[1].save(5, [TensorPiece("weights/w", (4,), ((2, 4),), torch.full((2,), 2.0))], {})
    new[0].wait()
    assert torch.equal(Checkpoint(tmp_path).read("weights/w"), torch.full((4,), 2.0))


def test_what_cannot_be_completed_is_told_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, [one(1)])
    half = [TensorPiece("weights/w", (3, 2), ((0, 2), (0, 2)), torch.zeros(2, 2))]
    writer = CheckpointWriter(tmp_path)
    writer.save(2, half, {})
    with pytest.raises(CheckpointError, match=r"step 2 .* not whole: tensor 'weights/w' of shape \[3, 2\]: 2 of its 6 elements"):
        writer.save(3, one(3), {})
    writer.save(3, one(3), {})
    writer.wait()
    assert Checkpoint(tmp_path).step == 3
    alone = CheckpointWriter(tmp_path, rank=0, world_size=3, token="x", limit_s=0.1)
    alone.save(4, half, {})
    with pytest.raises(CheckpointError, match=r"parts of 2 of 3 ranks \(1, 2\)"):
        alone.wait()
    assert Checkpoint(tmp_path).step == 3


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    writer = CheckpointWriter(tmp_path, token="x")
    partial = tmp_path / ".partial-1-x"
    partial.mkdir()
    (partial / "rank-00000.safetensors").symlink_to("/dev/full")
    writer.save(1, one(1), {})
    with pytest.raises(InputError, match=r"rank-00000\.safetensors' cannot be written: No space left"):
        writer.wait()
    assert latest_checkpoint(tmp_path) is None


def test_what_the_disk_refuses_besides_bytes_is_told(tmp_path: Path) -> None:
    """No place for a folder, or for a name: another process would meet that too, so that none is started for it."""
    writer = CheckpointWriter(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    writer.save(7, one(7), {})
    with pytest.raises(CheckpointError, match=r"checkpoint of step 7 cannot be written in '.*checkpoints': Not a directory"):
        writer.wait()


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    model = small_model("gpt", layers=3)
    chain = build_chain(model)
    checkpoint = save(tmp_path, [chain_pieces(chain, owned=True)])
    with pytest.raises(InputError, match=r"lacks 'exp_avg/embedding\.weight', .* and \d+ more\. It holds weights\."):
        checkpoint.check(stored_shapes(model, KINDS))
    with pytest.raises(InputError, match=r"lacks 'weights/layers\.3\.norm1\.weight'"):
        checkpoint.check(stored_shapes(small_model("gpt", layers=4)))
    with pytest.raises(InputError, match=r"holds 'weights/layers\.2\.norm1\.weight', .* no place"):
        checkpoint.check(stored_shapes(small_model("gpt", layers=2)))
    with pytest.raises(InputError, match=r"'weights/embedding\.weight' has shape \[61, 32\], the model needs \[64, 32\]"):
        checkpoint.check(stored_shapes(small_model("gpt", layers=3, vocab=64)))
    with pytest.raises(InputError, match=r"has shape \[61, 32\], the model needs \[64, 32\]"):
        checkpoint.load(chain_pieces(build_chain(small_model("gpt", layers=3, vocab=64))))
    with pytest.raises(InputError, match=r"no tensor 'weights/layers\.3\.norm1\.weight'. Did you mean"):
        checkpoint.load(chain_pieces(build_chain(small_model("gpt", layers=4))))
    with pytest.raises(ValueError, match="is not inside"):
        checkpoint.read("weights/embedding.weight", ((0, 62), (0, 32)))
    moments = [piece for layout, tensor in chain_layouts(chain) for piece in layout.pieces(tensor, "exp_avg")]
    both = save(tmp_path / "both", [[*chain_pieces(chain), *moments]])
    both.check(stored_shapes(model), kinds=("weights", "buffers"))  # weights alone, of a checkpoint that holds more


def test_damage_is_found(tmp_path: Path) -> None:
    whole = torch.randn(64, 64)
    checkpoint = save(tmp_path, [[TensorPiece("weights/w", (64, 64), ((0, 64), (0, 64)), whole)]])
    file = checkpoint.path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"'weights/w' in 'rank-00000\.safetensors' is damaged"):
        Checkpoint(tmp_path).verify()
    with pytest.raises(InputError, match="is damaged"):
        Checkpoint(tmp_path).read("weights/w")
    for other in (data[:-1], data + b"x"):
        file.write_bytes(other)
        with pytest.raises(InputError, match=r"has [\d,]+ bytes, \d+ were written"):
            Checkpoint(tmp_path)
    data[8:20] = b"x" * 12
    file.write_bytes(data)
    with pytest.raises(InputError, match="cannot be read from"):
        Checkpoint(tmp_path).read("weights/w")
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        Checkpoint(tmp_path)
    (checkpoint.path / MANIFEST).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Checkpoint(tmp_path)
    with pytest.raises(InputError, match="holds no checkpoint"):
        Checkpoint(tmp_path / "nowhere")


def test_a_manifest_that_exchanges_tensors(tmp_path: Path) -> None:
    """Its boxes are fine, but the file holds something else under the key."""
    checkpoint = save(tmp_path, [[*one(1), TensorPiece("weights/v", (4,), ((0, 4),), torch.zeros(4))]])
    manifest = checkpoint.path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"key":"weights/w"', '"key":"weights/v"'))
    with pytest.raises(InputError, match=r"has shape \[4\], not that of box"):
        Checkpoint(tmp_path).read("weights/w")
    with pytest.raises(InputError, match="not that of box"):
        Checkpoint(tmp_path).read("weights/w", ((0, 1), (0, 2)))


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the same on all ranks"):
        CheckpointWriter(tmp_path, world_size=2, token="a/b")
    with pytest.raises(InputError, match="keep at least 1"):
        CheckpointWriter(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot hold checkpoints"):
        CheckpointWriter(tmp_path / "file")


@pytest.mark.parametrize(("num_kills", "world_size"), [(30, 1), (20, 2)])
def test_no_kill_loses_the_last_whole_one(num_kills: int, world_size: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_writers.py")
    command = [sys.executable, str(script), str(tmp_path / "run"), str(num_kills), str(world_size), str(time.time_ns() % 1000)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert f"{num_kills} kills" in done.stdout
