"""Writing checkpoints while training goes on: tensors are copied to the host, a thread brings them to disk.

    every rank   copy ─ rank-R.safetensors ─ fsync ─ rank-R.json
    rank 0                                           wait for all rank-*.json ─ manifest.json ─ rename ─ latest, best ─ prune

The ranks meet in the folder, which they must share; nothing is sent. A kill at any moment leaves what was whole before.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.errors import InputError, PenstockError
from penstock.files import write_bytes
from penstock.runtime.checkpoints.files import DTYPE_NAMES, write_safetensors
from penstock.runtime.checkpoints.folder import BEST_LOSS, commit, drop_leftovers, mark_best, partial_folder, prune
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.manifest import MANIFEST, Box, RankPart, StoredPiece, StoredTensor, merge_parts

__all__ = ["BEST_LOSS", "CheckpointError", "CheckpointWriter"]

_POLL_S = 0.02


class CheckpointError(PenstockError):
    """A checkpoint could not be completed; those before it are whole."""


class _Head(NamedTuple):
    """Name, place and dtype of a piece whose bytes are copied apart."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str


class CheckpointWriter:
    """Saves the checkpoints of one run; one at a time is under way.

    `token` tells this start of the run from earlier ones that were killed: any word that all ranks share and no earlier start had.
    """

    def __init__(
        self, folder: str | Path, *, rank: int = 0, world_size: int = 1, token: str = "", keep: int = 2, limit_s: float = 1800.0
    ) -> None:
        self.folder, self.rank, self.world_size, self.keep, self.limit_s = Path(folder), rank, world_size, keep, limit_s
        if world_size > 1 and not re.fullmatch(r"[A-Za-z0-9_]{1,64}", token):
            raise ValueError(f"token is {token!r}: letters, digits and '_', the same on all ranks, were expected")
        if keep < 1:
            raise InputError(f"{keep} checkpoints are to be kept; keep at least 1.")
        self.token = token or f"{os.getpid()}_{time.time_ns()}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[str, torch.Tensor] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"'{folder}' cannot hold checkpoints: {error.strerror}.") from None
        if rank == 0:
            drop_leftovers(self.folder, self.token)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written: `save` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, pieces: Iterable[TensorPiece], state: Mapping[str, Any]) -> None:
        """Begins a checkpoint of step `step`; returns once the tensors are copied, so that they may change.

        `state` is what JSON can hold; that of rank 0 is kept. Waits for the checkpoint before, and raises what went wrong with it.
        """
        self.wait()
        heads: dict[str, _Head] = {}
        copies: dict[str, torch.Tensor] = {}
        device: torch.device | None = None
        for piece in pieces:  # one by one: what an optimizer puts together for this need not be held twice
            heads[piece.key] = _Head(piece.name, piece.shape, piece.box, DTYPE_NAMES[piece.tensor.dtype])
            copies[piece.key] = self._copy(piece.key, piece.tensor)
            device = piece.tensor.device if piece.tensor.is_cuda else device
        self._copies = copies  # pinned memory is slow to get: the next save copies into the same
        kept = msgspec.to_builtins(dict(state), str_keys=True)
        self._thread = threading.Thread(
            target=self._run, args=(step, heads, copies, _copied_event(device), kept), daemon=True, name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until this rank's part is on disk, on rank 0 until the checkpoint is whole; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def _run(self, step: int, heads: Mapping[str, _Head], copies: Mapping[str, torch.Tensor], done: Any, state: dict[str, Any]) -> None:
        try:
            if done is not None:
                done.synchronize()
            partial = partial_folder(self.folder, step, self.token)
            partial.mkdir(exist_ok=True)
            self._write_part(partial, step, heads, copies)
            if self.rank == 0:
                self._complete(partial, step, state)
        except OSError as error:  # no fault of this process: any other would meet it too
            self._error = CheckpointError(f"checkpoint of step {step} cannot be written in '{self.folder}': {error.strerror or error}.")
        except BaseException as error:
            self._error = error

    def _write_part(self, partial: Path, step: int, heads: Mapping[str, _Head], copies: Mapping[str, torch.Tensor]) -> None:
        file = f"rank-{self.rank:05}.safetensors"
        size_bytes, sums = write_safetensors(partial / file, copies)
        tensors = []
        for key, head in heads.items():
            stored = (StoredPiece(file, key, head.box, sums[key]),) if copies[key].numel() else ()
            tensors.append((head.name, StoredTensor(head.dtype, head.shape, stored)))
        part = RankPart(self.rank, step, file, size_bytes, tensors)
        write_bytes(partial / f"rank-{self.rank:05}.json", msgspec.json.encode(part))

    def _complete(self, partial: Path, step: int, state: dict[str, Any]) -> None:
        files = [partial / f"rank-{rank:05}.json" for rank in range(self.world_size)]
        self._wait_for(files, step)
        parts = [msgspec.json.decode(file.read_bytes(), type=RankPart) for file in files]
        try:
            manifest = merge_parts(step, state, parts)
        except ValueError as error:
            raise CheckpointError(f"checkpoint of step {step} in '{self.folder}' is not whole: {error}.") from None
        for file in files:
            file.unlink()
        write_bytes(partial / MANIFEST, msgspec.json.encode(manifest))
        commit(self.folder, partial, step)
        prune(self.folder, self.keep, mark_best(self.folder))

    def _wait_for(self, files: list[Path], step: int) -> None:
        deadline = time.monotonic() + self.limit_s
        # Listed, not asked for one by one: a network file system may remember for a while that a name was not there.
        while missing := sorted({file.name for file in files} - set(os.listdir(files[0].parent))):
            if time.monotonic() > deadline:
                ranks = ", ".join(str(int(name[5:10])) for name in missing[:8])
                raise CheckpointError(
                    f"checkpoint of step {step}: after {self.limit_s:g} s the parts of {len(missing)} of {self.world_size} ranks ({ranks}) "
                    f"are not in '{self.folder}'. Is it on a file system that all nodes share?"
                )
            time.sleep(_POLL_S)


def _copied_event(device: torch.device | None) -> Any:
    """A CUDA event that comes after the copies from a GPU; None where they are complete already."""
    if device is None:
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event
