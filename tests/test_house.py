"""The rules of the house that no type checker knows: which way packages may import, what every module is for, one name for one idea."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import VERBS
from penstock.kernels import KERNEL_MODULES
from penstock.schedules.rules import SCHEDULES

PACKAGE = Path(penstock.__file__).parent
MODULES = {".".join(("penstock", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
           for path in sorted(PACKAGE.rglob("*.py"))}  # fmt: skip

# Every arrow between rooms. A new one is a decision: add it here, and say in docs/architecture.md what it is for.
ARROWS = {
    "errors": "",
    "files": "errors",
    "kernels": "",
    "notebooks": "errors",
    "processes": "errors",
    "clusters": "errors files",
    "models": "errors files",
    "schedules": "errors",
    "plans": "errors files notebooks clusters models schedules",
    "costs": "errors files clusters models",
    "timing": "errors files kernels notebooks clusters models schedules plans costs",
    "ordering": "errors kernels schedules timing",
    "batching": "errors files notebooks clusters models schedules plans costs timing ordering",
    "search": "errors kernels processes clusters models schedules plans costs timing batching",
    "programs": "errors files clusters models schedules plans costs timing batching",
    "stores": "errors files",
    "data": "errors files processes models schedules plans costs timing batching programs stores",
    "systems": "errors files kernels clusters models schedules plans costs timing batching search",
    "interop": "errors clusters models schedules plans",
    "runtime": "errors files notebooks processes clusters models schedules plans costs timing batching programs stores data",
    "adapting": "errors files processes clusters models schedules plans costs timing batching search programs runtime",
    "profiling": "errors processes clusters models costs timing runtime",
    "jobs": "errors files clusters models plans timing batching search stores data runtime adapting profiling",
    "reports": "errors files models schedules plans costs timing batching programs runtime adapting",
    "reproduce": "errors files processes clusters models schedules plans costs timing ordering batching search programs data systems "
                 "runtime adapting profiling",
    "cli": "errors files processes clusters models schedules plans costs timing ordering batching search "
           "programs stores data systems interop runtime adapting profiling jobs reports reproduce",
}

MAX_KERNEL_ARGUMENTS = 12
MAX_MODULES_OF_A_FOLDER = 20
MAX_FILES_THAT_SPELL_SCHEDULES = 8


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(name: str) -> tuple[str, ...]:
    return tuple(_imported(name))


def _imported(name: str) -> Iterator[str]:
    """The modules of Penstock that a module imports: at its top, inside functions, and for type checkers alone."""
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import: rooms import each other by their whole names"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for found in names:
            while found not in MODULES and "." in found:
                found = found.rpartition(".")[0]
            if found in MODULES and found != "penstock":
                yield found


def room_of(name: str) -> str:
    """`penstock.search.partition.stages` is in the room `search`."""
    return name.split(".")[1] if "." in name else name


def arrows(of: dict[str, str]) -> set[tuple[str, str]]:
    """(from, to) for every import between two places, where `of` names the place of each module."""
    return {(of[name], of[found]) for name in of for found in imported(name) if found in of and of[name] != of[found]}


def circle_in(found: set[tuple[str, str]]) -> list[str]:
    """Places that import each other in a circle; none if there is no circle."""
    left = {place for arrow in found for place in arrow}
    while ends := {place for place in left if not any(a == place and b in left for a, b in found)}:
        left -= ends
    return sorted(left)


def test_every_arrow_between_rooms_is_listed() -> None:
    rooms = {name: room_of(name) for name in MODULES if name not in ("penstock", "penstock.__main__")}
    found: dict[str, set[str]] = {room: set() for room in set(rooms.values())}
    for source, target in arrows(rooms):
        found[source].add(target)
    assert found == {room: set(targets.split()) for room, targets in ARROWS.items()}


def test_rooms_import_each_other_in_one_direction() -> None:
    assert circle_in({(room, target) for room, targets in ARROWS.items() for target in targets.split()}) == []


@pytest.mark.parametrize("room", ["search", "runtime", "systems"])
def test_packages_inside_a_room_import_each_other_in_one_direction(room: str) -> None:
    """Modules on the room's own floor stand for themselves, those of a package for the package."""
    inside = {name: ".".join(name.split(".")[:3]) for name in MODULES if name.startswith(f"penstock.{room}.")}
    assert circle_in(arrows(inside)) == []


