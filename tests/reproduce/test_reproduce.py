"""`penstock reproduce` on small data of the published formats: files, verdicts, and what is said where data is missing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from small_tables import aceso_tables

from penstock.cli.main import run
from penstock.reproduce import REPRODUCTIONS, Claim, Drawing, Plotted, aceso_cases
from penstock.reproduce.drawing import drawn
from penstock.reproduce.dynapipe_batches import seeded_lengths
from penstock.reproduce.figures import at_least, at_most, within

THROUGHPUT = "dataset,model,system,value,unit\na,BERT,gpipe,10.5,seqs/s\na,BERT,dynpipe,20,seqs/s\n"
LOG = "system,epoch,iter,global_iter,iteration_s,loss,prec1,running_s\n" + "".join(
    f"{system},{epoch},{i},{i},{0.1 * (epoch + 1) + 0.01 * i},2.3,0,1\n"
    for system in ("PipeDream", "DynPipe")
    for epoch in (0, 1)
    for i in range(3)
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "dynpipe"
    folder.mkdir(parents=True)
    (folder / "fig10_throughput.csv").write_text(THROUGHPUT)
    (folder / "fig12_iteration_time_raw.csv").write_text(LOG)
    for name, slow, fast in (("resnet50_cifar10", 4, 3), ("vgg16_cifar10", 4, 2), ("resnet50_image64", 9, 9), ("vgg16_image64", 8, 4)):
        rows = [f"PipeDream,{slow},90", f"DynPipe,{fast / 2},10", f"DynPipe,{fast},90"]
        (folder / f"fig9_{name}.csv").write_text("\n".join(["system,hours,top1_pct", *rows]) + "\n")
    return folder.parent


def test_figures_are_written_with_what_was_found(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    asked = [word for name in ("9", "10", "11", "12", "policies") for word in ("--figure", name)]
    assert run(["reproduce", "dynpipe", *asked, "--data", str(data), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {result["figure"]: result["verdict"] for result in told["results"]} == {"9": "does not hold", "10": "shown", "12": "shown"}
    result = json.loads((out / "dynpipe" / "9" / "result.json").read_text())
    (claim,) = result["claims"]
    assert result["took_s"] > 0 and result["cpu_s"] >= 0
    assert claim["found"] == 1.0 and claim["expected"] == "≥ 1.3" and not claim["holds"]  # both reach ResNet's accuracy at the same time
    rows = list(csv.DictReader((out / "dynpipe" / "12" / "figure.csv").open()))
    points = [(row["series"], row["x"], round(float(row["y"]), 3)) for row in rows]
    assert points[:2] == [("PipeDream", "0", 0.11), ("PipeDream", "1", 0.21)]
    assert all(row["published"] == "True" for row in rows)
    assert (out / "dynpipe" / "10" / "figure.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "index.html").read_text()
    assert "dynpipe/9/figure.svg" in page and "does not hold" in page and "vgg16_layer_profile.csv" in page
    assert any("fig11_gpu_util.csv" in text and "--data" in text for text in told["missing"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [(["aceso", "--figure", "8"], "Aceso's artifact"), (["fasop", "--figure", "pareto"], "settings.json"), (["acseo"], "aceso"),
     (["dynpipe", "--figure", "99"], "no figure '99'"), (["all", "--figure", "9"], "one system")],
    ids=["no data", "no setting", "unknown system", "unknown figure", "figure of all"],
)  # fmt: skip
def test_what_cannot_be_made_is_said(asked: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", *asked, "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.html").exists()


def test_a_drawing_is_the_same_each_time() -> None:
    drawing = Drawing([Plotted("a", ["x", "y"], [1.0, None], published=True), Plotted("b", ["x", "y"], [2.0, 3.0])], "x", "y")
    assert drawn("t", drawing, "svg") == drawn("t", drawing, "svg")


def test_points_are_not_joined_and_titles_say_what_is_not_of_the_run() -> None:
    """Names stand as comments in an SVG whose letters are paths."""
    ours, theirs = Plotted("a", [1.0, 2.0], [1.0, 3.0]), Plotted("b", [1.0, 2.0], [2.0, 2.0], published=True)
    lines, points = (drawn("t", Drawing([ours], "x", "y", kind=kind, diagonal=True), "svg") for kind in ("lines", "points"))
    assert b"stroke-width: 1.5" in lines and b"stroke-width: 1.5" not in points and b"this run" not in lines
    assert b"dashed: published" in drawn("t", Drawing([ours, theirs], "x", "y", kind="lines"), "svg")
    assert b"nothing of this run" in drawn("t", Drawing([theirs], "x", "y"), "svg")


def test_limits_belong_to_what_holds() -> None:
    assert at_least("a", 1.0, 1.0) == Claim("a", "≥ 1", 1.0, True) and not at_least("a", 0.99, 1.0).holds
    assert at_most("a", 1.0, 1.0).holds and not at_most("a", 1.01, 1.0).holds
    assert within("a", 2849.9, 2850, 0.001) == Claim("a", "2850 ± 0.1%", 2849.9, True)
    assert not within("a", 2846.0, 2850, 0.001).holds and not within("a", 2854.0, 2850, 0.001).holds


def test_figures_have_names_of_their_own_and_lengths_a_seed() -> None:
    for one in REPRODUCTIONS.values():
        assert len({figure.name for figure in one.figures}) == len(one.figures)
    assert seeded_lengths(5, True) == seeded_lengths(5, True) and all(sample.dec_length for sample in seeded_lengths(5, True))


def test_acesos_throughput_from_tables_and_result_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A bar of ours is Aceso's, times how much faster the plan found is by the tables; sizes without tables have none."""
    folder = tmp_path / "data" / "aceso"
    aceso_tables(folder / "eurosys", ("gpt_350M",), (1, 2), (1, 2))
    (folder / "ref-results").mkdir()
    for name, sizes, rows in (
        ("e2e_norm_thpt_large_gpt", "350M, 9B", ["megatron, 1, 1", "alpa, 0, 1.1", "aceso, 1.5, 1.6"]),
        ("perf_model_time_large_gpt", "350M, 9B", ["predict, 1000, 5", "actual, 1010, 5"]),
        ("e2e_norm_thpt_large_t5", "9B", ["megatron, 1", "alpa, 1", "aceso, 1.2"]),
        ("e2e_norm_thpt_large_resnet", "9B", ["megatron, 1", "alpa, 1", "aceso, 1.2"]),
        ("perf_model_time_large_resnet", "9B", ["predict, 7", "actual, 7"]),
    ):
        (folder / "ref-results" / f"{name}.csv").write_text("\n".join([f"size, {sizes}", *rows]) + "\n")
    monkeypatch.setattr(aceso_cases, "KNOWN_CASES", (aceso_cases.AcesoCase("eurosys", "gpt", "350M", 1, 2, 16, (1, 2), 20_000),))
    assert run(["reproduce", "aceso", "--figure", "7", "--data", str(folder.parent), "--out", str(tmp_path / "out"), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    rows = [row for row in csv.DictReader((tmp_path / "out" / "aceso" / "7" / "figure.csv").open()) if row["series"] == "Penstock"]
    assert [row["y"] != "" for row in rows] == [True, False, False, False] and result["verdict"] == "holds"
    assert float(rows[0]["y"]) == pytest.approx(1.5 * result["claims"][0]["found"])
