"""Finding a store by its address: `memory:`, `tcp://host:port`, `redis://…`, `rediss://…`, or `file:PATH` that holds one of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from penstock.errors import InputError, near_misses
from penstock.stores.protocol import Job, KeyValues, Store
from penstock.stores.ring import Ring
from penstock.stores.sealing import KEY_FILE_VARIABLE, KEY_VARIABLE, job_key, read_private, write_private

__all__ = [
    "ADDRESS_VARIABLE", "JOB_VARIABLE", "StoreFile", "connect", "job_from_environment", "open_store", "read_store_file",
    "without_password", "write_store_file",
]  # fmt: skip

ADDRESS_VARIABLE = "PENSTOCK_STORE"
JOB_VARIABLE = "PENSTOCK_JOB"

_SCHEMES = ("tcp", "redis", "rediss", "file")


@dataclass(frozen=True)
class StoreFile:
    """The file that `penstock store start` leaves for a job: where its server is, with its password, and a key for the job."""

    address: str = field(repr=False)
    key: bytes = field(repr=False)


def job_from_environment(num_ranks: int, *, first: int = 0) -> tuple[str, Job]:
    """The store and the job that PENSTOCK_STORE, PENSTOCK_JOB and the key's variables (or the store file) name."""
    address, name = os.environ.get(ADDRESS_VARIABLE), os.environ.get(JOB_VARIABLE)
    if not address or not name:
        raise InputError(f"planners need a store: set {ADDRESS_VARIABLE} and {JOB_VARIABLE}, or plan inline, without planners.")
    key = job_key()
    if key is None and address.startswith("file:"):
        key = read_store_file(address.removeprefix("file:")).key
    if key is None:
        raise InputError(f"job '{name}' has no key: set {KEY_FILE_VARIABLE} (a file of mode 0600) or {KEY_VARIABLE} on all ranks.")
    return address, Job(name, key, num_ranks, first=first)


def open_store(address: str, job: Job, *, wait_s: float = 1800.0) -> Store:
    """Connects to the store at an address; threads of one process share `memory` values through `connect` instead."""
    return Ring(connect(address, job.key), job, wait_s=wait_s)


def connect(address: str, key: bytes) -> KeyValues:
    """A connection to the server at an address; the one of a job serves holders of its key alone."""
    scheme, colon, rest = address.partition(":")
    if scheme == "memory":
        from penstock.stores.memory import MemoryValues

        return MemoryValues()
    if not colon or scheme not in _SCHEMES:
        raise InputError(f"store address begins with '{scheme}:'. {near_misses(scheme, (*_SCHEMES, 'memory'))}")
    if scheme == "file":
        return connect(read_store_file(rest).address, key)
    if scheme == "tcp":
        from penstock.stores.tcp import TcpValues

        return TcpValues(*_host_and_port(address), key)
    from penstock.stores.redis import RedisValues

    return RedisValues(address)


def without_password(address: str) -> str:
    """The address itself, refused if it holds a password: every process of a machine reads command lines, and run folders are shared."""
    try:
        parts = urlsplit(address)
        secret = parts.password is not None or "password" in parse_qs(parts.query, keep_blank_values=True)
    except ValueError:  # no URL, as `connect` will say
        secret = False
    if secret:
        raise InputError(
            "the store's address holds a password, which a command line and the folder of a run would show to others. Put the address into "
            f"{ADDRESS_VARIABLE}, or give the file that `penstock store start` wrote: --store file:store.json."
        )
    return address


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        if parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise InputError(f"store address '{address}' is not of the form tcp://host:port.")


def write_store_file(path: str, content: StoreFile) -> None:
    """Writes the file, readable by its owner alone."""
    write_private(path, json.dumps({"address": content.address, "key": content.key.hex()}) + "\n")


def read_store_file(path: str) -> StoreFile:
    """Reads the file, if nobody else may."""
    text = read_private(path, "store file")
    try:
        fields = json.loads(text)
        content = StoreFile(str(fields["address"]), bytes.fromhex(fields["key"]))
    except (ValueError, KeyError, TypeError):
        raise InputError(f"store file '{path}' has no address and key; `penstock store start` writes such files.") from None
    if content.address.startswith("file:"):
        raise InputError(f"store file '{path}' leads to another file; it must hold the address of a server.")
    return content
