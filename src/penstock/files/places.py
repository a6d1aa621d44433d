"""Whether a file or a folder can be written under a name, asked before the work whose result it is to hold."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from penstock.errors import InputError
from penstock.files.outputs import is_special

__all__ = ["check_folder", "check_new_folder", "check_no_directory", "check_writable", "home_of"]


def check_writable(path: str | Path) -> None:
    """Refuses a name that no file can be written under, before the work whose result it is to hold: an existing directory, a place inside
    of something that is none, a name that is empty or too long, a folder that takes no files."""
    path = Path(path)
    check_no_directory(path)
    if not is_special(path):  # /dev/stdout, a named pipe: written through, not replaced
        _check_takes_files(home_of(Path(os.path.realpath(path)) if path.is_symlink() else path), path)


def check_folder(path: str | Path) -> None:
    """Refuses a name that is no folder and cannot become one, or one that takes no files."""
    path = Path(path)
    if _is_directory(path):
        _check_takes_files(path, path)
    elif os.path.lexists(path):
        raise InputError(f"'{path}' cannot be written: it is not a directory.")
    else:
        _check_takes_files(home_of(path), path)


def check_new_folder(path: str | Path) -> None:
    """Refuses a name that no new folder can have, or one that is not empty."""
    check_folder(path)
    if os.path.exists(path) and os.listdir(path):
        raise InputError(f"'{path}' exists and is not an empty folder. Remove it, or choose another.")


def check_no_directory(path: Path) -> None:
    if not path.name or _is_directory(path):
        raise InputError(f"'{path}' cannot be written: it is a directory, the name of a file was expected.")


def _is_directory(path: Path) -> bool:
    """Whether there is a directory; a name that cannot be looked up is told."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return False  # told with the part that is none
    except (OSError, ValueError) as error:  # a name too long, a NUL in the name, links in a circle
        raise InputError(f"'{path}' cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def home_of(path: Path) -> Path:
    """The nearest directory above a place that there is; anything else is refused."""
    home = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(home):
        raise InputError(f"'{path}' cannot be written: '{home}' is not a directory.")
    return home


def _check_takes_files(home: Path, path: Path) -> None:
    """Makes a nameless file in `home`: rights, mounts and quotas say no in more ways than can be asked for."""
    try:
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: '{home}' takes no files ({error.strerror}).") from None
