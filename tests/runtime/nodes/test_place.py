"""Which node is which: ranks by the plan's cluster, the address of node 0, and the key that all hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.adapting.watching import move_run, obey_run
from penstock.cli.main import run as main
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.references import cluster_of
from penstock.runtime.nodes.place import node_facts, node_key, node_notes, node_place, ranks_of_nodes, store_key, threads_here
from penstock.runtime.request import NodePlace, PlanningSettings, TrainRequest
from penstock.runtime.settings import LearningRate, TrainingSettings
from penstock.stores.sealing import KEY_FILE_VARIABLE, KEY_VARIABLE


def test_ranks_of_nodes() -> None:
    plan = uniform_plan("gpt-tiny", "3xp4d.24xlarge", global_batch=16, micro_batch=4, pp=4, dp=4)
    assert ranks_of_nodes(plan, cluster_of(plan)) == [tuple(range(8)), tuple(range(8, 16))]


def test_processes_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have work under a plan, and not those of other nodes."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    plan = uniform_plan("gpt-tiny", "2xp4d.24xlarge", global_batch=16, micro_batch=4, pp=4, dp=4)
    fewer = uniform_plan("gpt-tiny", "2xp4d.24xlarge", global_batch=16, micro_batch=4, pp=2, dp=2)
    request = TrainRequest(plan, "data", 1, "run")
    for place, own, threads in ((None, plan, 1), (0, plan, 2), (1, plan, 2), (0, fewer, 4), (1, fewer, 16)):
        here = replace(request, node=None if place is None else NodePlace(place, "host", 1))
        assert threads_here(here, own) == threads


def test_a_node_says_whom_it_waits_for() -> None:
    plan = uniform_plan("gpt-tiny", "3xp4d.24xlarge", global_batch=48, micro_batch=24, dp=24)
    request = TrainRequest(plan, "data", 1, "run")
    assert node_notes(request) == []
    assert node_notes(replace(request, node=NodePlace(0, "host", 7))) == ["this is node 0, which waits for 2 other nodes at host:7."]
    (note,) = node_notes(replace(request, node=NodePlace(2, "host", 7)))
    assert note == "this is node 2, which waits for node 0 at host:7; that one tells of the steps."


def test_where_node_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["penstock"])
    assert node_place(1, "10.0.0.1:29500") == NodePlace(1, "10.0.0.1", 29500)
    assert node_place(0, "[fe80::1]:1") == NodePlace(0, "fe80::1", 1)
    for wrong in ("host", "host:", ":80", "host:0", "host:65536", "a b:80"):
        with pytest.raises(InputError, match="address of node 0 and a port"):
            node_place(1, wrong)


def test_the_key_is_never_used_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=f"set {KEY_FILE_VARIABLE} to a file of mode 0600"):
        node_key()
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 16)
    assert len({bytes.fromhex("ab" * 16), node_key(), store_key()}) == 3
    monkeypatch.setenv(KEY_VARIABLE, "ab")
    with pytest.raises(InputError, match="has 1 byte; at least 16"):
        node_key()


def test_the_options_go_together(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "plan.json", "--node-rank", "1"]) == 2
    assert main(["train", "--model", "gpt-tiny", "--data", "x.jsonl", "--out", f"{tmp_path}/run", "--master", "a:1"]) == 2
    assert "--master goes with a plan file, not with a job" in capsys.readouterr().err


def test_nodes_are_asked_for_the_same(data: str) -> None:
    """Whatever is another on one of them is told before they train past each other."""
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4)
    request = TrainRequest(plan, data, 10, "run")
    changes = {
        "--steps": {"steps": 11}, "--on-death": {"on_death": "recover"}, "--copies": {"copies": 3}, "--spares": {"spares": 1},
        "plan": {"plan": replace(plan, schedule="gpipe")}, "--seed": {"settings": TrainingSettings(seed=1)},
        "learning": {"settings": TrainingSettings(LearningRate(1.0))}, "--device": {"device": "paced"}, "--eval-every": {"eval_every": 2},
        "--eval-batches": {"eval_batches": 1}, "--checkpoint-every": {"checkpoint_every": 7}, "--weights": {"weights": "hf:folder"},
        "prompt loss": {"prompt_loss": True}, "--budget-steps": {"planning": PlanningSettings(search_steps=9)},
    }  # fmt: skip
    facts = node_facts(request)
    for name, change in changes.items():
        other = node_facts(replace(request, **change))
        assert facts.keys() <= other.keys() and other[name] != facts[name], name
    assert node_facts(request, move_run) != node_facts(request, obey_run) == node_facts(request, obey_run)
