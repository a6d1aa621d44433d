"""The store in which ranks find each other: nobody else reaches it where all ranks are on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.workers import WorkerPool


def listening(process: int) -> list[tuple[str, int]]:
    """Addresses (in the kernel's hexadecimal form) and ports at which a process listens."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(address, int(port, 16)) for address, port in places]


def refused_from_outside(ports: list[int]) -> None:
    """127.0.0.2 is this machine too, and would be answered by whoever listens on all addresses."""
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)


def test_workers_of_one_machine_listen_on_loopback_alone() -> None:
    before = set(listening(os.getpid()))
    with WorkerPool(2) as pool:
        places = set(listening(os.getpid())) - before
        assert [address for address, _ in places] == ["0100007F"]
        refused_from_outside([port for _, port in places])
        theirs = [listening(worker) for worker in pool.pids()]
        assert all(theirs) and {address for place in theirs for address, _ in place} == {"0100007F"}


RANK = """
import os, torch, torch.distributed as dist
from penstock.runtime.transport.rendezvous import join_group
join_group("gloo")
number = torch.tensor(float(os.environ["RANK"]))
dist.all_reduce(number)
print(number.item(), flush=True)
input()
"""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_ranks_of_many_nodes_on_one_machine_too(host: str) -> None:
    """As Slurm starts them: rank 0 serves the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK], env={**common, "RANK": str(rank)}, **start) for rank in range(2)]  # type: ignore[call-overload]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["1.0\n", "1.0\n"]
        assert port in dict(map(reversed, listening(ranks[0].pid)))
        assert {address for rank in ranks for address, _ in listening(rank.pid)} == {"0100007F"}
        refused_from_outside([port])
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
