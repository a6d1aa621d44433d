"""The page in a browser, opened from disk with the network cut and its policy in force: every view, by mouse and by keys, and silent."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import NO_CHROMIUM, axe_script, browser_path, opened

from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.reports.blocks import ChartLine, Charts, Fact, Facts, Heat, Scatter, Stack, Subject, Table, Text, View
from penstock.reports.document import document
from penstock.reports.plan_views import plan_subject
from penstock.reports.search_views import pareto_views, search_views
from penstock.reports.tables import table_of

HOSTILE = ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{$", "../x", "\u202etxt.exe\u2066", "n" * 10_000]

expect = pytest.importorskip("playwright.sync_api", reason="the Python package 'playwright' is not installed").expect
if browser_path() is None:
    pytest.skip(NO_CHROMIUM, allow_module_level=True)
REACHED = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")].filter(
    (one) => one.checkVisibility()
).map((one) => ({
    name: (one.getAttribute("aria-label") || one.closest("label")?.textContent || one.textContent).trim(),
    top: [...document.querySelectorAll("section")].indexOf(one.closest("section")),
}))"""


def a_plan(**degrees: Any) -> Plan:
    return uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=32, micro_batch=2, pp=4, **degrees)


def written(folder: Path, subjects: list[Subject], shared: list[View] = []) -> Path:  # noqa: B006 — nobody changes it
    path = folder / "report.html"
    path.write_text(document("a report", subjects, shared), encoding="utf-8")
    return path


def timeline_rows(subject: Subject) -> list[Any]:
    [view] = [view for view in subject.views if view.name == "timeline"]
    table = table_of(view.blocks[0])
    assert table is not None
    return list(table[1])


def test_a_plan_is_drawn_in_silence_and_its_hover_is_the_span(tmp_path: Path) -> None:
    subject = plan_subject("plan.json", a_plan())
    with opened(written(tmp_path, [subject])) as found:
        page = found.page
        assert [one.inner_text() for one in page.query_selector_all("section > h2")] == ["Glance", "Plan", "Stages", "Timeline"]
        page.fill("input[type=search]", "B3 stage 2")
        page.press("input[type=search]", "Enter")
        expect(page.locator("#timeline .hover")).to_contain_text("B3")
        said = page.inner_text("#timeline .hover")
        [row] = [row for row in timeline_rows(subject) if row[2:5] == ("backward", 2, 3)]
        assert f"= {row[6]} ns, from" in said and f"= {row[5]} ns; from" in said
        # Its sender and its receiver are told and framed, and keys lead to them.
        assert "; from device 3: ranks 3: B3, stage 3; to device 1: ranks 1: B3, stage 1" in said
        page.focus("canvas.timeline")
        page.keyboard.press("n")
        expect(page.locator("#timeline .hover")).to_contain_text("device 1: ranks 1: B3 (backward), stage 1")
        page.keyboard.press("p")
        expect(page.locator("#timeline .hover")).to_contain_text("device 2: ranks 2: B3 (backward), stage 2")
        page.keyboard.press("Escape")
        assert page.get_by_text("open in Perfetto").count() == 0  # which answers nobody who comes from a file
        box = page.query_selector("canvas.timeline").bounding_box()
        page.mouse.move(box["x"] + 150 + (box["width"] - 158) / 2, box["y"] + 18 + 2.5 * 20)
        assert found.silent()


def test_what_is_drawn_is_as_busy_as_what_is_simulated(tmp_path: Path) -> None:
    """From afar, where no bar is as wide as a pixel: the strip of colours against the sum of spans."""
    plan = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=2048, micro_batch=1, pp=4)
    subject = plan_subject("plan.json", plan)
    rows = [row for row in timeline_rows(subject) if row[1] == "predicted"]
    end = max(row[5] + row[6] for row in timeline_rows(subject))
    busy = sum(row[6] for row in rows) / (4 * end)
    with opened(written(tmp_path, [subject])) as found:
        page = found.page
        page.wait_for_selector("canvas.timeline[data-busy]")
        page.uncheck("#timeline label:has-text('sends') input")
        assert float(page.get_attribute("canvas.timeline", "data-busy")) == pytest.approx(busy, abs=0.002)
        # Of each pixel of the first four rows: how far it is from white, against the whole strength of the colours.
        drawn = page.evaluate("""() => {
            const canvas = document.querySelector("canvas.timeline"), pen = canvas.getContext("2d"), width = canvas.width - 158;
            const pixels = pen.getImageData(150, 18, width, 80).data;
            let sum = 0;
            for (let row = 0; row < 4; row++)
                for (let x = 0; x < width; x++) sum += (255 - pixels[4 * ((20 * row + 8) * width + x)]) / 255;
            return sum / (4 * width);
        }""")
        # Neither forward nor backward has red in it, and predicted rows are drawn at three quarters of their strength.
        kinds = {name: sum(row[6] for row in rows if row[2] == name) / (4 * end) for name in ("forward", "backward")}
        assert kinds["forward"] + kinds["backward"] == pytest.approx(busy)
        assert drawn / 0.75 == pytest.approx(busy, abs=0.02)
        assert found.silent()


