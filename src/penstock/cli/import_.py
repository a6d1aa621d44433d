"""`penstock import`: a user's own torch module as a model description that plans can be made for, or another planner's plan as one here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.console import JsonFlag, format_count, out, print_json
from penstock.cli.import_plans import import_plan
from penstock.cli.options import BATCH, file_to_write, within
from penstock.errors import InputError, PenstockError, near_misses, plural, shell_words
from penstock.systems import SYSTEMS, PlanFile

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["import_"]


class ModuleSource(NamedTuple):
    """A kind of source that can be imported: how it is written, an example, and the options that it reads."""

    form: str
    example: str
    options: tuple[str, ...]


SOURCES = {
    "module": ModuleSource("module:PATH.py:FUNCTION", "module:net.py:make", ("name", "dtype", "length")),
    **{name: ModuleSource(f"{name}:PATH", f"{name}:{system.plans.read_example}", system.plans.options)
       for name, system in SYSTEMS.items() if system.plans is not None},
}  # fmt: skip


def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="module:PATH.py:FUNCTION; the function takes nothing and returns "
                                          "(module, example inputs), or (module, function of samples and length). Or plans: dynpipe:PATH, "
                                          "a topology file, or a folder with topology.json and perhaps partition.json; aceso:PATH, the "
                                          "JSON of a plan; fasop:PATH, a CSV of results, or the JSON that a search over "
                                          "FASOP's tables wrote.")],
    path: Annotated[Path, typer.Option("--out", callback=file_to_write, help="Description or plan to write (.json).")],
    name: Annotated[str, typer.Option(help="module: name of the model; the function's if not given.")] = "",
    dtype: Annotated[str, typer.Option(help="module: bf16, fp16 or fp32, what the model trains in.")] = "fp32",
    length: Annotated[int, typer.Option(callback=within(1, 2**20),
                                        help="module: the longest samples an example function is asked for.")] = 128,
    model: Annotated[str, typer.Option(help="Plans: the model that they are for, as for `search`.")] = "",
    cluster: Annotated[str, typer.Option(help="Plans: the cluster whose devices are the ranks, as for `search`.")] = "",
    global_batch: Annotated[int | None, typer.Option(callback=within(1, BATCH),
                                                     help="dynpipe, fasop: samples of an iteration; DynPipe's is a stream of "
                                                     "mini-batches.")] = None,
    partition: Annotated[Path | None, typer.Option(help="dynpipe: the partition file, if PATH is a topology file.")] = None,
    mini_batch: Annotated[int | None, typer.Option(callback=within(1, BATCH),
                                                   help="dynpipe: samples of a mini-batch, for a topology alone.")] = None,
    row: Annotated[int | None, typer.Option(help="fasop: which row, 1 is the first below the header; the fastest that fits and is placed "
                                            "on the cluster's nodes if not given.")] = None,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Trace your own torch module into a description that `search` and the other verbs take as a model. Runs the file's code.

    Of another planner's files, make the plan that they mean: DynPipe's (asynchronous 1F1B, schedule pipedream, stages replicated by
    samples), Aceso's (degrees and recomputation of each op), a row of FASOP's results (equal degrees, nodes of several kinds).

    Example: penstock import module:net.py:make --out net.json

    Example: penstock import dynpipe:hybrid_conf.json --partition vgg16_8.json --model vgg16 --cluster 8xv100-16gb --global-batch 7200
    --out plan.json

    Example: penstock import aceso:gpt_1_3B.json --model gpt-1.3b --cluster 4xv100-32gb --out plan.json
    """
    if path.suffix != ".json":
        raise InputError(f"--out is '{path}'; a name that ends in .json was expected, by which models are told from other files.")
    kind, _, rest = source.partition(":")
    if kind not in SOURCES:
        forms = " or ".join(known.form for known in SOURCES.values())
        raise InputError(f"SOURCE is '{source}': '{kind}' cannot be imported. {near_misses(kind, SOURCES)} Write {forms}.")
    _require_unused(
        source, kind, name=name, dtype=dtype != "fp32", length=length != 128, model=model, cluster=cluster, global_batch=global_batch,
        partition=partition, mini_batch=mini_batch, row=row,
    )  # fmt: skip
    if kind != "module":
        if not rest or "\0" in rest:
            raise _unreadable(source, kind)
        import_plan(kind, PlanFile(rest, model, cluster, global_batch, partition, mini_batch, row), path, json)
        return
    from penstock.models.modules.cutting.origins import call_function, load_function, parse_origin

    file, function = parse_origin(source)
    module, example, loss = call_function(load_function(file, function), source)
    traced = _trace(module, example, loss, name or function, dtype, length, source)
    from penstock.files import write_json
    from penstock.models.description import model_to_description

    write_json(path, model_to_description(traced))
    _tell(traced, path, json)


def _require_unused(source: str, kind: str, **options: object) -> None:
    """Refuses options that only other kinds of sources would read."""
    for name, given in options.items():
        if not (given is None or given is False or given == "") and name not in SOURCES[kind].options:
            owners = " or ".join(known.form for known in SOURCES.values() if name in known.options)
            raise InputError(f"SOURCE is '{source}', but --{name.replace('_', '-')} belongs to {owners}. Drop it.")


def _unreadable(source: str, kind: str) -> InputError:
    return InputError(f"SOURCE is '{source}'; {SOURCES[kind].form} was expected, as in {SOURCES[kind].example}.")


def _trace(module: Any, example: Any, loss: Any, name: str, dtype: str, length: int, source: str) -> Model:
    """The description; what the module itself raises is told as a fault of the module."""
    from penstock.models.modules.cutting.describing import quiet_fakes, with_origin
    from penstock.models.modules.cutting.origins import made_of
    from penstock.models.modules.trace import trace_module

    try:
        with quiet_fakes():
            traced = trace_module(module, example, name, dtype, length=length)
        return with_origin(traced, made_of(module, example, loss, name=name), source)
    except PenstockError:
        raise
    except Exception as error:
        raise InputError(f"module '{name}' cannot be traced with its example: {type(error).__name__}: {error}") from error


def _tell(model: Model, path: Path, json: bool) -> None:
    if json:
        print_json({
            "out": path, "model": model.name, "num_ops": model.num_ops, "num_distinct_ops": len(model.distinct_ops),
            "num_parameters": model.num_parameters, "dtype": model.dtype, "seq_length": model.seq_length,
        })  # fmt: skip
        return
    blocks = ", ".join(f"{copies} × {block.name}" if copies > 1 else block.name for block, copies in model.runs)
    facts = f"{plural(model.num_ops, 'op')} ({blocks}), {format_count(model.num_parameters)} parameters, {model.dtype}"
    out().print(f"{model.name}: {facts}", markup=False, soft_wrap=True)
    search = shell_words("penstock", "search", "--model", path, "--cluster", "4xa100-40gb", "--global-batch", 64)
    out().print(f"wrote {path}; next: {search}", markup=False, soft_wrap=True)
