"""Launch files: right syntax, the right processes on the right nodes, hostile names kept quiet, and torchrun's really run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

from penstock.clusters import Cluster, resolve_cluster
from penstock.errors import InputError
from penstock.interop.kubernetes import kubernetes_objects, kubernetes_text
from penstock.interop.slurm import slurm_script
from penstock.interop.torchrun import launch_nodes, safe_name, torchrun_script, train_command
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan

MIXED = "2xp4d.24xlarge+1xg5.24xlarge"


def case(cluster: str, ranks: dict[int, int] | None = None, **shape: Any) -> tuple[Plan, Cluster]:
    """A plan over some devices of a cluster; `ranks` moves it to others."""
    plan = uniform_plan("gpt-tiny", cluster, global_batch=120, micro_batch=1, **shape)
    if ranks:
        stages = [replace(s, devices=tuple(tuple(ranks.get(r, r) for r in group) for group in s.devices)) for s in plan.stages]
        plan = replace(plan, stages=tuple(stages))
    return plan, resolve_cluster(cluster)


CASES = {
    "one": case("4xa100-40gb", pp=2, tp=2),
    "nodes": case("16xa100-40gb", pp=2, tp=4, replicas=2),
    "mixed": case(MIXED, pp=4, replicas=5),
    "some": case("16xa100-40gb", {1: 9, 2: 10, 3: 12}, pp=2, replicas=2),
    "cpu": case("2xcpu", pp=2),
}
COMMAND = ("-m", "penstock", "train", "plan.json")
PROCESSES = {"one": [4], "nodes": [8, 8], "mixed": [8, 8, 4], "some": [1, 3], "cpu": [2]}


def check_syntax(text: str, folder: Path) -> Path:
    path = folder / "script"
    path.write_text(text)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "-s", "bash", str(path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for Python that notes how it was called: nothing is trained, all the shell's own work is done."""
    path = tmp_path / "noting python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "with open(os.environ['NOTES'], 'a') as file:\n"
        "    file.write(json.dumps([os.environ.get('CUDA_VISIBLE_DEVICES', ''), *sys.argv[1:]]) + '\\n')\n"
    )
    path.chmod(0o755)
    return path


