"""Where ranks find each other: a TCPStore that listens on one address alone.

By itself a TCPStore listens on all interfaces, whatever address it is given, and serves whoever asks. Given a socket that is bound
already, it takes that.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.stores.listening import bound_socket, means_loopback

__all__ = ["find_rendezvous", "job_store", "join_group", "only_here", "serve_rendezvous", "talk_from"]

_START_S = 120.0
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""
_OWN = "lo"
"""The interface that no other machine reaches, as Linux calls it."""


def serve_rendezvous(host: str, port: int = 0) -> dist.TCPStore:
    """A store that lives as long as the returned object, on `host` alone; `.port` is where. Port 0 takes a free one."""
    listener = bound_socket(host, port)
    bound, limit = listener.getsockname()[1], timedelta(seconds=_START_S)
    return dist.TCPStore(host, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=limit)


def find_rendezvous(port: int, host: str) -> dist.TCPStore:
    """The store that another process serves there."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_START_S))


def job_store() -> tuple[Any, int, int]:
    """(store, rank, ranks) of the job of which torchrun, or Slurm with the same variables, started this process. Where rank 0 itself serves
    the store, and all are on one machine by their own word, nobody else reaches it. (The store of torchrun's agent is torchrun's.)"""
    host = os.environ.get("MASTER_ADDR", "")
    is_here = means_loopback(host)
    if is_here:
        only_here()
    if not is_here or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found: tuple[Any, int, int] = next(dist.rendezvous("env://"))
        return found
    port, rank, size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    return find_rendezvous(port, host) if rank else serve_rendezvous(host, port), rank, size


def join_group(backend: str) -> None:
    """Joins all ranks of that job in torch's default group, for as long as the process lives."""
    store, rank, size = job_store()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def only_here() -> None:
    """Lets gloo listen on loopback alone, in a process whose peers are all on this machine; else it takes the address of its host."""
    if any(name == _OWN for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _OWN)


def talk_from(address: str) -> None:
    """Lets gloo, and NCCL while it begins, talk to other machines by the interface that has this address."""
    if means_loopback(address):
        only_here()
    elif (found := next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", found)


def _address_of(interface: str) -> str | None:
    """The first IPv4 address of an interface; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            told = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(told[20:24])
