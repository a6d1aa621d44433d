"""Peers run from checkouts beside ours: stand-ins with the interfaces of Aceso, FASOP and DynaPipe, made here."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_tables import aceso_tables, dynapipe_tables, fasop_tables

from penstock.batching.plan import SampleLengths
from penstock.cli.main import run
from penstock.reproduce import aceso_cases
from penstock.reproduce.peers import Peer, PeerError
from penstock.reproduce.peers.dynapipe import plan_with_dynapipe
from penstock.systems.dynapipe.tables import open_configuration

ACESO = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("model-name", "model-size", "initial-point", "profiled-time-path", "config-save-path", "log-path"):
    parser.add_argument("--" + name)
for name in ("global-batch-size", "num-nodes", "num-gpus-per-node", "max-num-hops", "time-budget-total"):
    parser.add_argument("--" + name, type=int)
parser.add_argument("--memory-limit", type=float)
parser.add_argument("--micro-batch-size", type=int, nargs="+")
args = parser.parse_args()
assert open(args.profiled_time_path + "p2p_intra_node.csv").read() and args.micro_batch_size == [1, 2]
for stages, ms, mb in ((1, 900000.0, 19000.0), (2, 1.0, 21000.0), (3, 950000.0, 5.0)):
    name = f"{args.model_name}_{args.model_size}_{stages}stages_now"
    with open(f"{args.config_save_path}csv/info_{name}.csv", "w") as file:
        file.write(f"stage-index,time,memory(total),memory(normal),memory(reserved)\\nstage-0,{ms},{mb},0,0\\nstage-1,2,3,4,5\\n")
    with open(f"{args.config_save_path}{name}.json", "w") as file:
        json.dump({"num_ops_in_each_stage": [100 * stages]}, file)
"""
FASOP = """
import os, sys
assert sys.argv[1:2] == ["--type"] and os.path.exists("beside.txt")
os.makedirs(os.environ["PWD"] + "/main_logs")
nodes = "['a10g', 'a10g']" if "--heterogeneous" not in sys.argv else "['a10g', 'a100-40gb']"
layers = 5 if sys.argv[2] == "T5" else 4
with open(os.environ["PWD"] + "/main_logs/x.csv", "w") as file:
    print("mbs,tp,dp,pp,node placement,partition,estimated time (s/step)", file=file)
    print(f'16,1,8,1,"{nodes}",[9],0.001', file=file)
    print(f'1,1,8,1,"{nodes}",[{layers}],0.5', file=file)
    print(f'8,1,8,1,"{nodes}",[{layers}],0.6', file=file)
"""
DYNAPIPE = {
    "elkai.py": "def solve_int_matrix(matrix, runs):\n    assert isinstance(matrix, list)\n    return [0]\n",
    "dynapipe/__init__.py": "", "dynapipe/data_opt/__init__.py": "", "dynapipe/schedule_opt/__init__.py": "",
    "dynapipe/data_opt/cost_models.py": """
class ProfileBasedCostModel:
    def __init__(self, _timing_data, _stored_activation_data, _peak_activation_data, _model_state_data, _max_throughput_achieved):
        self.held = _timing_data, _stored_activation_data, _peak_activation_data, _model_state_data
class ProfileBasedCostModelWithRC:
    def __init__(self, _serialized_cms):
        assert _serialized_cms == {}
""",
    "dynapipe/data_opt/optimizer.py": """
import elkai, numpy
print("make: nothing to be done")
class DataAssignmentOptimizer:
    def __init__(self, costs, spec, stages, layers, **asked):
        assert elkai.solve_int_matrix(numpy.zeros((1, 1)), 1, bottleneck=False) == [0]
        times, stored, peak, sizes = costs.cost_models[asked["tp_size"], "none"].held
        assert times["encoder", "forward"][512][0][0] == 1 and sizes["encoder"] > 0 and stored["encoder"][512] and peak["encoder"][512]
        self.stages, self.layers, self.asked = stages, layers, asked
    def generate_microbatches(self, lengths, decoder_sample_sequence_lengths):
        if max(lengths) > 2000:
            return None, None, None, None, None
        assert (self.stages, self.layers, self.asked["device_memory_limit"]) == (4, 8, 36000)
        return None, [[[[0], [1]]], [[[index] for index in range(2, len(lengths))]]], None, None, None
""",
    "dynapipe/model.py": """
class DynaPipeCluster:
    def __init__(self, nodes, memory, *links):
        assert nodes == {0: 0, 1: 0, 2: 0, 3: 0} and links == (2400.0, 100.0, 0.0, 4000.0)
class TransformerModelSpec:
    def __init__(self, encoders, decoders, hidden, *others):
        assert (encoders, decoders, hidden) == (32, 0, 4096)
""",
    "dynapipe/schedule_opt/execution_planner.py": """
class ExecutionPlanner:
    def __init__(self, cluster, spec, assignment, memory, costs, **asked):
        assert assignment == [layer // 8 for layer in range(32)]
    def generate_execution_plan(self, shapes):
        ((rows, length, decoder),) = shapes
        return None, float(1000 * rows + length), None, None, None
""",
}  # fmt: skip


