"""`penstock list`: everything with a name is there, words narrow it down, and near names are offered."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import run
from penstock.clusters.devices import DEVICES
from penstock.clusters.instances import INSTANCES
from penstock.costs.sources import shipped_profiles
from penstock.models.catalog import model_names
from penstock.schedules.rules import SCHEDULES

CATALOGUES = {
    "models": model_names(), "devices": DEVICES, "clusters": INSTANCES, "schedules": SCHEDULES, "profiles": shipped_profiles(),
}  # fmt: skip


@pytest.mark.parametrize("what", CATALOGUES)
def test_everything_with_a_name_is_listed(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[what]
    assert [row["name"] for row in rows] == list(CATALOGUES[what])
    assert run(["list", what]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in CATALOGUES[what])


def test_a_word_narrows_it_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "models", "LLAMA", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert {row["family"] for row in rows} == {"llama"} and rows[0]["name"] == "llama-tiny"
    assert run(["list", "clusters", "a100", "--json"]) == 0  # by what is in them, too
    assert "p4d.24xlarge" in [row["name"] for row in json.loads(capsys.readouterr().out)["clusters"]]


@pytest.mark.parametrize(
    ("what", "word", "texts"),
    [
        ("clusters", "p4d.", ["8 × a100-40gb", "nvlink3", "400 Gbit/s", "$32.77", "2025-01", "Amazon EC2 on-demand list"]),
        ("devices", "h200", ["140.4 GiB", "4,800 GB/s", "989 ", "67 ", "nvlink4"]),
        ("devices", "t4", ["15.0 GiB", "320 GB/s", "65 ", "8.1 "]),
        ("models", "t5-tiny", ["t5", "64 + 32", "fp32"]),
        ("schedules", "gpipe", ["no"]),
    ],
)
def test_figures_have_the_units_that_vendors_print(what: str, word: str, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", what, word, "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in texts), shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modles"], "there is no list of 'modles'. Did you mean 'models'"),
        (["everything"], "Known: clusters, devices, models, profiles, schedules."),
        (["models", "gpt-1.4b"], "no model has 'gpt-1.4b' in its name. Did you mean 'gpt-1.3b'"),
        (["devices", "\x1b[2J"], "no device has '\\x1b[2J' in its name"),
        ([], "Missing argument 'WHAT'"),
    ],
)
def test_what_is_not_there(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", *arguments]) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and told.out == ""
