"""`penstock store start`: a Redis server for one job."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import JsonFlag, err, out, print_json
from penstock.cli.once import OnceCommand
from penstock.cli.options import file_to_go_on_with
from penstock.errors import InputError, PenstockError, shell_words

__all__ = ["store"]

_SHORT_LIFE_S = 5.0
"""A server that dies sooner than this would die again."""

store = typer.Typer(add_completion=False, no_args_is_help=True)


@store.callback()
def _store() -> None:
    """Serve the store through which planners hand programs to ranks on other machines.

    Example: penstock store start
    """


@store.command("start", cls=OnceCommand)
def start(
    host: Annotated[str, typer.Option(help="Address to listen on; strangers can reach any but loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    path: Annotated[
        Path, typer.Option("--out", callback=file_to_go_on_with, help="File for address, password and job key, yours alone.")
    ] = Path("store.json"),
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM): the server then speaks TLS only.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Run without a password.")] = False,
    json: JsonFlag = False,
) -> None:
    """Start a Redis server for a job, and keep it running until Ctrl-C. Jobs find it by PENSTOCK_STORE=file:store.json.

    Example: penstock store start --out store.json
    """
    import secrets

    from penstock.stores.addresses import StoreFile, write_store_file
    from penstock.stores.server import start_redis

    _check_free(path)
    server = start_redis(host, port, insecure=insecure, tls_cert=tls_cert, tls_key=tls_key)
    started, before = time.monotonic(), signal.signal(signal.SIGTERM, _interrupt)
    handle = -1
    try:
        write_store_file(str(path), StoreFile(server.address, secrets.token_bytes(32)))
        handle = _lock(path)
        _tell(server, path, insecure, json)
        while True:
            said = deque(server.log(), maxlen=5)
            if time.monotonic() - started < _SHORT_LIFE_S:
                raise PenstockError("the Redis server ended by itself; it said:\n" + "\n".join(said))
            err().print("warning: the Redis server ended by itself and is started again", style="yellow")
            server.stop()
            started = time.monotonic()
            server = start_redis(server.host, server.port, password=server.password, insecure=insecure, tls_cert=tls_cert, tls_key=tls_key)
    except KeyboardInterrupt:
        err().print("store stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
        server.stop()
        if handle >= 0:
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):  # and nobody else's that took its place
                path.unlink()
            os.close(handle)


def _check_free(path: Path) -> None:
    """The file may be left over from a store that has ended, but not be anything else: it is removed in the end."""
    from penstock.stores.addresses import read_store_file

    if path.exists():
        try:
            read_store_file(str(path))
        except InputError as error:
            raise InputError(f"--out '{path}' exists and is not left over from a store: {error}") from None
        os.close(_lock(path))


def _lock(path: Path) -> int:
    """Holds a store's file for as long as the handle is open, or this process lives; refused where another process does."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"--out '{path}' is the file of a store that runs. End that one, or use another --out.") from None
    return handle


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _tell(server: Any, path: Path, insecure: bool, json: bool) -> None:
    if insecure:
        err().print("warning: this store runs without a password: whoever reaches it can read and change what is in it", style="yellow")
    if json:
        print_json({"address": server.shown_address, "file": path, "pid": server.process.pid})
    else:
        text = f"store at {server.shown_address}; address, password and key are in {path}"
        export = shell_words("export", f"PENSTOCK_STORE=file:{path.resolve()}")
        out().print(f"{text}\n{export}\nCtrl-C ends it", markup=False, soft_wrap=True)
    sys.stdout.flush()
