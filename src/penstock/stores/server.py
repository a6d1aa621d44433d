"""A Redis server for one job: on loopback unless told otherwise, behind a password that no command line shows."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote

from penstock.errors import InputError, PenstockError

__all__ = ["RedisServer", "start_redis"]

_PROGRAMS = ("redis-server", "valkey-server")
_READY = "Ready to accept connections"
_LAST_WORDS = 5


@dataclass(frozen=True)
class RedisServer:
    """A running server; it ends with `stop`."""

    process: subprocess.Popen[str] = field(repr=False)
    host: str
    port: int
    password: str | None = field(repr=False)
    tls: bool = False

    @property
    def address(self) -> str:
        """The address with its password, for clients."""
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{login}{host}:{self.port}/0"

    @property
    def shown_address(self) -> str:
        """The address for people's eyes."""
        return self.address.replace(quote(self.password, safe=""), "…") if self.password else self.address

    def log(self) -> Iterator[str]:
        """The server's output, line by line, until it ends."""
        assert self.process.stdout is not None
        return (line.rstrip("\n") for line in self.process.stdout)

    def stop(self) -> None:
        """Ends the server, and waits until it has ended."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_redis(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    password: str | None = None,
    insecure: bool = False,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> RedisServer:
    """Starts a server and returns once it accepts connections; port 0 takes a free one.

    Without a password given, one is generated; `insecure` leaves it out.
    """
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise InputError(f"there is no {' or '.join(_PROGRAMS)} on the path. Install one (Debian: apt-get install redis-server).")
    if (tls_cert is None) != (tls_key is None):
        raise InputError("a TLS certificate and its key go together: give both or neither.")
    host, port = _free_place(host, port)
    password = None if insecure else password or secrets.token_urlsafe(32)
    settings = _settings(host, port, password, tls_cert, tls_key)
    # The settings go in by a pipe: an argument would show the password to everyone who lists processes.
    process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = RedisServer(process, host, port, password, tls_cert is not None)
    try:
        assert process.stdin is not None
        process.stdin.write("".join(f"{line}\n" for line in settings))
        process.stdin.close()
        _await_ready(server)
    except BaseException:
        server.stop()
        raise
    return server


def _free_place(host: str, port: int) -> tuple[str, int]:
    """The numeric address of a host and a port that is free there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[0], probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise InputError(f"a store cannot listen on {host}:{port}: {error}. Take a free port and an address of this machine.") from None


def _settings(host: str, port: int, password: str | None, tls_cert: Path | None, tls_key: Path | None) -> list[str]:
    settings = [f"bind {host}", 'save ""', "appendonly no", "daemonize no", "maxmemory-policy noeviction", "tcp-backlog 511"]
    if tls_cert is None:
        settings.append(f"port {port}")
    else:
        files = f"tls-cert-file {_quoted(tls_cert)}", f"tls-key-file {_quoted(tls_key)}"
        settings += ["port 0", f"tls-port {port}", *files, "tls-auth-clients no"]
    if password:
        settings.append(f"requirepass {password}")
    elif not ip_address(host).is_loopback:
        settings.append("protected-mode no")  # the one thing that keeps Redis from answering strangers; asked for by `insecure`
    return settings


def _quoted(path: Path | None) -> str:
    text = str(path)
    if not Path(text).is_file():
        raise InputError(f"TLS file '{text}' does not exist.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _await_ready(server: RedisServer) -> None:
    said: list[str] = []
    for line in server.log():
        if _READY in line:
            return
        said = [*said, line][-_LAST_WORDS:]
    raise PenstockError("the Redis server ended at once; it said:\n" + "\n".join(f"  {line}" for line in said))
