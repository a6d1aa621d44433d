"""Asking a running job for a move from another process: a file in the run's folder, which the job's first process looks for after each
step, and answers with events."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InputError
from penstock.files import read_json, write_json
from penstock.plans.plan import Plan
from penstock.plans.schema import plan_from_dict, plan_to_dict

__all__ = ["MoveRequest", "ask_for", "asked_for", "withdraw"]

_FILE = "replan.json"
_FORMAT, _VERSION = "penstock-replan", 1


class MoveRequest(msgspec.Struct, frozen=True):
    """A move that somebody wants."""

    id: str
    """By which events name it."""
    plan: dict[str, Any]
    at: int = 0
    """The first step under the plan; 0: the next."""
    format: str = _FORMAT
    version: int = _VERSION

    def wanted(self) -> Plan:
        """The plan."""
        return plan_from_dict(self.plan, "the plan that was asked for")


def ask_for(folder: str | Path, plan: Plan, at: int = 0) -> str:
    """Leaves a request in a run's folder; its id."""
    path = Path(folder) / _FILE
    request = MoveRequest(secrets.token_hex(8), plan_to_dict(plan), at)
    draft = path.with_name(f".{request.id}.{_FILE}")
    write_json(draft, msgspec.to_builtins(request))
    try:
        os.link(draft, path)  # of two who ask at once, one is refused
    except FileExistsError:
        raise InputError(f"run '{folder}' has been asked for a move that is still to come. Wait for it, or remove '{path}'.") from None
    except OSError:  # a file system without links
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return request.id


def asked_for(folder: str | Path) -> MoveRequest | None:
    """The request that a run's folder has, if any; a file that is none is refused."""
    path = Path(folder) / _FILE
    if not path.exists():
        return None
    try:
        found = msgspec.convert(read_json(path, "request"), MoveRequest)
    except msgspec.ValidationError as error:
        raise InputError(f"request '{path}': {error}.") from None
    if (found.format, found.version) != (_FORMAT, _VERSION):
        raise InputError(f"'{path}' is not version {_VERSION} of '{_FORMAT}'.")
    return found


def withdraw(folder: str | Path) -> None:
    """There is no request any more."""
    (Path(folder) / _FILE).unlink(missing_ok=True)
