"""Copies in shared memory: whole or not there, whoever is killed while writing, and equal to the bit to what was copied."""

from __future__ import annotations

import os
import signal

import torch

from penstock.processes.fork_server import start_process
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.recovering.copies import Copies, CopyPlace


def pieces(value: float, rows: range, dtype: torch.dtype = torch.float32) -> list[TensorPiece]:
    """Some rows of a weight and of its moment, and its step count."""
    box = ((rows.start, rows.stop), (0, 3))
    own = torch.full((len(rows), 3), value, dtype=dtype)
    found = [TensorPiece("weights/op.w", (4, 3), box, own), TensorPiece("exp_avg/op.w", (4, 3), box, -own.float())]
    return [*found, TensorPiece("step/op.w", (), (), torch.tensor(value))] if not rows.start else found


def save(copies: Copies, step: int, generation: int = 0, processes: range = range(2)) -> None:
    for own in processes:
        found = pieces(float(step), range(2 * own, 2 * own + 2))
        copies.save(own, step, CopyPlace(generation, own, 2), found, {"loss_scale": {"value": step}})


def loaded(copies: Copies, step: int) -> list[float]:
    """What a rank that needs rows 1 to 2, of both processes, would get."""
    state = copies.state(step)
    assert state.kinds == ("exp_avg", "step") and state.scalars == {"step"} and state.loss_scale == {"value": step}
    weight, moment, count = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(())
    box = ((1, 3), (0, 3))
    state.source.load([TensorPiece("weights/op.w", (4, 3), box, weight), TensorPiece("exp_avg/op.w", (4, 3), box, moment),
                       TensorPiece("step/op.w", (), (), count)])  # fmt: skip
    assert weight.unique().tolist() == (-moment).unique().tolist() == [count.item()]
    return weight.unique().tolist()


def test_the_newest_whole_step_counts() -> None:
    copies = Copies(2)
    assert copies.newest(40) is None
    save(copies, 10)
    save(copies, 20)
    save(copies, 30, processes=range(1))  # the other process is not there yet, or never will be
    assert copies.newest(40) == 20 and loaded(copies, 20) == [20.0]
    save(copies, 30, processes=range(1, 2))
    assert copies.newest(40) == 30 and loaded(copies, 30) == [30.0]
    assert copies.newest(30) == 20


def test_what_is_not_gone_back_to_is_forgotten() -> None:
    """Else a rank that writes over its older copy would write over the one that is whole."""
    copies = Copies(2)
    save(copies, 10)
    save(copies, 20, processes=range(1))
    copies.go_back(copies.newest(40))
    save(copies, 15, generation=1, processes=range(1))
    assert copies.newest(40) == 10 and loaded(copies, 10) == [10.0]
    copies.go_back(None)
    assert copies.newest(40) is None


def test_older_copies_stay_until_they_are_written_over() -> None:
    """A part of the newest may be lost with its node before it has come to others, who then go on from the older ones."""
    copies = Copies(2)
    save(copies, 10)
    save(copies, 20)
    copies.go_back(20)
    assert copies.newest(40) == 20 and copies.newest(20) == 10 and loaded(copies, 10) == [10.0]
    save(copies, 30)
    assert copies.newest(40) == 30 and copies.newest(30) == 20 and copies.newest(20) is None


def test_copies_of_two_generations_are_not_mixed() -> None:
    """The places of another plan have other parts."""
    copies = Copies(2)
    save(copies, 10, processes=range(1))
    save(copies, 10, generation=1, processes=range(1, 2))
    assert copies.newest(40) is None


def test_what_has_grown_has_room() -> None:
    """As after a move to a plan that gives a rank more."""
    copies = Copies(1)
    for step, rows, dtype in ((1, 1, torch.bfloat16), (2, 700, torch.float32), (3, 9000, torch.bfloat16), (4, 0, torch.float32)):
        whole = torch.arange(rows * 3, dtype=torch.float32).to(dtype).view(rows, 3)
        size = copies.save(0, step, CopyPlace(0, 0, 1), [TensorPiece("weights/w", (rows, 3), ((0, rows), (0, 3)), whole)], {})
        assert size >= whole.nbytes
        found = torch.zeros(rows, 3, dtype=dtype)
        copies.state(step).source.load([TensorPiece("weights/w", (rows, 3), ((0, rows), (0, 3)), found)])
        assert torch.equal(found, whole)


def test_a_learned_number_that_comes_last_leaves_moments_tensors() -> None:
    """Its own moment is one number, as step counts are; those of the weights before it are not."""
    copies, scale = Copies(1), [TensorPiece(f"{kind}/op.scale", (), (), torch.tensor(7.0)) for kind in ("weights", "exp_avg", "step")]
    copies.save(0, 1, CopyPlace(0, 0, 1), [*pieces(5.0, range(4)), *scale], {})
    state = copies.state(1)
    assert state.kinds == ("exp_avg", "step") and state.scalars == {"step"}


class Deadly(torch.Tensor):
    """Whoever reads it dies."""

    def detach(self) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def _copy_and_die(copies: Copies) -> None:
    save(copies, 10)
    broken = pieces(20.0, range(2))
    object.__setattr__(broken[1], "tensor", broken[1].tensor.as_subclass(Deadly))
    copies.save(0, 20, CopyPlace(0, 0, 1), broken, {})


def test_they_outlive_the_process_that_made_them() -> None:
    copies = Copies(2)
    process = start_process("copying", _copy_and_die, copies)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert copies.newest(40) == 10 and loaded(copies, 10) == [10.0]
