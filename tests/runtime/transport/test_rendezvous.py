"""The store in which ranks find each other: nobody else reaches it where all ranks are on one machine."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port

from penstock.processes.fork_server import FORKED, start_process
from penstock.runtime.transport.rendezvous import join_group
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


def meet(environment: dict[str, str], pipe: Connection) -> None:
    """A rank, as Slurm starts it; it stays until it is told to go."""
    os.environ |= environment
    join_group("gloo")
    number = torch.tensor(float(environment["RANK"]))
    dist.all_reduce(number)
    pipe.send(number.item())
    pipe.recv()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_ranks_of_many_nodes_on_one_machine_too(host: str) -> None:
    """As Slurm starts them: rank 0 serves the store."""
    port = free_port()
    common = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipes = [FORKED.Pipe() for _ in range(2)]
    ranks = [start_process(f"rank {rank}", meet, common | {"RANK": str(rank)}, pipe) for rank, (_, pipe) in enumerate(pipes)]
    try:
        assert [own.recv() for own, _ in pipes] == [1.0, 1.0]
        assert port in dict(map(reversed, listening(ranks[0].pid)))  # type: ignore[arg-type]
        assert {address for rank in ranks for address, _ in listening(rank.pid)} == {"0100007F"}  # type: ignore[arg-type]
        refused_from_outside([port])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
