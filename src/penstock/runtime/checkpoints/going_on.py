"""Which run a checkpoint is of: seed, batches, data, tokenizer and model, without which going on would be another training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.data.dataset import DataSet, open_data
from penstock.data.fingerprints import fingerprint, tokenizer_fingerprint
from penstock.errors import InputError
from penstock.models.ops import Model
from penstock.runtime.checkpoints.reader import Checkpoint

__all__ = ["RUN", "check_goes_on", "differing_facts", "run_facts"]

RUN = "run"
"""Where the facts are in a checkpoint's state."""
_MAY_CHANGE = ("dtype", "dropout", "attention_dropout", "fused_attention", "seq_length")
"""Fields of a model that other weights do not follow from; a longest length that weights depend on shows in their shapes."""


def run_facts(model: Model, data: str, *, seed: int, global_batch: int) -> dict[str, Any]:
    """The facts that must stay the same in a run that goes on, whatever its plan, by the names that a user knows."""
    held = open_data(data)
    return {
        "--seed": seed,
        "global batch": global_batch,
        "tokenizer": tokenizer_fingerprint(held),
        "--data": {"folder": str(Path(data).resolve()), "fingerprint": fingerprint(held)},
        "shares of tasks": _shares(held),
        "model family": model.family,
        **{f"model's {name}": _plain(value) for name, value in model.config.items() if name not in _MAY_CHANGE},
    }


def _shares(held: DataSet) -> list[list[Any]]:
    """Name, samples and weight of each task; none where every sample comes once in an epoch, in an order that knows no tasks."""
    tasks = held.manifest.splits[held.split].tasks
    return [[task.name, task.stop - task.start, task.weight] for task in tasks if task.weight is not None]


def check_goes_on(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """Refuses a checkpoint of a run with other facts, with both values of each that differs."""
    before = checkpoint.state.get(RUN)
    if not isinstance(before, dict):
        return
    if wrong := list(differing_facts(before, facts, "in the checkpoint")):
        raise InputError(
            f"checkpoint '{checkpoint.path}' is of another run:\n" + "\n".join(wrong) + "\nGo on with what it had, "
            "or begin a new run with its weights by --weights in place of --resume."
        )


def differing_facts(before: Mapping[str, Any], facts: Mapping[str, Any], where: str) -> Iterator[str]:
    """A line for each fact that is another than `before`, which is what is said `where`."""
    for name, now in facts.items():
        if name in before and _compared(before[name]) != _compared(now):
            yield f"  {name}: {_shown(before[name])} {where}, {_shown(now)} asked for"


def _compared(value: Any) -> Any:
    """Data may have been moved; what is in it counts."""
    return value["fingerprint"] if isinstance(value, dict) and "fingerprint" in value else value


def _shown(value: Any) -> str:
    return f"'{value['folder']}' ({value['fingerprint']})" if isinstance(value, dict) and "folder" in value else repr(value)


def _plain(value: Any) -> Any:
    """The value as it comes back from JSON, to compare with one that was kept there."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
