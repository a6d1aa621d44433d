"""FASOP's own enumeration of a setting: the rows that it lists, in its order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.reproduce.peers.checkout import Peer, PeerError
from penstock.systems.fasop.rows import FasopRow, read_fasop_rows

__all__ = ["FasopListed", "list_with_fasop"]

_LIMIT_S = 3600.0
"""T5 on mixed nodes takes some 500 s on one core."""


@dataclass(frozen=True)
class FasopListed:
    """Every row of one setting, the fastest by FASOP's estimate first; rows that do not fit are among them."""

    rows: Sequence[FasopRow]
    cpu_s: float


def list_with_fasop(peer: Peer, model: str, *, mixed: bool) -> FasopListed:
    """Runs FASOP on the nodes that it has built in: A10 alone, or one node of A100 among them."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        asked = ["FASOP.py", "--type", model, *(["--heterogeneous"] if mixed else [])]
        run = peer.run(asked, scratch, _LIMIT_S, within="FASOP")
        files = sorted((scratch / "main_logs").glob("*.csv"))
        if len(files) != 1:
            raise PeerError(f"fasop wrote {len(files)} result files of {model} where one was expected.")
        return FasopListed(read_fasop_rows(files[0]), run.cpu_s)