def test_a_circle_is_seen() -> None:
    assert circle_in({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e")}) == ["a", "b", "c", "d"]
    assert circle_in({("a", "b"), ("b", "c"), ("a", "c")}) == []


def entries() -> set[str]:
    """What a person reaches directly: verbs, public names, and modules that are run as commands."""
    verbs = {f"penstock.cli.{verb.module}" for verb in VERBS}
    public = {*penstock._HOMES.values(), *penstock._PARTS.values()}
    run = {name for name, path in MODULES.items() if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    return {"penstock.cli.main", *verbs, *public, *run}


def named(name: str) -> Iterator[str]:
    """Modules that a module names in strings, to import them when they are needed: families of models by their whole name, modules of ops
    as `file.Class`. The list of kernels is for the compiler, and no use."""
    package = name.rpartition(".")[0]
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name != "penstock.kernels":
            beside = f"{package}.{node.value.partition('.')[0]}" if re.fullmatch(r"[a-z_]+\.[A-Z]\w+", node.value) else ""
            yield from (found for found in (node.value, beside) if found in MODULES)


def test_every_module_is_reached_from_a_verb_or_a_public_name() -> None:
    reached, left = set(), entries()
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        packages = [".".join(name.split(".")[:end]) for end in range(2, name.count(".") + 1)]
        left |= {*imported(name), *named(name), *packages} - reached
    assert sorted(set(MODULES) - reached - {"penstock"}) == []


def test_schedules_are_spelled_in_few_places() -> None:
    """Everybody else asks the rulebook for a property; a new schedule is then one record."""
    spelled = re.compile("|".join(rf"""["']{re.escape(name)}["']""" for name in SCHEDULES))
    files = [name for name, path in MODULES.items() if spelled.search(path.read_text(encoding="utf-8"))]
    assert len(files) <= MAX_FILES_THAT_SPELL_SCHEDULES, files


def test_only_costs_knows_where_costs_come_from() -> None:
    asked = re.compile(r"isinstance\([^)]*\bProfiled\b")
    assert [name for name, path in MODULES.items() if room_of(name) != "costs" and asked.search(path.read_text(encoding="utf-8"))] == []


def test_a_public_class_name_means_one_thing() -> None:
    names = [
        node.name for path in MODULES.values() for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]  # fmt: skip
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_kernels_take_few_arguments() -> None:
    """Arrays that belong together travel as one NamedTuple, with a name and a docstring for each."""
    long = [
        f"{name}.{node.name}: {len(node.args.args)}"
        for name in KERNEL_MODULES
        for node in tree_of(MODULES[name]).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list and len(node.args.args) > MAX_KERNEL_ARGUMENTS
    ]
    assert long == []


def test_nothing_is_unpickled() -> None:
    """Torch's collectives of objects unpickle whatever arrives."""
    words = {"pickle", "dill", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}
    used = [
        f"{name}: {found}"
        for name, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        for found in (getattr(node, "attr", None), getattr(node, "id", None), node.name if isinstance(node, ast.alias) else None)
        if found in words
    ]
    assert used == []


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    crowded = {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MAX_MODULES_OF_A_FOLDER}
    assert set(crowded) <= {"cli"}, crowded


def test_tests_mirror_the_source() -> None:
    """A test file stands where what it tests stands; its folder exists in the source."""
    tests = Path(__file__).parent
    strays = [path for path in tests.rglob("test_*.py") if path.parent != tests and not (PACKAGE / path.parent.relative_to(tests)).is_dir()]
    assert strays == []
