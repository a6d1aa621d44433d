"""The rules of the house that imports can break: torch-free rooms, quick start, arrows that point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.kernels import KERNEL_MODULES, compile_all

PACKAGE = Path(penstock.__file__).parent
TORCH_FREE_ROOMS = (
    "models",
    "clusters",
    "costs",
    "plans",
    "search",
    "batching",
    "schedules",
    "timing",
    "ordering",
    "reports",
    "systems",
    "programs",
    "cli",
    "errors",
    "files",
    "kernels",
    "processes",
)

IMPORT_ROOMS = """
import importlib, pkgutil, sys
rooms, skipped = sys.argv[1].split(","), sys.argv[2].split(",")
def visit(name):
    if name in skipped:
        return
    module = importlib.import_module(name)
    for heavy in ("torch", "numba"):
        assert heavy not in sys.modules, f"{name} imports {heavy} at the top: import it in the function that needs it"
    for found in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        visit(found.name)
for room in rooms:
    visit(room)
"""

IMPORT_PENSTOCK = """
import sys, penstock
penstock.InputError
heavy = {"torch", "numba", "numpy", "pydantic", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
"""


def run_python(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def existing_rooms() -> list[str]:
    return [room for room in TORCH_FREE_ROOMS if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()]


def test_rooms_import_neither_torch_nor_numba() -> None:
    rooms = ",".join(f"penstock.{room}" for room in existing_rooms())
    run_python(IMPORT_ROOMS, rooms, ",".join(("penstock.models.modules", *KERNEL_MODULES)))


def test_import_penstock_is_light() -> None:
    run_python(IMPORT_PENSTOCK)


def test_public_names_resolve() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = penstock.nothing


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, at the top or inside functions."""
    package = ("penstock", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def test_runtime_never_imports_search() -> None:
    for path in sorted((PACKAGE / "runtime").rglob("*.py")):
        wrong = [name for name in imports_of(path) if f"{name}.".startswith("penstock.search.")]
        assert not wrong, f"{path.name} imports {wrong}: runtime must not know search, adapting is where they meet"


def test_imports_of_sees_every_form() -> None:
    names = set(imports_of(PACKAGE / "cli" / "main.py"))
    assert {"penstock", "penstock.cli.console", "penstock.errors.InputError"} <= names


def test_compile_all_warms_each_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny_kernels.py").write_text("warmed = []\ndef warm():\n    warmed.append(1)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert compile_all(["tiny_kernels"]) >= 0
    assert sys.modules["tiny_kernels"].warmed == [1]
    assert "1 kernel modules ready" in capsys.readouterr().out


def test_asking_about_a_run_needs_no_torch() -> None:
    """`penstock events`, `replan` and `disturb` answer at once; torch alone takes a second to import."""
    asked = "penstock.adapting.asking, penstock.adapting.events, penstock.runtime.run_folder, penstock.runtime.run_lock"
    code = f"import sys, {asked}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