def test_what_is_selected_is_summed_up(tmp_path: Path) -> None:
    """Two rows, from a quarter to three quarters of the axis: against the spans of the table."""
    subject = plan_subject("plan.json", a_plan())
    rows = timeline_rows(subject)
    end = max(row[5] + row[6] for row in rows)
    with opened(written(tmp_path, [subject])) as found:
        page = found.page
        page.uncheck("#timeline label:has-text('sends') input")
        canvas = page.locator("canvas.timeline")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        left, wide = box["x"] + 150, box["width"] - 158
        page.keyboard.down("Shift")
        page.mouse.move(left + wide / 4, box["y"] + 18 + 25)
        page.mouse.down()
        page.mouse.move(left + 3 * wide / 4, box["y"] + 18 + 45, steps=3)
        page.mouse.up()
        page.keyboard.up("Shift")
        expect(page.locator("#timeline .sums")).to_contain_text("of 2 rows")
        drawn = float(page.get_attribute("canvas.timeline", "data-busy"))
        assert found.silent()
    low, high = end / 4, 3 * end / 4
    within = [max(0, min(high, row[5] + row[6]) - max(low, row[5])) for row in rows if row[0].startswith(("device 1:", "device 2:"))]
    assert drawn == pytest.approx(sum(within) / (2 * (high - low)), abs=0.005)


def test_keys_alone_move_zoom_and_sort(tmp_path: Path) -> None:
    with opened(written(tmp_path, [plan_subject("plan.json", a_plan())])) as found:
        page = found.page
        page.focus("canvas.timeline")
        page.wait_for_selector("#timeline .sums:not(:empty)")
        before = page.inner_text("#timeline .sums")
        for key in "wwwdda":
            page.keyboard.press(key)
        expect(page.locator("#timeline .sums")).not_to_have_text(before)
        page.keyboard.press("Home")
        expect(page.locator("#timeline .sums")).to_have_text(before)
        page.keyboard.press("m")
        expect(page.locator("#timeline .sums")).to_contain_text("Selected, ")
        page.keyboard.press("Escape")
        expect(page.locator("#timeline .sums")).to_have_text(before)
        page.focus("#plan th:nth-child(1) button")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        stages = [one.inner_text() for one in page.query_selector_all("#plan tbody td:first-child")]
        assert stages == ["3", "2", "1", "0"] and page.get_attribute("#plan th:nth-child(1)", "aria-sort") == "descending"
        # Tab leads through everything that acts, from top to bottom; each has a name, and its focus is seen.
        reached = page.evaluate(REACHED)
        assert len(reached) > 30 and [one for one in reached if not one["name"]] == []
        assert [one["top"] for one in reached] == sorted(one["top"] for one in reached)
        page.focus("nav a")
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert found.silent()


def everything() -> list[Subject]:
    """A plan with a block of each kind."""
    plan = plan_subject("plan.json", a_plan())
    more = [
        Heat("speed", ("rank 0", "rank 1"), "step", np.arange(3), np.array([[1.0, 2.0, 0.5], [1.0, 1.0, np.nan]])),
        Charts("steps", "step", np.arange(4), ((ChartLine("loss", "number", np.arange(4.0)),),)),
        Scatter("choices", ("hours", "USD"), ("number", "usd"), ("one", "two"), ((1.0, 2.0), (2.0, 1.0)), (None, 0)),
        Text("left out: something", note=True),
    ]  # fmt: skip
    whole = Subject(plan.kind, plan.name, (*plan.views, View("devices", "Devices", more)))
    return [whole, plan_subject("plan.2.json", a_plan(schedule="gpipe"))]


def test_axe_finds_nothing(tmp_path: Path) -> None:
    """By the rules of WCAG 2.2 AA, in light and dark."""
    axe = axe_script()
    if axe is None:
        pytest.skip("axe-core is not here: install axe-core-python, or name its file in AXE_CORE")
    path = written(tmp_path, everything())
    for scheme in ("light", "dark"):
        with opened(path, color_scheme=scheme, bypass_csp=True) as found:
            found.page.evaluate(axe)
            rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
            result = found.page.evaluate("(rules) => axe.run(document, { runOnly: rules })", rules)
            assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in result["violations"]] == []


