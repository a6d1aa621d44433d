"""Where costs come from: formulas, or a profile that is made once for kinds of ops, precision and versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.clusters import resolve_cluster
from penstock.costs.profile import read_profile
from penstock.errors import InputError, PenstockError
from penstock.jobs import measuring
from penstock.jobs.measuring import chosen_costs
from penstock.models.catalog import resolve_model
from penstock.models.ops import Model
from penstock.plans.references import with_precision

MODEL = resolve_model("gpt-tiny")


def test_what_nobody_measures() -> None:
    assert chosen_costs("profile:x", MODEL, resolve_cluster("2xcpu"), "gpt-tiny")[0] == "profile:x"
    assert chosen_costs("auto", MODEL, resolve_cluster("2xcpu"), "gpt-tiny")[0] == "roofline"
    assert chosen_costs("auto", MODEL, resolve_cluster("4xa100-40gb"), "gpt-tiny")[0] == "roofline"
    with pytest.raises(InputError, match="is not this machine. Use --costs roofline".replace(".", r"\.")):
        chosen_costs("measure", MODEL, resolve_cluster("4xa100-40gb"), "gpt-tiny")


def test_a_profile_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def measure(path: Path, model: Model, *more: object) -> None:
        made.append(model.dtype)
        if model.dtype == "bf16":
            raise PenstockError("no device")

    monkeypatch.setattr(measuring, "_measure", measure)
    cluster = resolve_cluster("2xcpu")
    first, again = (chosen_costs("measure", MODEL, cluster, "gpt-tiny") for _ in range(2))
    assert first[0] == again[0] and "earlier" in again[1] and "earlier" not in first[1] and made == ["fp32"]
    assert chosen_costs("measure", with_precision(MODEL, "fp16"), cluster, "gpt-tiny")[0] != first[0]
    assert chosen_costs("measure", MODEL, resolve_cluster("4xcpu"), "gpt-tiny")[0] != first[0]  # where more ranks share the cores
    for _ in range(2):  # a failure is not kept
        with pytest.raises(PenstockError, match="no device"):
            chosen_costs("measure", with_precision(MODEL, "bf16"), cluster, "gpt-tiny")
    assert made == ["fp32", "fp16", "fp32", "bf16", "bf16"]


def test_ops_are_measured_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_BUDGET_S", 0.001)  # the first piece of work, and no more
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    measuring._measure(tmp_path / "profile.json", MODEL, "cpu", [1], 2, "gpt-tiny")
    assert read_profile(tmp_path / "profile.json").devices["cpu"].series
    with pytest.raises(PenstockError, match="divides no op"):
        measuring._measure(tmp_path / "other.json", MODEL, "cpu", [7], 2, "gpt-tiny")
