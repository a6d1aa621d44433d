"""The documentation says what is true: commands run, examples of files are read by the real readers, every field is named."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from benchmark_modules import load_benchmark
from pty_runs import on_terminal

import penstock
from penstock.cli.main import VERBS, _load, run
from penstock.clusters.cluster_file import parse_cluster
from penstock.clusters.schema import ClusterSpec, DeviceSpec, NodeSpec, OverrideSpec
from penstock.models.catalog import FAMILIES, model_from_mapping
from penstock.models.description import model_from_description
from penstock.plans.build import uniform_plan

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def example(name: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", page(name), flags=re.DOTALL)
    return found  # type: ignore[no-any-return]


def test_the_example_of_a_file_of_sizes() -> None:
    model = model_from_mapping(yaml.safe_load(example("model.md", "yaml")), "model.md", "file")
    assert model.name == "deep-gpt" and (model.config["layers"], model.seq_length) == (48, 4096)


def test_the_example_of_a_description() -> None:
    model = model_from_description(json.loads(example("model.md", "json")), "model.md")
    assert (model.num_ops, model.num_parameters) == (2, 8192) and model.ops[1].name == "layers.1.up"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_of_a_family_is_named(family: str) -> None:
    (row,) = (line for line in page("model.md").splitlines() if line.startswith(f"| `{family}` |"))
    _, _, required, optional, _ = row.split("|")
    fields = dataclasses.fields(FAMILIES[family].parts()[1])  # type: ignore[arg-type]
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    assert re.findall("`(\\w+)`", required) == needed
    assert re.findall("`(\\w+)`", optional) == [field.name for field in fields if field.name not in needed]


def test_the_example_of_a_cluster_file() -> None:
    cluster = parse_cluster(yaml.safe_load(example("cluster.md", "yaml")), "cluster.md", "file")
    assert (cluster.name, cluster.num_devices, cluster.num_nodes) == ("pool", 28, 5)
    assert cluster.device(15).name == "a100-40gb" and cluster.device(16).name == "box"
    assert cluster.link(0, 16).bandwidth_bytes_per_s == 1e9 and cluster.device(16).memory_bytes == 40_000_000_000


def test_every_field_of_a_cluster_file_is_named() -> None:
    fields = {name for spec in (ClusterSpec, DeviceSpec, NodeSpec, OverrideSpec) for name in spec.model_fields}
    table = "".join(line for line in page("cluster.md").splitlines() if line.startswith("|"))
    assert sorted(fields - set(re.findall("`(\\w+)`", table))) == []


def test_links_lead_somewhere() -> None:
    """Between pages, and from the README, to pages and to headings in them."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = []
    for source in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", source.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if "://" in name:
                continue
            found = (source.parent / name).resolve() if name else source
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append(f"{source.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation_and_linked_from_the_first() -> None:
    docs = ROOT / "docs"
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (docs / "index.md").read_text(encoding="utf-8")))
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} == named == {*linked, "index.md"}


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "docs/getting-started.md"])  # of the rest see `test_every_command_is_one`
def test_the_commands_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in a folder that has the documentation; but for those that install. The first says what is shown below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    lines = [line for block in blocks(path, "bash") for line in block.splitlines()]
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        for line in lines:
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "penstock" and line == blocks("README.md", "bash")[0].strip():
                require_shown(arguments)
            elif program == "penstock":
                assert run(arguments) == 0, line
            elif program == "python":
                assert subprocess.run(f"{sys.executable} {line.partition(' ')[2]}", shell=True, timeout=250).returncode == 0, line
            else:
                assert program in ("make", "source", ""), line
    assert sum(line.startswith("penstock ") for line in lines) >= 6
    if path == "README.md":  # which leaves a search behind, as reading the report begins with
        report = next(line for line in blocks("docs/report.md", "bash")[0].splitlines() if "plan.search.json" in line)
        assert run(shlex.split(report, comments=True)[1:]) == 0 and (tmp_path / "report.html").stat().st_size > 50_000
    if path != "README.md":
        assert {"config.json", "model.safetensors"} <= {entry.name for entry in (tmp_path / "trained").iterdir()}


