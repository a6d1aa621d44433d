"""Samples that are already tokens in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.data.dataset import open_data
from penstock.errors import InputError
from penstock.jobs.rows import data_of_rows, folder_of_rows


class Counted(list[Any]):
    """Counts how often a sample is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_rows_become_a_folder_once(rows: list[dict[str, Any]]) -> None:
    folder = folder_of_rows(rows)
    assert folder_of_rows(list(rows)) == folder != folder_of_rows(rows[:-1])
    data = open_data(folder)
    data.check()
    assert [data[place]["input"].tolist() for place in range(len(data))] == [row["input_ids"] for row in rows]
    assert data.manifest.vocab_size == 1 + max(token for row in rows for token in row["input_ids"])


def test_given_lengths_spare_reading() -> None:
    rows = Counted([[1, 2, 3], np.array([4, 5])])
    data = data_of_rows(rows, [3, 2])
    assert rows.reads == 0 and list(data.lengths[0]) == [3, 2]
    assert data[1]["input"].tolist() == [4, 5] and rows.reads == 1


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ([], None, "the data has no samples"),
        ([{"text": "a"}], None, "sample 0 has text, no `input_ids`. Tokenise it first"),
        ([{"input_ids": [1], "labels": [1]}], None, "sample 0 has labels of its own"),
        (["text"], None, "sample 0 is not a list of token ids"),
        ([[0.5]], None, "sample 0 is not a list of token ids, but float64"),
        ([[1, 2]], [1, 2], "2 lengths given for 1 sample."),
        ([[1, 2]], [-2], "lengths: one of them is -2; 0 or more was expected."),
        ([[1, -2]], None, "sample 0 has -2 among its token ids"),
        (3, None, "of dicts with `input_ids` or of token ids, and int was given"),
        (iter([[1, 2]]), None, "and list_iterator was given"),
        ({"input_ids": [[1, 2]]}, None, "and dict was given"),
    ],
)
def test_what_are_no_samples(rows: Any, lengths: list[int] | None, message: str) -> None:
    with pytest.raises(InputError) as error:
        data_of_rows(rows, lengths)
    assert message in str(error.value)


def test_a_wrong_length_is_noticed_when_the_sample_is_read() -> None:
    with pytest.raises(InputError, match="sample 0 has 2 tokens, but its length was given as 3"):
        _ = data_of_rows([[1, 2]], [3])[0]
    with pytest.raises(InputError, match="sample 1 has 3 tokens, but its length was given as 2"):  # they would be trained on, unplanned
        _ = data_of_rows([[1, 2], [3, 4, 5]], [2, 2])[1]
