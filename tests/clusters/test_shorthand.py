"""Clusters in one word."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.clusters import resolve_cluster
from penstock.errors import InputError


@pytest.mark.parametrize(
    ("text", "description", "num_nodes"),
    [
        ("4xa100-40gb", "4 × a100-40gb", 1),
        ("16xa100-40gb", "2 × (8 × a100-40gb)", 2),
        ("12xh100", "8 × h100-80gb + 4 × h100-80gb", 2),
        ("1xh200", "1 × h200-141gb", 1),
        ("2xcpu", "2 × cpu", 1),
        ("t4", "1 × t4", 1),
        (" 2 x p4d.24xlarge + 6×G5.24xlarge ", "2 × p4d.24xlarge (8 × a100-40gb) + 6 × g5.24xlarge (4 × a10g)", 8),
        ("1xnd96asr_v4", "1 × Standard_ND96asr_v4 (8 × a100-40gb)", 1),
    ],
)
def test_shorthands(text: str, description: str, num_nodes: int) -> None:
    cluster = resolve_cluster(text)
    assert cluster.describe() == description
    assert cluster.num_nodes == num_nodes
    assert cluster.name == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xa100-40g", "'a100-40g' is not known. Did you mean 'a100-40gb'"),
        ("2xp4d.24xlrge", "'p4d.24xlarge'"),
        ("4xa100", "say which: 'a100-40gb' or 'a100-80gb'"),
        ("0xt4", "the count in '0xt4' is 0"),
        ("-3xt4", "is -3, 1 or more"),
        ("4xt4+", "cannot read ''"),
        ("4x", "cannot read '4x'"),
        ("4.5xt4", "cannot read '4.5xt4'"),
        ("9" * 5000 + "xt4", "cannot read"),
        ("٤xa100-40gb", "cannot read"),
        ("", "give a cluster file, 'local', or a shorthand"),
        ("t4\0", "give a cluster file"),
        ("absent.yaml", "'absent.yaml' does not exist"),
        ("no/where", "'no/where' does not exist"),
    ],
)
def test_wrong_shorthands_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_cluster(text)
    assert message in str(error.value)


def test_a_file_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("nodes: [{instance: g5.xlarge}]")
    monkeypatch.chdir(tmp_path)
    assert resolve_cluster("mine").describe() == "1 × g5.xlarge (1 × a10g)"


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "MINE.YML"])
def test_a_file_that_is_missing_is_told_as_a_file(name: str) -> None:
    with pytest.raises(InputError, match=f"cluster file '{name}'"):
        resolve_cluster(name)


def test_device_shorthands_have_no_price() -> None:
    assert resolve_cluster("8xt4+1xg5.xlarge").price_usd_per_h is None
    assert resolve_cluster("2xp4d.24xlarge+6xg5.24xlarge").price_usd_per_h == pytest.approx(2 * 32.7726 + 6 * 8.144)