def checkout(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def rows_of(folder: Path, series: str) -> list[tuple[str, str, str]]:
    rows = csv.DictReader((folder / "figure.csv").open())
    return [(row["x"], row["y"], row["published"]) for row in rows if row["series"] == series]


def test_acesos_search_runs_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("miniset", "eurosys"):
        aceso_tables(tmp_path / "aceso" / name, ("gpt_350M",), (1, 2), (1, 2))
    case = aceso_cases.AcesoCase("eurosys", "gpt", "350M", 1, 2, 16, (1, 2), 20_000, aceso_s=7.0)
    monkeypatch.setattr(aceso_cases, "KNOWN_CASES", (case,))
    asked = ["reproduce", "aceso", "--figure", "plans", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--json"]
    assert run(asked) == 0
    (alone,) = json.loads(capsys.readouterr().out)["results"]
    assert rows_of(tmp_path / "out/aceso/plans", "Aceso") == [(case.title, "7.0", "True")] and "--peer" in alone["note"]
    peer = checkout(tmp_path / "peer", {"search/aceso_search.py": ACESO})
    assert run([*asked, "--peer", f"aceso={peer}"]) == 0
    (beside,) = json.loads(capsys.readouterr().out)["results"]
    assert rows_of(tmp_path / "out/aceso/plans", "Aceso") == [(case.title, "900.0", "False")], "the fastest of its plans that fits"
    assert "ran here" in beside["note"] and beside["published"] == []
    (peer / "search/aceso_search.py").write_text("raise SystemExit('needs a GPU')")
    assert run([*asked, "--peer", f"aceso={peer}"]) == 0
    (failed,) = json.loads(capsys.readouterr().out)["results"]
    assert rows_of(tmp_path / "out/aceso/plans", "Aceso") == [(case.title, "7.0", "True")] and "needs a GPU" in failed["note"]


def test_fasops_rows_are_scored_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fasop_tables(tmp_path / "fasop", 2, ("BB", "AB"))
    peer = checkout(tmp_path / "peer", {"FASOP/FASOP.py": FASOP, "FASOP/beside.txt": ""})
    asked = ["reproduce", "fasop", "--figure", "settings", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--json", "--quick"]
    assert run([*asked, "--peer", f"fasop={peer}"]) == 0
    assert "ran here" in json.loads(capsys.readouterr().out)["results"][0]["note"]
    first = rows_of(tmp_path / "out/fasop/settings", "FASOP's first fitting row")
    best = rows_of(tmp_path / "out/fasop/settings", "FASOP's best row")
    run_here = {x: float(y) for x, y, published in first if published == "False" and y}
    assert set(run_here) == {"bert-homo", "bert-het", "gpt2XL-homo", "gpt2XL-het", "T5-homo"}, "the short form leaves T5-het as published"
    assert [y for x, y, published in first if x == "T5-het"] == ["", "1.0203"]
    assert all(float(y) <= run_here[x] for x, y, published in best if published == "False" and y)
    assert any(float(y) < run_here[x] for x, y, published in best if published == "False" and y)


def test_dynapipe_plans_in_its_own_process(tmp_path: Path) -> None:
    peer = Peer("dynapipe", checkout(tmp_path / "peer", DYNAPIPE))
    tables, config = open_configuration(dynapipe_tables(tmp_path / "tables", (1, 2)) / "gptA")
    short = [SampleLengths(index, length) for index, length in enumerate((100, 130, 50))]
    planned, failed = plan_with_dynapipe(peer, tables, config, [short, [SampleLengths(0, 4000)]])
    assert planned.ms == 2000 + 136, "the slower replica: two rows, 129 positions in whole eights"
    assert failed.ms is None and "dynapipe" not in sys.modules


@pytest.mark.parametrize(("program", "said"), [("raise ValueError('no cuda')", "status 1: ValueError: no cuda"), ("print('x')\n" * 3, "")])
def test_a_peer_ends_in_its_own_home(program: str, said: str, tmp_path: Path) -> None:
    peer = Peer("fasop", checkout(tmp_path / "peer", {"a.py": f"import os\nassert os.environ['HOME'] == {str(tmp_path)!r}\n{program}"}))
    if not said:
        assert peer.run(["a.py"], tmp_path, 60).text.split() == ["x"] * 3
        return
    with pytest.raises(PeerError, match=said):
        peer.run(["a.py"], tmp_path, 60)


@pytest.mark.timeout(30)
def test_a_peer_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    fork = "import os, time\nchild = os.fork()\nopen(f'{os.environ[\"HOME\"]}/{os.getpid()}', 'w')\ntime.sleep(60)\n"
    peer = Peer("aceso", checkout(tmp_path / "peer", {"a.py": fork}))
    (tmp_path / "home").mkdir()
    with pytest.raises(PeerError, match="not answered after 1 s"):
        peer.run(["a.py"], tmp_path / "home", 1)
    started = [int(path.name) for path in (tmp_path / "home").iterdir()]
    assert len(started) == 2
    while any(_runs(pid) for pid in started):
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() and not os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("given", "said"),
    [("alpa=.", "Known: aceso, dynapipe, fasop"), ("aceso", "NAME=CHECKOUT"), ("aceso=.", "no search/aceso_search.py"),
     ("fasop=@", "no part in")],
)  # fmt: skip
def test_what_is_no_checkout_is_refused(given: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkout(tmp_path / "peer", {"FASOP/FASOP.py": FASOP})
    assert run(["reproduce", "aceso", "--data", str(tmp_path), "--peer", given.replace("@", str(tmp_path / "peer"))]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