def test_words_stand_out_from_what_they_stand_on(tmp_path: Path) -> None:
    """By the contrast of WCAG: text against paper and boxes, letters on bars, lines of focus against paper; light, dark and on paper."""
    page = files("penstock.reports") / "page"
    css, colours = ((page / name).read_text(encoding="utf-8") for name in ("page.css", "colours.js"))
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", one)) for one in re.findall(r":root \{([^}]*)\}", css)]
    assert len(schemes) == 3
    for own in schemes:
        own = {**schemes[0], **own}
        for words in ("ink", "muted", "link"):
            assert min(contrast(own[words], own[ground]) for ground in ("paper", "soft")) >= 4.5, (words, own)
    with opened(written(tmp_path, [])) as found:
        told = "return [...STAGES, ...Object.values(SPANS)].map((one) => [one, ink(one)]);"
        inks = found.page.evaluate(f"() => {{ {colours.replace('export ', '')}; {told} }}")
    assert len(inks) > 12 and all(contrast(*both) >= 4.5 for both in inks)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, as WCAG defines it."""
    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_candidate_opens_its_plan_and_a_point_too(tmp_path: Path) -> None:
    subjects = [plan_subject("plan.json", a_plan()), plan_subject("plan.2.json", a_plan(schedule="gpipe"))]
    row = {"schedule": "1f1b", "pp": 4, "time_s": 1.0, "peak_bytes": 1e9}
    record = {
        "candidates": [{**row, "file": "plan.json", "slower": 0.0, "because": []},
                       {**row, "file": "plan.2.json", "slower": 0.04, "because": [{"part": "bubble", "longer_s": 0.04}]}],
        "baselines": [{"name": "megatron", "space": "equal stages", "slower": None, "plan": None}], "bound_s": 0.9, "formula_s": 1.0,
        "gap": 0.11, "stopped": "", "families": [],
        "progress": [{"after_s": 0.1, "best_s": None, "bound_s": 0.8}, {"after_s": 0.4, "best_s": 1.0, "bound_s": 0.9}],
    }  # fmt: skip
    names = ("cluster", "devices", "hours", "usd", "dominated_by", "file")
    rows = (("1xa", 8, 9.0, 3.0, "", "plan.json"), ("2xa", 16, 5.0, 4.0, "", "plan.2.json"), ("3xa", 24, 6.0, 9.0, "2xa", None))
    choices = [dict(zip(names, one, strict=True)) for one in rows]
    opens = {"plan.json": 0, "plan.2.json": 1}
    pool = {"cluster": "3xa", "steps": 10, "choices": choices, "left_out": [{"cluster": "9xb", "reason": "too dear"}]}
    shared = [*search_views(record, "r", opens), *pareto_views(pool, "p", opens)]
    with opened(written(tmp_path, subjects, shared)) as found:
        page = found.page
        assert "gpipe" not in page.inner_text("#glance") and "bubble takes 40.0 ms more" in page.inner_text("#candidates")
        page.click("#candidates button.link:text('plan.2.json')")
        assert "gpipe" in page.inner_text("#glance") and page.input_value("#subject") == "1"
        assert "2 of 3 choices are not beaten" in page.inner_text("#pareto .hover") and "too dear" in page.inner_text("#pareto")
        page.focus("#pareto circle >> nth=0")
        page.keyboard.press("Enter")
        assert "gpipe" not in page.inner_text("#glance")
        page.select_option("#pareto select >> nth=0", label="devices")
        assert "not beaten in devices and USD" in page.inner_text("#pareto .hover")
        assert found.silent()


def test_a_download_is_the_table(tmp_path: Path) -> None:
    subject = plan_subject("plan.json", a_plan())
    with opened(written(tmp_path, [subject]), accept_downloads=True) as found:
        with found.page.expect_download() as got:
            found.page.click("#timeline button:text('CSV')")
        got.value.save_as(tmp_path / "t.csv")
        assert found.silent()
    rows = list(csv.reader((tmp_path / "t.csv").open(encoding="utf-8", newline="")))[1:]
    assert rows == [[str(value) for value in row] for row in timeline_rows(subject)]


LOOKS = """(svg) => [...svg.querySelectorAll("rect, text, line")].map((one) => {
    const look = one.ownerDocument.defaultView.getComputedStyle(one);
    return ["fill", "stroke", "strokeDasharray", "textAnchor", "opacity", "fontSize"].map((name) => look[name].replace(/"/g, ""));
})"""


def test_a_saved_chart_looks_as_on_the_page(tmp_path: Path) -> None:
    """Each of its parts, in a document without any styles; what is hatched is hatched by a pattern of its own chart."""
    plan = a_plan()
    recomputing = replace(plan, stages=tuple(replace(stage, recompute=(((stage.first, stage.last),),)) for stage in plan.stages))
    with opened(written(tmp_path, [plan_subject("plan.json", recomputing)]), accept_downloads=True, bypass_csp=True) as found:
        page = found.page
        buttons = page.locator("figure button:text-is('SVG')")
        patterns = [one.get_attribute("id") for one in page.query_selector_all("pattern")]
        fills, anchors = set[str](), set[str]()
        assert buttons.count() >= 2 and len(set(patterns)) == len(patterns) >= 2
        for button in buttons.all():
            with page.expect_download() as got:
                button.click()
            got.value.save_as(tmp_path / "chart.svg")
            looks = button.evaluate(f"(button) => ({LOOKS})(button.closest('figure').querySelector('svg'))")
            alone = page.evaluate(f"""(text) => new Promise((done) => {{
                const frame = document.createElement("iframe");
                frame.onload = () => done(({LOOKS})(frame.contentDocument.querySelector("svg")));
                frame.srcdoc = text;
                document.body.append(frame);
            }})""", (tmp_path / "chart.svg").read_text(encoding="utf-8"))  # fmt: skip
            assert alone == looks
            fills |= {look[0] for look in looks}
            anchors |= {look[3] for look in looks}
    assert any(fill.startswith("url(#hatch-") for fill in fills) and anchors == {"start", "middle", "end"}


def hostile_subject() -> Subject:
    names = tuple(HOSTILE)
    values = tuple((1.0, float("nan"), float("inf")) for _ in names)
    blocks = [
        *map(Text, names), Facts(tuple(Fact(name, name, "text", name) for name in names)),
        Table(names[0], names, ("text",) * len(names), (names,)), Stack(names[1], names, names[:3], "time", values, (2.0,) * len(names)),
        Scatter(names[0], names[:2], ("number", "number"), names, tuple((1.0, None) for _ in names), (None,) * len(names)),
        Heat(names[2], names, names[3], np.arange(3), np.array([[1.0, np.nan, np.inf]] * len(names))),
        Charts(names[0], names[1], np.arange(4), ((ChartLine(names[2], "number", np.array([1.0, np.nan, -np.inf, 2.0])),),)),
    ]  # fmt: skip
    return Subject("plan", names[0], (View("glance", names[0], blocks),))


@pytest.mark.parametrize("look", [{}, {"color_scheme": "dark", "viewport": {"width": 360, "height": 800}}, {"forced_colors": "active"}])
def test_names_are_names_whatever_they_say(tmp_path: Path, look: dict[str, Any]) -> None:
    subject = hostile_subject()
    with opened(written(tmp_path, [subject, subject]), **look) as found:
        text = found.page.text_content("main")
        assert all(name in text for name in ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{$"))
        assert found.page.query_selector("img") is None and "not a number" in text and "infinite" in text
        assert found.page.evaluate("document.scripts.length") == 2 + len(re.findall('id="column-', (tmp_path / "report.html").read_text()))
        assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")
        assert found.silent()


def test_it_prints_on_paper(tmp_path: Path) -> None:
    """All views on A4, light whatever the screen is, nothing to press, nothing beyond the edge."""
    with opened(written(tmp_path, everything()), color_scheme="dark", viewport={"width": 703, "height": 1000}) as found:
        page = found.page
        printed = page.pdf(prefer_css_page_size=True)
        assert printed.startswith(b"%PDF") and re.search(rb"/MediaBox \[0 0 59[45][.\d]* 84[12][.\d]*\]", printed)
        page.emulate_media(media="print", color_scheme="dark")
        for hidden in ("nav", ".buttons button", ".controls", "p.hover"):
            assert page.locator(f"{hidden}:visible").count() == 0 < page.locator(hidden).count(), hidden
        assert page.locator("section > h2:visible").count() == 5 and page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        # Canvases are drawn anew: the names of rows are dark on white.
        page.wait_for_function("""() => {
            const data = document.querySelector("canvas.timeline").getContext("2d").getImageData(0, 18, 140, 60).data;
            let sum = 0;
            for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 128) sum += data[at] < 128 ? 1 : -1;
            return sum > 50;
        }""")
        assert found.silent()
