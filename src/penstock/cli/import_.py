"""`penstock import`: a user's own torch module, traced into a model description that plans can be made for."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, format_count, out, print_json
from penstock.errors import InputError, PenstockError, near_misses

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["import_"]


def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="module:PATH.py:FUNCTION; the function takes nothing and returns "
                                          "(module, example inputs), or (module, function of samples and length).")],
    path: Annotated[Path, typer.Option("--out", help="Description to write (.json).")],
    name: Annotated[str, typer.Option(help="Name of the model; the function's if not given.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32: what the model trains in.")] = "fp32",
    length: Annotated[int, typer.Option(help="The longest samples an example function is asked for.")] = 128,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Trace your own torch module into a description that `search` and the other verbs take as a model. Runs the file's code.

    Example: penstock import module:net.py:make --out net.json
    """
    if path.suffix != ".json":
        raise InputError(f"--out is '{path}'; a name that ends in .json was expected, by which models are told from other files.")
    if length < 1:
        raise InputError(f"--length is {length}; 1 or more was expected.")
    file, function = _parse(source)
    module, example = _call(_load(file, function), source)
    model = _trace(module, example, name or function, dtype, length)
    from penstock.files import write_json
    from penstock.models.description import model_to_description

    write_json(path, model_to_description(model))
    _tell(model, path, json)


def _parse(source: str) -> tuple[Path, str]:
    """The file and the function of `module:PATH.py:FUNCTION`."""
    kind, _, rest = source.partition(":")
    if kind != "module":
        raise InputError(f"SOURCE is '{source}': '{kind}' cannot be imported. Write module:PATH.py:FUNCTION, as in module:net.py:make.")
    file, _, function = rest.rpartition(":")
    if not file or not function.isidentifier():
        raise InputError(f"SOURCE is '{source}'; module:PATH.py:FUNCTION was expected, as in module:net.py:make.")
    path = Path(file)
    if "\0" in file or not path.is_file():
        raise InputError(f"SOURCE is '{source}': file '{file}' does not exist.")
    if path.suffix != ".py":
        raise InputError(f"SOURCE is '{source}': '{file}' is not a Python file (.py).")
    return path, function


def _load(path: Path, function: str) -> Callable[[], Any]:
    """The function of a file, whose neighbours it may import."""
    spec = importlib.util.spec_from_file_location(f"penstock_imported_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their own module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"file '{path}' cannot be imported: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"file '{path}' has no function '{function}'. {near_misses(function, names) if names else 'It has none at all.'}")
    return found  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], source: str) -> tuple[Any, Any]:
    """What the function returns, if it is a module and an example."""
    from torch import nn

    try:
        made = function()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"the function of '{source}' failed: {type(error).__name__}: {error}.") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise InputError(f"the function of '{source}' returned {_describe(made)}; (torch module, example inputs) was expected.")
    return made[0], made[1]


def _trace(module: Any, example: Any, name: str, dtype: str, length: int) -> Model:
    """The description; what the module itself raises is told as a fault of the module."""
    from penstock.models.modules.trace import trace_module

    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of what is told below in one line
    before, log.disabled = log.disabled, True
    try:
        return trace_module(module, example, name, dtype, length=length)
    except PenstockError:
        raise
    except Exception as error:
        raise InputError(f"module '{name}' cannot be traced with its example: {type(error).__name__}: {error}") from error
    finally:
        log.disabled = before


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


def _tell(model: Model, path: Path, json: bool) -> None:
    if json:
        print_json({
            "out": path, "model": model.name, "num_ops": model.num_ops, "num_distinct_ops": len(model.distinct_ops),
            "num_parameters": model.num_parameters, "dtype": model.dtype, "seq_length": model.seq_length,
        })  # fmt: skip
        return
    blocks = ", ".join(f"{copies} × {block.name}" if copies > 1 else block.name for block, copies in model.runs)
    facts = f"{model.num_ops} ops ({blocks}), {format_count(model.num_parameters)} parameters, {model.dtype}"
    out().print(f"{model.name}: {facts}", markup=False, soft_wrap=True)
    out().print(f"wrote {path}; next: penstock search --model {path} --cluster 4xa100-40gb --global-batch 64", markup=False, soft_wrap=True)
