"""Rows of Parquet files and of folders that Hugging Face's `datasets` saved, through pyarrow, which is imported here alone.

A folder holds Arrow streams, named in `state.json`; one of several splits has such a folder for each, named in `dataset_dict.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.data.text.lines import PAIRS, TEXT, LineFields
from penstock.errors import InputError
from penstock.files import read_json

__all__ = ["column_files", "column_rows", "is_columns"]

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"


def is_columns(path: Path) -> bool:
    """Whether this is a Parquet file, or a folder of `datasets`."""
    return path.suffix.lower() == ".parquet" if not path.is_dir() else (path / _STATE).is_file() or (path / _SPLITS).is_file()


def column_files(path: Path) -> list[Path]:
    """The files that hold the samples; of a folder with splits those of `train`, of any other file itself."""
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        splits = read_json(path / _SPLITS, "dataset")
        names = splits.get("splits", []) if isinstance(splits, dict) else []
        if _TRAIN not in names:
            raise InputError(f"dataset '{path}' has the splits {', '.join(map(str, names)) or 'none'}. Give the folder of one of them.")
        path = path / _TRAIN
    state = read_json(path / _STATE, "dataset")
    named = state.get("_data_files", []) if isinstance(state, dict) else []
    files = [one.get("filename", "") for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    if not files or any(not isinstance(name, str) or Path(name).name != name for name in files):
        raise InputError(f"dataset '{path}': {_STATE} names no files of samples. Save it again with save_to_disk.")
    return [path / name for name in files]


def column_rows(path: Path, fields: LineFields) -> Iterator[dict[str, str]]:
    """The texts of each sample, under the columns that `fields` names, or `input` and `target`, or `text`."""
    arrow = _pyarrow(path)
    try:
        for file in column_files(path):
            yield from _texts(path, _batches(arrow, file, fields))
    except (arrow.lib.ArrowException, OSError) as error:
        raise InputError(f"data '{path}' cannot be read as columns: {error}.") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"data '{path}' needs the Python package 'pyarrow'. Install it: pip install pyarrow.") from None
    return pyarrow


def _batches(arrow: Any, file: Path, fields: LineFields) -> Iterator[Any]:
    """Record batches of one file, of the columns that are wanted."""
    if file.suffix.lower() == ".parquet":
        found = arrow.parquet.ParquetFile(file)
        yield from found.iter_batches(columns=list(_wanted(file, found.schema_arrow.names, fields)))
        return
    with arrow.memory_map(str(file)) as source:
        try:
            batches = arrow.ipc.open_stream(source)
        except arrow.lib.ArrowInvalid:  # the other of Arrow's two formats
            found = arrow.ipc.open_file(source)
            batches = (found.get_batch(number) for number in range(found.num_record_batches))
        for batch in batches:
            yield batch.select(list(_wanted(file, batch.schema.names, fields)))


def _wanted(path: Path, columns: Sequence[str], fields: LineFields) -> LineFields:
    wanted = fields or (PAIRS if set(PAIRS) <= set(columns) else TEXT)
    if not set(wanted) <= set(columns):
        expected = " and ".join(f"`{name}`" for name in fields) if fields else "`text`, or `input` and `target`,"
        raise InputError(f"data '{path}' has columns {', '.join(columns) or 'none'}; {expected} were expected.")
    return wanted


def _texts(path: Path, batches: Iterator[Any]) -> Iterator[dict[str, str]]:
    for batch in batches:
        for row in batch.to_pylist():
            odd = next((name for name, value in row.items() if not isinstance(value, str | None)), None)
            if odd is not None:
                raise InputError(f"data '{path}', column '{odd}': texts were expected, it holds {type(row[odd]).__name__}.")
            yield {name: value or "" for name, value in row.items()}
