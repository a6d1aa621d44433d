"""What a report holds: columns that come back, the same bytes each time, no folders, honest words about what is damaged, refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.columns import unpacked

import penstock
from penstock.batching.plan import BatchPlan, ReplicaBatch
from penstock.cli.main import run
from penstock.costs.sources import shipped_profiles
from penstock.data.dataset import open_data
from penstock.errors import InputError, plural
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.schema import write_plan
from penstock.reports import span_lanes
from penstock.reports.blocks import Facts, Lane, SpanKind, Spans, Text
from penstock.reports.columns import packed
from penstock.reports.document import document, script
from penstock.reports.pictures import pictures_of
from penstock.reports.report import kind_of, report_of
from penstock.reports.span_lanes import SpanLanes
from penstock.reports.tables import slug, table_of, tables_of
from penstock.reports.units import shown
from penstock.runtime.request import TrainRequest, TrainResult
from penstock.runtime.telemetry.spans_reader import read_spans
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import execute
from penstock.timing.workload import workload_of

PAGE = Path(__file__).parents[2] / "src" / "penstock" / "reports" / "page"
PLAN = Path(__file__).parents[2] / "examples" / "plans" / "gpt-1.3b-pp4.json"


def node(code: str) -> Any:
    """What a module that imports the page's own prints as JSON."""
    if shutil.which("node") is None:
        pytest.skip("there is no node on this machine")
    done = subprocess.run(["node", "--input-type=module"], input=code, text=True, capture_output=True, cwd=PAGE, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@given(st.lists(st.integers(-(2**52), 2**52), max_size=50), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_columns_come_back(values: list[int], shift: int) -> None:
    numbers = np.array(values, np.int64) >> (16 * shift)
    assert unpacked(packed(numbers)).tolist() == numbers.tolist()
    reals = numbers.astype(np.float32)
    assert unpacked(packed(reals)).tolist() == reals.tolist()


def test_a_browser_reads_columns_and_units_as_python_does() -> None:
    arrays = [np.array([0, 5, 255]), np.array([-1, 2**40, -(2**50), 7]), np.array([1.5, np.nan, -3e30]), np.zeros(0, np.int64)]
    arrays.append(np.arange(70_000))
    columns = [packed(one) for one in arrays]
    numbers = [0, 1, 1.5, 1e-9, 3.33e-5, 0.0999, 0.51, 12, 119.6, 121, 999.994, 1000, 3599.6, 5000, 12345, 999_600, 2e5, 1e6, 7.77e9, 3e13]
    asked = [(number, unit) for number in numbers for unit in ("time", "bytes", "count", "usd", "share", "number")]
    found = node(f"""
        import {{ unpack }} from "./columns.js"; import {{ plural, shown }} from "./units.js";
        const columns = {json.dumps(columns)}, asked = {json.dumps(asked)}, arrays = [];
        for (const one of columns) arrays.push(Array.from(await unpack(one, one.data), (value) => Number.isNaN(value) ? "nan" : value));
        const counts = [0, 1, 2, 1536].map((value) => plural(value, "row"));
        console.log(JSON.stringify([arrays, asked.map(([value, unit]) => shown(value, unit)), counts]));
    """)
    expected = [one.astype(np.float32).tolist() if one.dtype.kind == "f" else one.tolist() for one in arrays]
    assert found[0] == [["nan" if np.isnan(value) else value for value in one] for one in expected]
    assert found[1] == [shown(value, unit) for value, unit in asked] and found[2] == [plural(value, "row") for value in (0, 1, 2, 1536)]


def test_shares_of_pixels_add_up_however_far_away() -> None:
    found = node("""
        import { addExact, addLevels, levelsOf } from "./shares.js";
        let seed = 7; const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
        const n = 5000, start = new Float64Array(n), length = new Float64Array(n), colour = new Uint8Array(n);
        let time = 0, sums = [0, 0, 0];
        for (let at = 0; at < n; at++) {
            time += Math.floor(random() * 50);
            start[at] = time;
            length[at] = Math.floor(random() * 200);
            time += length[at];
            colour[at] = at % 3;
            sums[at % 3] += length[at];
        }
        const lane = { first: 0, count: n, begin_ns: 100 }, high = time + 100, width = 313;
        const told = (shares) => [0, 1, 2].map((own) => shares.filter((_, at) => at % 3 === own).reduce((a, b) => a + b, 0) * high / width);
        // Three colours that are one channel each: what is drawn is the time of each kind.
        const tints = [1, 0, 0, 0, 1, 0, 0, 0, 1];
        const paint = (width) => addExact(lane, start, length, colour, tints, 0, high, width, new Float32Array(3 * width));
        const exact = told(paint(width)), levels = levelsOf(paint(2048), 2048);
        const far = told(addLevels(levels, 0, high, 0, high, width, new Float32Array(3 * width)));
        console.log(JSON.stringify({ sums, exact, far, levels: levels.map((one) => one.length / 3) }));
    """)
    assert found["exact"] == pytest.approx(found["sums"], rel=1e-4) and found["far"] == pytest.approx(found["sums"], rel=1e-3)
    assert found["levels"] == [2048, 1024, 512, 256, 128, 64]


def test_what_a_search_text_means_and_which_choices_are_not_beaten() -> None:
    found = node("""
        import { wanted } from "./spans.js"; import { front } from "./scatter.js"; import { decimated } from "./curves.js";
        const { least, most } = decimated([0, 1, 2, 3], [5, NaN, 1, 9], 0, 3, 2);
        const best = front([[1, 9], [2, 3], [3, 3], [4, 1], [1, 8], [0, NaN]]);
        console.log(JSON.stringify([wanted("F17 stage 3"), wanted("b2"), wanted("?"), best, [...least], [...most]]));
    """)
    assert found == [
        {"letter": "F", "microBatch": 17, "stage": 3}, {"letter": "B", "microBatch": 2, "stage": None}, None, [4, 1, 3], [5, 1], [5, 9],
    ]  # fmt: skip


def test_modules_never_write_markup() -> None:
    """Names reach the page as text; there is one way in, and it is none of these."""
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.on", script())
    assert "</script" not in script()


def test_data_ends_no_script_element() -> None:
    """Whatever strings it holds; the test in a browser needs one, this does not."""
    page = document("</script><!-- <script>", [], [])
    data = page[page.index('id="data">') : page.index('<script type="module">')]
    assert data.count("</script>") == 1 and "<!--" not in data and "<script" not in data


def test_the_same_plan_gives_the_same_bytes_and_no_folders(tmp_path: Path) -> None:
    folder = tmp_path / "somebody" / "secret"
    folder.mkdir(parents=True)
    plan = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4)
    write_plan(folder / "plan.json", replace(plan, notes=(f"made in {folder}/plan.json",)))
    for name in ("a.html", "b.html"):
        assert run(["report", str(folder / "plan.json"), "--out", str(tmp_path / name), "--json"]) == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "b.html").read_text(encoding="utf-8") and "secret" not in page and "made in plan.json" in page
    assert run(["report", str(folder / "plan.json"), "--out", str(tmp_path / "c.html"), "--with-paths"]) == 0
    assert "secret" in (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose plan names files for its cluster and its costs, and whose data lie beside it."""
    home = tmp_path_factory.mktemp("trained")
    folder, cluster, profile = home / "run", home / "pool.yaml", home / "measured.json.gz"
    cluster.write_text("name: pool\nnodes: [{device: h200-141gb, gpus: 4}]\n", encoding="utf-8")
    shutil.copyfile(shipped_profiles()["h200-141gb"], profile)
    shutil.copytree(data, home / "data")
    plan = uniform_plan("gpt-tiny", "4xh200-141gb", global_batch=8, micro_batch=4, layout="packed", pp=2)
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic"), cluster=str(cluster), costs=f"profile:{profile}")
    PlanTrainer(TrainRequest(plan, str(home / "data"), 3, str(folder), device="cpu")).train()
    return folder


@pytest.fixture
def a_run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def spans_of(folder: Path, **options: Any) -> Spans:
    [subject] = report_of([folder], **options).subjects
    [block] = [block for view in subject.views if view.name == "timeline" for block in view.blocks if isinstance(block, Spans)]
    return block


def test_a_run_shows_every_span_above_its_prediction(a_run: Path) -> None:
    block = spans_of(a_run)
    measured = [lane for lane in block.lanes if lane.role == "measured"]
    assert [lane.name for lane in measured] == ["rank 0", "rank 1"] and len(block.marks) == 3
    assert all(step.padding_share == 0.0 for step in read_steps(a_run / "steps.jsonl"))  # packed
    for lane in measured:
        rank = read_spans(a_run / f"rank-{int(lane.name[5:]):05d}.spans")
        own = slice(lane.first, lane.first + lane.count)
        assert lane.count == len(rank.spans)
        assert block.length_ns[own].tolist() == (rank.spans["end_ns"] - rank.spans["start_ns"]).tolist()
    table = table_of(block)
    assert table is not None
    ranks = [read_spans(a_run / f"rank-{number:05d}.spans") for number in (0, 1)]
    begin = min(start for rank in ranks for start in rank.iterations.values())
    starts = [int(start) - begin for rank in ranks for start in rank.spans["start_ns"]]
    assert [row[5] for row in table[1] if row[1] == "measured"] == starts
    predicted = [lane for lane in block.lanes if lane.role == "predicted"]
    assert len(predicted) == 2 * 3 and {lane.begin_ns for lane in predicted} == {begin for begin, _ in block.marks}
    assert len(spans_of(a_run, steps=(1, 1)).marks) == 1
    with pytest.raises(InputError, match="has spans of steps 0 to 2"):
        spans_of(a_run, steps=(7, 9))


def test_a_run_that_is_moved_keeps_its_predictions(trained: Path, tmp_path: Path) -> None:
    """Though data, profile and cluster file are gone; what it kept for that is no data to train on."""
    home = Path(shutil.copytree(trained.parent, tmp_path / "home"))
    text = (home / "run" / "run.json").read_text(encoding="utf-8").replace(str(trained.parent), str(home))
    (home / "run" / "run.json").write_text(text, encoding="utf-8")
    page = report_of([home / "run"]).html()
    (home / "run").rename(tmp_path / "run")
    shutil.rmtree(home)
    moved = report_of([tmp_path / "run"])
    assert moved.html() == page and "without a prediction" not in page
    assert len([lane for lane in spans_of(tmp_path / "run").lanes if lane.role == "predicted"]) == 2 * 3
    with pytest.raises(InputError, match="keeps the lengths of samples alone"):
        open_data(tmp_path / "run" / "inputs" / "data").check()


def test_damaged_files_are_left_out_and_named(a_run: Path) -> None:
    (a_run / "rank-00001.spans").write_bytes(b"nonsense")
    with (a_run / "steps.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": "x"}\n{"step": 3, "lo')
    (a_run / "inputs" / "data" / "train_input.lengths.npy.gz").write_bytes(b"nonsense")
    [subject] = report_of([a_run]).subjects
    notes = [block.text for block in subject.views[0].blocks if isinstance(block, Text) and block.note]
    assert any("rank-00001.spans" in note for note in notes) and any("steps.jsonl, line 4" in note for note in notes)
    assert any("no spans of ranks 1" in note for note in notes) and any("without a prediction" in note for note in notes)
    [facts_] = [block for block in subject.views[0].blocks if isinstance(block, Facts)]
    assert "predicted" not in {fact.label for fact in facts_.facts} and {"step", "loss"} <= {fact.label for fact in facts_.facts}


def test_a_run_and_a_plan_are_compared(a_run: Path, tmp_path: Path) -> None:
    out, tables = tmp_path / "r.html", tmp_path / "tables"
    assert run(["report", str(a_run), "--against", str(PLAN), "--out", str(out), "--csv", str(tables)]) == 0
    report = report_of([a_run, PLAN])
    assert [view.name for _, view in report.views][-2:] == ["compare", "sources"] and out.stat().st_size > 50_000
    assert sorted(path.name for path in tables.iterdir()) == sorted(tables_of(report))
    assert (tables / "run-run-steps.csv").read_text(encoding="utf-8").startswith("step,")


def test_very_many_spans_are_told_in_coarser_ticks_that_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_lanes, "_EXACT", 10)
    rng, lanes = np.random.default_rng(3), SpanLanes()
    ends = np.cumsum(rng.integers(1, 5000, 2000))
    starts, ends = ends[::2], ends[1::2]
    zeros = np.zeros(len(starts), np.int64)
    lanes.add_arrays("rank 0", "", "measured", starts, ends, zeros + lanes.kind("F"), zeros, zeros)
    block = lanes.block("many")
    table = table_of(block)
    assert block.tick_ns == 1000 and table is not None
    assert np.abs(np.array([row[5] for row in table[1]]) - starts).max() <= 500
    assert np.abs(np.array([row[5] + row[6] for row in table[1]]) - ends).max() <= 500


def test_charts_are_drawn_without_a_browser(a_run: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    assert run(["report", str(a_run), "--out", str(tmp_path / "r.html"), "--figures", str(figures)]) == 0
    drawn = {path.name: path.read_bytes() for path in figures.iterdir()}
    assert {"run-run-steps.svg", "run-timeline-measured-and-below-it-predicted.svg"} <= set(drawn)
    assert all(b"<svg" in one and len(one) < 500_000 for one in drawn.values())
    assert drawn == pictures_of(report_of([a_run]))


def test_a_notebook_keeps_a_plan() -> None:
    plan = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4)
    shown_ = penstock.report(replace(plan, notes=("<script>alert(1)</script>",)), PLAN)._repr_html_()
    assert len(shown_) < 200_000 and shown_.count("<svg") >= 2 and "<script" not in shown_ and "&lt;script&gt;" in shown_
    assert "4 stages" in shown_ and "tokens/s" in shown_


def test_objects_show_themselves(trained: Path) -> None:
    """Plans, batches, timelines and results: what a notebook keeps is small and still, the page runs in a frame of its own."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=2, pp=4)
    run_ = execute(schedule_of("1f1b", 2, 3), workload_of(np.ones((2, 2, 3))))
    micro_batch = MicroBatch(0, (1, 2), "padded", (5, 9), (), 9)
    batch = BatchPlan((ReplicaBatch((micro_batch,), schedule_of("1f1b", 1, 1), 1.0, ()),), 1.0, 0.0, (), "x")
    result = TrainResult(0, 3, (), (), 0.0, 0.0, {}, str(trained / "checkpoints"))
    for one, words in ((plan, "4 stages"), (run_, "2 devices, 8.00 s in all, of which devices compute 75.0%"), (batch, "padding"),
                       (result, "A run of 3 steps")):  # fmt: skip
        still, frame = one._repr_html_(), one.report()._repr_html_()
        assert words in still and "<svg" in still and "<script" not in still and len(still) < 200_000
        assert frame.startswith("<iframe") and 'sandbox="allow-scripts allow-downloads"' in frame and frame.count('"') == 8
    missing = replace(plan, costs="profile:nowhere.json")._repr_html_()
    assert missing.startswith("<pre>Plan(") and "does not exist" in missing


def test_names_of_files_stay_in_their_folder() -> None:
    assert slug("../../etc/x <b>") == "etc-x-b" and len(slug("n" * 1000)) == 60 and slug("\u202e") == ""


def test_what_is_no_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text('{"format": "penstock-search", "version": 9}', encoding="utf-8")
    (tmp_path / "y.json").write_text('{"format": "penstock-search", "version": 1}', encoding="utf-8")
    (tmp_path / "z.json").write_text("[1]", encoding="utf-8")
    wrong = {"empty": "neither the folder of a run", "x.json": "is not version 1", "y.json": "lacks or mistakes", "z.json": "holds list"}
    for name, words in wrong.items():
        assert run(["report", str(tmp_path / name), "--out", str(tmp_path / "r.html")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
    assert run(["report", str(PLAN), "--out", str(tmp_path / "r.html"), "--steps", "9-1"]) == 2
    assert kind_of(PLAN)[0] == "plan"


def test_times_of_spans_are_counted_from_where_their_lane_begins() -> None:
    lanes = Lane("rank 0", "", "measured", 0, 2, begin_ns=100), Lane("rank 1", "", "measured", 2, 1, begin_ns=40)
    gaps, lengths, none = (np.array(values) for values in ([5, 10, 1], [20, 30, 7], [0, 0, 0]))
    spans = Spans("timeline", (SpanKind("forward", "F", "forward"),), lanes, gaps, lengths, none, none, np.arange(3))
    found = table_of(spans)
    assert found is not None
    assert [(row[0], *row[4:]) for row in found[1]] == [("rank 0", 0, 105, 20), ("rank 0", 1, 135, 30), ("rank 1", 2, 41, 7)]
