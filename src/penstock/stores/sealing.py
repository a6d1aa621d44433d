"""The seal on every value of a store: a MAC under the job's key, bound to the name the value is kept under."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from penstock.errors import InputError
from penstock.stores.protocol import StoreError

__all__ = ["KEY_FILE_VARIABLE", "KEY_VARIABLE", "job_key", "open_seal", "read_private", "seal", "write_private"]

KEY_VARIABLE = "PENSTOCK_STORE_KEY"
KEY_FILE_VARIABLE = "PENSTOCK_STORE_KEY_FILE"

_MAGIC = b"PSK1"
_MAC_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _MAC_BYTES


def seal(key: bytes, name: str, payload: bytes) -> bytes:
    """`payload` with a head that only a holder of the key can make, and only for this name."""
    return _MAGIC + _mac(key, name, payload) + payload


def open_seal(key: bytes, name: str, sealed: bytes) -> bytes:
    """The payload, or a `StoreError` if the value was made without the key, for another name, or cut short."""
    if len(sealed) < _HEAD_BYTES or sealed[: len(_MAGIC)] != _MAGIC:
        raise StoreError(f"store entry '{name}' is refused: its {len(sealed)} bytes do not begin as an entry does. {_SUSPECT}")
    payload = sealed[_HEAD_BYTES:]
    if not hmac.compare_digest(_mac(key, name, payload), sealed[len(_MAGIC) : _HEAD_BYTES]):
        raise StoreError(f"store entry '{name}' ({len(payload)} bytes) is refused: its MAC does not match the job's key. {_SUSPECT}")
    return payload


_SUSPECT = "Something else writes to this store, or processes of the job hold different keys."


def _mac(key: bytes, name: str, payload: bytes) -> bytes:
    label = name.encode()
    return hmac.digest(key, len(label).to_bytes(4, "big") + label + payload, "sha256")


def job_key() -> bytes | None:
    """The job's key from the environment: in hexadecimal, or in a file that nobody else may read; None if neither is set."""
    if text := os.environ.get(KEY_VARIABLE):
        return _from_hex(text, f"environment variable {KEY_VARIABLE}")
    if path := os.environ.get(KEY_FILE_VARIABLE):
        return _from_hex(read_private(path, "key file"), f"key file '{path}'")
    return None


def _from_hex(text: str, what: str) -> bytes:
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise InputError(f"{what} is not hexadecimal. Make one with: python -c 'import secrets; print(secrets.token_hex(32))'") from None


def read_private(path: str | Path, what: str) -> str:
    """The text of a file, which must be its owner's alone."""
    from penstock.files import read_text

    text = read_text(path, what)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise InputError(f"{what} '{path}' may be read by others (mode {mode:04o}). Run: chmod 600 '{path}', and make a new secret.")
    return text


def write_private(path: str | Path, text: str) -> None:
    """Writes a file that is its owner's alone from its first byte on, replacing in one step what was there."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
