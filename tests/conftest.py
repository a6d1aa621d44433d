"""Settings of all tests: on a build machine random cases are the same every time, so that a red build can be repeated."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch: tests side by side leave no core for a second thread, or for threads that spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from compiled_tests import compile_tests
from hypothesis import settings
from shared_server import offer_server, take_server

from penstock.processes.fork_server import PRELOADED

gc.disable()  # until all tests are collected

settings.register_profile("build", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("here", max_examples=50, deadline=None)
settings.load_profile("build" if os.environ.get("CI") else "here")

# Hundreds of ranks and planners are forked from one server, which has once what any of them may need. It looks for modules where the
# environment says, like any new process.
PRELOADED.append("warm_server")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_configure(config: pytest.Config) -> None:
    """The process that has others run tests starts the server for them, and compiles the tests meanwhile."""
    if hasattr(config, "workerinput"):
        take_server()
    elif config.getoption("numprocesses", None):
        offer_server()
        compile_tests(config, Path(__file__).parent)


LONG = (
    "adapting/test_story.py", "adapting/test_moving.py", "runtime/test_transparency.py", "adapting/test_nodes.py", "cli/test_demo.py",
    "runtime/parallel/test_module_chain.py", "cli/test_train_signals.py", "cli/test_train_job.py", "adapting/test_deaths.py",
    "test_docs.py", "adapting/test_link_probes.py", "jobs/test_scripts.py", "runtime/test_planner_processes.py", "runtime/test_trainer.py",
    "interop/test_consumers.py", "adapting/test_watching.py", "cli/test_trace.py", "systems/aceso/test_search.py",
    "runtime/test_workers.py", "runtime/test_adopting.py", "runtime/checkpoints/test_checkpoints.py", "cli/test_train_timed.py",
    "data/test_loader.py", "models/modules/test_fused.py",
)  # fmt: skip
"""Files with tests that take many seconds, most of them because processes wait for each other; those that take longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process that runs tests begins with its share of the long ones: if it came to one last, the others would wait for it.

    pytest-xdist gives each an equal part of the list, and to one that has nothing left to do half of what another would do last.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    of_file: dict[str, list[pytest.Item]] = {f"tests/{name}": [] for name in LONG}
    others: list[pytest.Item] = []
    for item in items:
        of_file.get(item.nodeid.partition("::")[0], others).append(item)
    long = list(of_file.values())
    size = -(-len(items) // count)
    items.clear()
    for first in range(count):
        share = [item for file in long[first::count] for item in file]
        num_others = max(0, size - len(share))
        items += share + others[:num_others]
        del others[:num_others]
    items += others


def pytest_collection_finish() -> None:
    """What has been imported stays for good; no later collection of garbage looks through it again, which took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # what tests leave is little, and looking for it every 700 objects takes a twentieth of their time
    gc.enable()
    # Libraries that look for leaks at the end would find what is kept. Not before that: pytest collects ten times when tests are over.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What jobs prepare, measure and search once is kept in a folder of the tests, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("kept")))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled texts, prepared for training; nobody changes them."""
    from penstock.data.bundled import bundled_files
    from penstock.data.text.prepare import TextRequest, prepare_text

    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare_text(TextRequest(tuple(bundled_files()), folder, train_tokenizer=384, workers=1))
    return str(folder)


@pytest.fixture(scope="session")
def small_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `aceso`, `dynapipe` and `fasop` of tables made here, in the formats of these systems; nobody changes them."""
    from small_tables import aceso_tables, dynapipe_tables, fasop_tables

    folder = tmp_path_factory.mktemp("tables")
    aceso_tables(folder / "aceso", ("gpt_350M", "t5_770M"))
    aceso_tables(folder / "aceso", ("resnet_500M",), (16, 32))
    dynapipe_tables(folder / "dynapipe")
    fasop_tables(folder / "fasop")
    return folder
