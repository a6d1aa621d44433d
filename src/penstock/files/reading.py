"""Reading the files that people hand over: a regular file, not too large, in UTF-8, or an error that says what is wrong with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.errors import InputError
from penstock.files.outputs import is_output

__all__ = ["MAX_TEXT_BYTES", "decoded", "decoded_exactly", "read_text", "readable_bytes", "readable_file"]

MAX_TEXT_BYTES = 2**30
"""Far beyond any plan, table or list of lengths; a larger file was named by mistake, and reading it would take all memory."""


def readable_file(path: str | Path, what: str) -> Path:
    """The path, if a regular file is there; `what` names the kind of file in the error ("plan", "cluster file").

    A named pipe without a writer would be waited for forever, and a device never ends.
    """
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{what} '{path}' does not exist. Check the path, or create the file first.") from None
    except (OSError, ValueError) as error:  # a name too long, a part that is no directory, a NUL in the name
        raise InputError(f"{what} '{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if is_output(path):
        raise InputError(f"{what} '{path}' would be overwritten by this command, which is to write there. Choose another name to write to.")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        raise InputError(f"{what} '{path}' is a {kinds.get(stat.S_IFMT(mode), 'device')}, a file was expected.")
    return path


def read_text(path: str | Path, what: str) -> str:
    """The UTF-8 text of a file, without the mark that spreadsheets put before it."""
    return decoded(readable_bytes(path, what, MAX_TEXT_BYTES), path, what)


def decoded(data: bytes, path: str | Path, what: str) -> str:
    """The UTF-8 text in the bytes of a file, its lines ended by \\n alone."""
    return decoded_exactly(data, path, what).replace("\r\n", "\n").replace("\r", "\n")


def decoded_exactly(data: bytes, path: str | Path, what: str) -> str:
    """The UTF-8 text in the bytes of a file, its line ends as they are."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} '{path}' is not UTF-8 text (byte {error.start}). Save it as UTF-8 (iconv -f latin1 -t utf-8).") from None


def readable_bytes(path: str | Path, what: str, max_bytes: int | None = None) -> bytes:
    """All bytes of a regular file, up to a limit."""
    path = readable_file(path, what)
    try:
        if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
            raise InputError(f"{what} '{path}' has {size / 2**30:.1f} GiB; at most {max_bytes / 2**30:.0f} GiB of it would be read.")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}.") from None