def run_script(command: list[str], folder: Path, python: Path, **environment: str) -> list[list[str]]:
    """What the stand-in was called with."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("HOSTS", "NODE_RANK", "CUDA_VISIBLE_DEVICES")}
    done = subprocess.run(
        command,
        env={**kept, "PYTHON": str(python), "NOTES": str(notes), **environment},
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in notes.read_text().splitlines()]


def options(call: list[str]) -> dict[str, str]:
    return dict(part.removeprefix("--").split("=", 1) for part in call if part.startswith("--") and "=" in part)


def test_a_part_of_a_node_is_asked_for_as_that() -> None:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", global_batch=8, micro_batch=1, pp=2)
    cluster = resolve_cluster("4xa100-40gb")
    assert "#SBATCH --gres=gpu:2\n" in slurm_script(replace(plan, cluster="4xa100-40gb"), cluster, COMMAND)


def test_as_many_nodes_may_fail_as_there_are() -> None:
    plan, cluster = CASES["mixed"]
    *_, first, second = kubernetes_objects(plan, cluster, "{}", COMMAND, supervised=True)
    assert [(job["spec"]["completions"], job["spec"]["maxFailedIndexes"]) for job in (first, second)] == [(2, 2), (1, 1)]


def test_nodes_and_their_processes() -> None:
    for name, (plan, cluster) in CASES.items():
        assert [node.num_processes for node in launch_nodes(plan, cluster)] == PROCESSES[name]
    some = launch_nodes(*CASES["some"])
    assert [node.visible_devices for node in some] == ["", "1,2,4"]
    plan, _ = CASES["nodes"]
    with pytest.raises(InputError, match=r"has rank .* but the cluster"):
        launch_nodes(plan, resolve_cluster("4xa100-40gb"))


@pytest.mark.parametrize("name", CASES)
def test_torchrun_starts_an_agent_on_each_host(name: str, tmp_path: Path, python: Path) -> None:
    plan, cluster = CASES[name]
    script = check_syntax(torchrun_script(plan, cluster, COMMAND), tmp_path)
    over = tmp_path / "over"
    over.write_text('#!/usr/bin/env bash\necho "$1" >>"$NOTES.hosts"\nexec bash -c "$2"\n')
    over.chmod(0o755)
    hosts = [f"me@h{index}" for index in range(len(PROCESSES[name]))]
    environment = {"HOSTS": " ".join(hosts), "REMOTE_SHELL": str(over), "MASTER_PORT": "1234"}
    calls = run_script(["bash", str(script), "--data", "a b;c $HOME 'd'"], tmp_path, python, **environment)
    calls.sort(key=lambda call: int(options(call)["node-rank"]))
    assert [int(options(call)["nproc-per-node"]) for call in calls] == PROCESSES[name]
    for index, call in enumerate(calls):
        assert options(call).items() >= {"nnodes": str(len(hosts)), "master-addr": "h0", "master-port": "1234"}.items()
        assert options(call)["node-rank"] == str(index)
        assert call[1:3] == ["-m", "torch.distributed.run"] and call[-6:] == [*COMMAND, "--data", "a b;c $HOME 'd'"]
        assert call[0] == launch_nodes(plan, cluster)[index].visible_devices
    if len(hosts) > 1:
        assert sorted((tmp_path / "notes.hosts").read_text().split()) == hosts


def test_torchrun_refuses_wrong_hosts(tmp_path: Path) -> None:
    script = check_syntax(torchrun_script(*CASES["nodes"], COMMAND), tmp_path)
    for environment, told in (({}, "HOSTS has 0 names; the plan needs 2"), ({"HOSTS": "a b c"}, "has 3 names"),
                              ({"HOSTS": "a b", "NODE_RANK": "2"}, "NODE_RANK is '2'; 0 to 1"),
                              ({"HOSTS": "a b", "NODE_RANK": "x[$(touch hacked)]"}, "0 to 1 was expected")):  # fmt: skip
        done = subprocess.run(["bash", str(script)], env={**os.environ, **environment}, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and told in done.stderr
    assert not (tmp_path / "hacked").exists()


def test_torchrun_ends_all_when_one_fails(tmp_path: Path) -> None:
    script = check_syntax(torchrun_script(*CASES["nodes"], COMMAND), tmp_path)
    over = tmp_path / "over"
    over.write_text("#!/usr/bin/env bash\nif [[ $1 == bad ]]; then exit 3; fi\nexec sleep 100\n")
    over.chmod(0o755)
    done = subprocess.run(["bash", str(script)], env={**os.environ, "HOSTS": "good bad", "REMOTE_SHELL": str(over)}, timeout=250)
    assert done.returncode == 1


def test_a_lost_node_ends_no_supervised_run(tmp_path: Path) -> None:
    script = check_syntax(torchrun_script(*CASES["nodes"], COMMAND, supervised=True), tmp_path)
    over = tmp_path / "over"
    over.write_text("#!/usr/bin/env bash\n[[ $1 == good ]]\n")
    over.chmod(0o755)
    environment = {**os.environ, "REMOTE_SHELL": str(over), "HOME": str(tmp_path)}
    for hosts, status in (("bad good", 0), ("good bad", 0), ("bad worse", 1)):
        assert subprocess.run(["bash", str(script)], env={**environment, "HOSTS": hosts}, timeout=60).returncode == status


TINY = """
import json, os, sys
found = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT")]
with open(os.path.join(sys.argv[1], "rank-" + os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""


def test_two_local_agents_really_meet(tmp_path: Path) -> None:
    """The script starts two agents with one and two processes, through a shell that leads to this machine. Only where the agents meet does
    anyone know of three processes in all; these import nothing, which would take longer than all the rest."""
    plan, cluster = case("16xcpu", {2: 8}, replicas=3)
    assert [node.num_processes for node in launch_nodes(plan, cluster)] == [2, 1]
    (tmp_path / "out folder").mkdir()
    (tmp_path / "tiny script.py").write_text(TINY)
    script = check_syntax(torchrun_script(plan, cluster, [str(tmp_path / "tiny script.py")]), tmp_path)
    over = tmp_path / "over"
    over.write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$1"\n')
    over.chmod(0o755)
    environment = {**os.environ, "HOSTS": "127.0.0.1 127.0.0.1", "REMOTE_SHELL": str(over), "MASTER_PORT": str(free_port()),
                   "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = ["bash", str(script), str(tmp_path / "out folder")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / "out folder" / f"rank-{rank}").read_text()) for rank in range(3)]
    assert [one[:4] for one in found] == [["0", "0", "2", "3"], ["0", "1", "2", "3"], ["1", "0", "1", "3"]]
    assert len({one[4] for one in found}) == 1


@pytest.mark.parametrize("name", CASES)
def test_slurm_asks_for_the_nodes_and_starts_them(name: str, tmp_path: Path, python: Path) -> None:
    plan, cluster = CASES[name]
    text = slurm_script(plan, cluster, COMMAND)
    script = check_syntax(text, tmp_path)
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    components = "\n".join(head).split("#SBATCH hetjob")
    assert sum(int(part.partition("--nodes=")[2].split()[0]) for part in components) == len(PROCESSES[name])
    for part in components:  # one agent on a node, which has it for itself
        assert part.split().count("--ntasks-per-node=1") == part.split().count("--exclusive") == 1
    assert ("--gres=gpu:4" in text) == (name == "one") and ("gres" in text) == (name != "cpu")
    if name in ("mixed", "some"):
        assert len(components) == 2
    if name == "mixed":
        assert "--gres=gpu:a100:8" in components[0] and "--gres=gpu:a10g:4" in components[1] and "srun --het-group=0-1 " in text
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    count = len(PROCESSES[name])
    (bin_folder / "scontrol").write_text('#!/usr/bin/env bash\n[[ $3 == "n[0-9]" ]] || exit 1\nfor i in 0 1 2 3; do echo "n$i"; done\n')
    (bin_folder / "srun").write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >srun.args\nwhile [[ $1 == --* ]]; do shift; done\n'
        f'for ((i = 0; i < {count}; i++)); do SLURM_PROCID=$i "$@"; done\n'
    )
    for tool in bin_folder.iterdir():
        tool.chmod(0o755)
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[0-9]"} if name in ("mixed", "some") else {"SLURM_JOB_NODELIST": "n[0-9]"}
    environment = {**nodes, "SLURM_JOB_ID": "123456", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    calls = run_script(["bash", str(script), "--out", "x $y"], tmp_path, python, **environment)
    assert [int(options(call)["nproc-per-node"]) for call in calls] == PROCESSES[name]
    assert [options(call)["node-rank"] for call in calls] == [str(index) for index in range(count)]
    assert {options(call)["master-addr"] for call in calls} == {"n0"} and {options(call)["master-port"] for call in calls} == {"23456"}
    assert all(call[-6:] == [*COMMAND, "--out", "x $y"] for call in calls)
    assert "--container" not in (tmp_path / "srun.args").read_text()
    run_script(
        ["bash", str(script)], tmp_path, python, **environment, PENSTOCK_IMAGE="registry#team/image:1", PENSTOCK_MOUNTS="/data:/data"
    )
    told = (tmp_path / "srun.args").read_text().splitlines()
    assert "--container-image=registry#team/image:1" in told
    assert f"--container-mounts={tmp_path}:{tmp_path},.:.,/data:/data" in told


@pytest.mark.parametrize("name", CASES)
def test_kubernetes_objects_fit_together(name: str, tmp_path: Path, python: Path) -> None:
    plan, cluster = CASES[name]
    text = kubernetes_text(plan, cluster, '{"a": "b\\n: c"}\n', COMMAND)
    service, config, *jobs = yaml.safe_load_all(text)
    assert "&id" not in text and config["data"] == {"plan.json": '{"a": "b\\n: c"}\n'}
    assert [service["kind"], config["kind"], *(job["kind"] for job in jobs)] == ["Service", "ConfigMap", *["Job"] * len(jobs)]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    calls = []
    for job in jobs:
        pod = job["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"]
        assert job["spec"]["backoffLimit"] == 0  # a pod that starts again finds nobody: the others have ended
        (apart,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
        assert apart["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["subdomain"] == service["metadata"]["name"] and pod["spec"]["restartPolicy"] == "Never"
        (container,) = pod["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
        for index in range(job["spec"]["completions"]):
            made = run_script([*container["command"], *container["args"]], tmp_path, python, JOB_COMPLETION_INDEX=str(index))
            calls += made
        limits = container.get("resources", {}).get("limits", {})
        assert limits == ({} if name == "cpu" else {"nvidia.com/gpu": int(options(made[0])["nproc-per-node"])})
    assert [int(options(call)["nproc-per-node"]) for call in calls] == PROCESSES[name]
    assert [options(call)["node-rank"] for call in calls] == [str(index) for index in range(len(calls))]
    first = f"{jobs[0]['metadata']['name']}-0.{service['metadata']['name']}"
    assert {options(call)["master-addr"] for call in calls} == {first}
    if name == "mixed":
        selectors = [job["spec"]["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] for job in jobs]
        assert selectors == ["p4d.24xlarge", "g5.24xlarge"]


@pytest.mark.parametrize("name", ["mixed", "some", "one"])
def test_supervisors_in_place_of_torchrun(name: str, tmp_path: Path, python: Path) -> None:
    """One on each node, with a key that is on no command line; a node that fails ends no other."""
    plan, cluster = CASES[name]
    count = len(PROCESSES[name])
    expected = [[*COMMAND, "--steps", "3", "--on-death=recover", f"--node-rank={node}"] for node in range(count)]
    over = tmp_path / "over"
    # The first node to end ends the others, whose stand-ins may not have been called by then.
    until = f'until (($(wc -l <"$NOTES") >= {count})); do sleep 0.05; done'
    over.write_text(f'#!/usr/bin/env bash\necho "$2" >>"$NOTES.words"\nbash -c "$2"\n{until}\n')
    over.chmod(0o755)
    script = check_syntax(torchrun_script(plan, cluster, COMMAND, supervised=True), tmp_path)
    environment = {"HOSTS": " ".join(f"h{node}" for node in range(count)), "REMOTE_SHELL": f"bash {over}", "HOME": str(tmp_path)}
    calls = run_script(["bash", str(script), "--steps", "3"], tmp_path, python, **environment)
    key = tmp_path / ".penstock-key"
    assert sorted(call[1:-1] for call in calls) == expected and {call[-1] for call in calls} == {"--master=h0:29500"}
    assert key.stat().st_mode & 0o777 == 0o600 and len(bytes.fromhex(key.read_text())) == 32
    assert count == 1 or key.read_text() not in (tmp_path / "notes.words").read_text()
    text = slurm_script(plan, cluster, COMMAND, supervised=True)
    check_syntax(text, tmp_path)
    assert "\n#SBATCH --no-kill\n" in text and "--kill-on-bad-exit=0" in text and "torch.distributed" not in text
    assert "export PENSTOCK_STORE_KEY=" in text and "\n#SBATCH --signal=B:TERM@120\n" in text
    written = kubernetes_text(plan, cluster, "{}", COMMAND, supervised=True)
    _, _, *jobs = yaml.safe_load_all(written)
    made = []
    for job in jobs:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["env"][0]["valueFrom"]["secretKeyRef"]["name"] in written.partition("\napiVersion")[0]
        assert job["spec"]["backoffLimitPerIndex"] == 0 and "backoffLimit" not in job["spec"]
        assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 120
        for index in range(job["spec"]["completions"]):
            made += run_script([*container["command"], "--steps", "3"], tmp_path, python, JOB_COMPLETION_INDEX=str(index))
    assert [call[1:-1] for call in made] == expected
    if name == "some":  # idle devices before the last with work have a process, and can take a dead one's place
        assert [node.num_processes for node in launch_nodes(plan, cluster, idle=True)] == [8, 5]


HOSTILE = ["a\nrm -rf x", "$(touch hacked)", "`touch hacked`", "'; touch hacked; '", 'x"y', "# {title} %s", "日本", "", "-rf", "a\0b"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_names(text: str, tmp_path: Path, python: Path) -> None:
    """In the model's name, the plan's path and the arguments."""
    plan, cluster = CASES["one"]
    plan = replace(plan, model={"family": "gpt", "name": text})
    command = train_command(f"/plans/{text.replace(chr(0), '')}")
    for script in (torchrun_script(plan, cluster, command), slurm_script(plan, cluster, command)):
        path = check_syntax(script, tmp_path)
    assert (
        run_script(["bash", str(check_syntax(torchrun_script(plan, cluster, command), path.parent))], tmp_path, python)[0][-1]
        == command[-1]
    )
    objects = kubernetes_objects(plan, cluster, "{}", command)
    assert list(yaml.safe_load_all(kubernetes_text(plan, cluster, "{}", command))) == objects
    for one in objects:
        name = one["metadata"]["name"]
        assert len(name) <= 55 and name == name.lower() and name.replace("-", "").isalnum() and name.isascii() and name[0].isalpha()
    assert not (tmp_path / "hacked").exists()


def test_names_and_limits() -> None:
    assert safe_name("GPT 1.3B_x!") == "gpt-1-3b-x" and safe_name("$$$") == "plan" and len(safe_name("a" * 99)) == 40
    plan, cluster = CASES["one"]
    with pytest.raises(InputError, match="a ConfigMap holds"):
        kubernetes_objects(plan, cluster, "x" * 1_100_000, COMMAND)


def test_kubernetes_asks_for_devices_by_their_makers_name() -> None:
    for text, name in (("8xmi300x", "amd.com/gpu"), ("8xh100", "nvidia.com/gpu")):
        plan = uniform_plan("gpt-tiny", text, tp=4, replicas=2, global_batch=8, micro_batch=1)
        *_, job = kubernetes_objects(plan, resolve_cluster(text), "{}", COMMAND)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {name: 8}}