def test_pictures_come_from_the_script_and_are_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are in the gallery, every one has an alternative text, and schedules say what they would say if drawn now."""
    script = load_benchmark("pictures")
    drawn = set(script.pictures())
    assert drawn == {path.name for path in (ROOT / "docs" / "images").iterdir()} and len(drawn) >= 12
    shown = re.findall(r"!\[([^\]]*)\]\(images/([^)]*)\)", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8"))
    assert {name for _, name in shown} == drawn
    for path in PAGES:
        texts = re.findall(r"!\[([^\]]*)\]", path.read_text(encoding="utf-8"))
        assert [text for text in texts if len(text.split()) < 5] == [], path
    script.draw_schedules(tmp_path, tmp_path)
    for path in tmp_path.glob("*.svg"):
        assert words(labels(path)) == words(labels(ROOT / "docs" / "images" / path.name)), path.name


def labels(path: Path) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_NO_COMMAND = ("shine",)
"""A verb that CONTRIBUTING makes up."""


def commands_of(path: Path) -> tuple[list[str], list[str]]:
    """Commands of Penstock that a page shows: whole lines of its blocks, and what its sentences and tables name."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:ba)?sh\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    called = re.compile(r"(?:^|\s)(?:penstock|-m penstock\.cli\.main) (.*)")
    whole = [found[1] for line in lines if (found := called.search(line.partition("#")[0]))]
    named = re.findall(r"`penstock ([a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return whole, [" ".join(one.split()) for one in named]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words call, and what is left of them."""
    verb = next(verb for verb in VERBS if verb.name == words[0])
    command, rest = _load(verb), words[1:]
    while rest and rest[0] in getattr(command, "commands", ()):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_one(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known verbs with known options; whole lines are taken by the command line itself, as far as it looks before anything runs."""
    monkeypatch.chdir(tmp_path)
    whole, named = commands_of(path)
    verbs = {verb.name for verb in VERBS}
    for line in [*whole, *named]:
        words = shlex.split(line.replace("\\|", "|"))
        if words[0].startswith("-") or words[0] in _NO_COMMAND or not re.fullmatch("[a-z-]+", words[0]):
            continue
        assert words[0] in verbs, line
        command, rest = command_of(words)
        known = {"-h", "--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}
        options = [word.partition("=")[0].rstrip(",;)") for word in rest if re.match(r"--?[a-z]", word)]
        assert [word for word in options if not {*word.split("|")} <= known] == [], line
        if line in whole and "…" not in line and "--help" not in rest:
            command.make_context(words[0], rest)


def test_commands_are_found_and_wrong_ones_are_seen() -> None:
    whole, named = zip(*map(commands_of, PAGES), strict=True)
    assert len([one for own in whole for one in own]) > 30 and len([one for own in named for one in own]) > 80
    command, rest = command_of(["search", "--modle", "x"])
    with pytest.raises(Exception, match="No such option"):
        command.make_context("search", rest)


_READS_FILES = "open_data("
"""What a page has prepared in another block."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_call_what_there_is(path: Path) -> None:
    """Every name they import exists and takes the arguments it is given; what needs nothing but a plan runs and prints what is shown."""
    for block in blocks(str(path.relative_to(ROOT)), "python"):
        assert list(wrong_names(block)) == [], block
        given = {"plan": uniform_plan("gpt-1.3b", "2xa100-40gb", global_batch=4, micro_batch=1, pp=2)}
        if unbound(block) <= set(given) and _READS_FILES not in block:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(block, str(path), "exec"), given)
            shown = re.findall(r"^# (.*)$", block, flags=re.MULTILINE)
            assert said.getvalue().splitlines() == shown or not shown


def wrong_names(block: str) -> Iterator[str]:
    """What a block imports or calls of Penstock that is not there, or takes other arguments."""
    known: dict[str, Any] = {}
    for node in ast.walk(ast.parse(block)):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            known[alias.asname or alias.name] = found = getattr(import_module(node.module or ""), alias.name, None)
            if found is None:
                yield alias.name
    for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        found = getattr(penstock, name.partition(".")[2], None) if name.startswith("penstock.") else known.get(name)
        try:
            if found is not None:
                inspect.signature(found).bind(*call.args, **{keyword.arg or "": keyword.value for keyword in call.keywords})
            elif name.startswith("penstock."):
                yield name
        except TypeError as error:
            yield f"{name}: {error}"


def unbound(block: str) -> set[str]:
    """Names that a block uses and does not make."""
    nodes = list(ast.walk(ast.parse(block)))
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return used - made - imported - set(dir(builtins))


def test_wrong_python_blocks_are_seen() -> None:
    right = "from penstock.schedules.rules import schedule_of\nschedule_of('1f1b', num_stages=3, num_micro_batches=4)"
    assert list(wrong_names(right)) == [] and unbound(right) == set()
    for was, becomes in (("import schedule_of", "import schedule_for"), ("num_stages", "stages")):
        assert len(list(wrong_names(right.replace(was, becomes)))) == 1
    assert len(list(wrong_names("penstock.find_plan(rows)"))) == 1 and unbound("x = 1\nprint(x, y)") == {"y"}


def test_the_first_command_and_its_output_are_the_same_on_both_first_pages() -> None:
    shown, command = ([blocks(path, language)[0] for path in ("README.md", "docs/index.md")] for language in ("text", "bash"))
    assert shown[0] == shown[1] and command[0] == command[1]
    assert command[0].startswith("penstock ") and len(command[0].splitlines()) == 1  # which `test_the_commands_run` runs
    assert all(len(line) <= 80 for line in shown[0].splitlines())


SIMULATED = "simulate examples/plans/gpt-1.3b-pp4.json"


@pytest.mark.parametrize(
    ("path", "place", "command"),
    [
        ("docs/schedules.md", 0, SIMULATED),
        ("docs/schedules.md", 1, f"{SIMULATED} --schedule zero-bubble"),
        ("docs/getting-started.md", 0, "search --model gpt-1.3b --cluster 4xa100-40gb --global-batch 64"),
    ],
)
def test_pages_show_what_commands_say(path: str, place: int, command: str) -> None:
    """To the digit, up to where a line ends in dots."""
    verb, *arguments = shlex.split(command)
    status, said = on_terminal([verb, *(str(ROOT / one) if "/" in one else one for one in arguments)], 90)
    assert status == 0
    shown = blocks(path, "text")[place].replace(" …", "\n\n")
    assert [part for part in shown.split("\n\n") if plain(part) not in plain(said)] == []


def require_shown(arguments: list[str]) -> None:
    """The command says what is shown: the answer to the digit, the rest in its words."""
    shown = blocks("README.md", "text")[0]
    status, said = on_terminal(arguments, 80)
    assert status == 0
    assert plain(shown.partition("\n\n")[0]) in plain(said)
    for part in (shown.partition("best plans")[0], shown.splitlines()[-1]):
        assert words(part) in words(said)


def plain(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())


def words(text: str) -> str:
    return re.sub(r"[0-9][0-9.,]*", "#", plain(text))
