"""A plan as a script that starts torchrun, or a supervisor of Penstock, on a list of hosts, and what all launch files are made of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.clusters.hardware import Node
from penstock.errors import InputError, plural
from penstock.plans.placement import cluster_problems
from penstock.plans.telling import model_title

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan

__all__ = [
    "MAKE_KEY",
    "LaunchNode",
    "agent_words",
    "bash_list",
    "comment",
    "launch_nodes",
    "node_groups",
    "safe_name",
    "torchrun_script",
    "train_command",
]

_MOST_OF_A_NAME = 40
"""Characters of the name of a job."""


@dataclass(frozen=True)
class LaunchNode:
    """A machine that has work."""

    node: Node
    device_ids: tuple[int, ...]
    """The accelerators it uses, in the order of ranks: one process each."""

    @property
    def num_processes(self) -> int:
        """Processes on it."""
        return len(self.device_ids)

    @property
    def visible_devices(self) -> str:
        """What CUDA_VISIBLE_DEVICES has to be; empty where process i simply uses device i."""
        return "" if self.device_ids == tuple(range(self.num_processes)) else ",".join(map(str, self.device_ids))

    @property
    def has_accelerators(self) -> bool:
        """Whether its devices are more than its own processor."""
        return not self.node.device.name.lower().startswith("cpu")


def launch_nodes(plan: Plan, cluster: Cluster, *, idle: bool = False) -> list[LaunchNode]:
    """The machines of a plan in rank order; those without work are left out, as are idle devices: process i is the plan's i-th rank. With
    `idle`, devices before the last with work have a process too, which may take another's place."""
    problems = list(cluster_problems(plan, cluster))
    if problems:
        raise InputError(problems[0])
    working = {cluster.node_index(rank) for rank in plan.ranks}
    started = [rank for rank in range(plan.ranks[-1] + 1) if cluster.node_index(rank) in working] if idle else plan.ranks
    return [
        LaunchNode(cluster.node_of(group[0]), tuple(cluster.device_id(rank) for rank in group))
        for _, ranks in groupby(started, key=cluster.node_index)
        for group in (list(ranks),)
    ]


def node_groups(nodes: Sequence[LaunchNode]) -> list[list[LaunchNode]]:
    """Neighbouring machines of one kind with equally many processes."""
    return [list(group) for _, group in groupby(nodes, key=lambda node: (node.node.name, node.node.device.name, node.num_processes))]


def safe_name(text: str) -> str:
    """A name that schedulers and DNS take: small letters, digits and '-'."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MOST_OF_A_NAME].strip("-")
    return name or "plan"


def comment(text: str) -> str:
    """Text that stays inside of one comment line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def bash_list(values: Sequence[str]) -> str:
    """A bash array."""
    return "(" + " ".join(shlex.quote(value) for value in values) + ")"


def train_command(plan_path: str) -> tuple[str, ...]:
    """What each process runs: `penstock train PLAN`, to which a launcher's own arguments are appended."""
    return ("-m", "penstock", "train", plan_path)


NOTICE_S = 120
"""Seconds between SIGTERM and the end of a machine: nodes leave, or a run ends with a checkpoint."""
MAKE_KEY = "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'"
"""Prints a key for a job, in hexadecimal."""


def agent_words(words: str, num_nodes: int, node: str, processes: str, address: str, port: str, *, supervised: bool) -> str:
    """What a node's Python is given, in bash: torchrun with the `words` of each process, or the same words as those of a supervisor, which
    starts the processes of its node itself and survives the loss of others."""
    if supervised:
        return f"{words} --on-death=recover --node-rank={node} --master={address}:{port}"
    return (
        f"-m torch.distributed.run --nnodes={num_nodes} --node-rank={node} --nproc-per-node={processes} \\\n"
        f"    --master-addr={address} --master-port={port} {words}"
    )


def torchrun_script(plan: Plan, cluster: Cluster, command: Sequence[str], *, supervised: bool = False) -> str:
    """A bash script that runs `command` (a module or a file, and arguments) in one process for each rank of the plan; `supervised`: in a
    supervisor on each node."""
    nodes = launch_nodes(plan, cluster, idle=supervised)
    lines = [f"#   {index}  {comment(node.node.label)}: {plural(node.num_processes, 'process')}" for index, node in enumerate(nodes)]
    return _SCRIPT.format(
        title=comment(model_title(plan)),
        example=" ".join(f"host{index}" for index in range(len(nodes))) if len(nodes) <= 4 else "host0 host1 …",
        nodes="\n".join(lines),
        num_nodes=len(nodes),
        hosts_told=plural(len(nodes), "host"),
        processes=bash_list([str(node.num_processes) for node in nodes]),
        devices=bash_list([node.visible_devices for node in nodes]),
        command=bash_list(command),
        hosts="${HOSTS:-127.0.0.1}" if len(nodes) == 1 else "${HOSTS:-}",
        starter="a supervisor of Penstock" if supervised else "torchrun",
        key_words=_KEY_WORDS if supervised else "",
        key=_KEY if supervised else "",
        pass_key='PENSTOCK_STORE_KEY_FILE="$key" ' if supervised else "",
        wait=_WAIT_ANY if supervised else _WAIT_ALL,
        agent=agent_words(
            '"${command[@]}" "$@"', len(nodes), '"$node"', '"${processes[node]}"', '"${hosts[0]#*@}"', '"$port"', supervised=supervised
        ),
    )


_KEY_WORDS = """\
# A node that is lost is done without. The job's key is in PENSTOCK_STORE_KEY_FILE, which all hosts must see; it is made if there is none.
"""
_KEY = f"""
key=${{PENSTOCK_STORE_KEY_FILE:-$HOME/.penstock-key}}
if [[ ! -e $key ]]; then
  (umask 077 && {MAKE_KEY} >"$key")
fi
export PENSTOCK_STORE_KEY_FILE=$key
"""
_WAIT_ALL = """\
for _ in "${agents[@]}"; do
  wait -n || exit 1  # one agent failed: the others are ended
done
"""
_WAIT_ANY = """\
for agent in "${agents[@]}"; do
  wait "$agent" && exit 0  # the run goes on without nodes that are lost
done
exit 1
"""


_SCRIPT = """\
#!/usr/bin/env bash
# Trains {title}, started by {starter} on {hosts_told}:
#
#   HOSTS="{example}" bash THIS_FILE --data DATA --steps STEPS --out RUN
#
# It starts itself on every host through ssh, which must find this file, the plan and Python there under the same paths. Where
# there is no ssh, start it on each host with the same HOSTS and NODE_RANK=0, 1, and so on. The hosts are, in this order:
#
{nodes}
#
{key_words}# PYTHON, MASTER_PORT and REMOTE_SHELL replace python3, 29500 and ssh.
set -euo pipefail
{key}
command={command}
processes={processes}
devices={devices}
read -r -a hosts <<<"{hosts}"
port=${{MASTER_PORT:-29500}}
python=${{PYTHON:-python3}}

if ((${{#hosts[@]}} != {num_nodes})); then
  echo "HOSTS has ${{#hosts[@]}} names; the plan needs {num_nodes}." >&2
  exit 2
fi

run_agent() {{
  local node=$1
  shift
  if [[ -n ${{devices[node]}} ]]; then
    export CUDA_VISIBLE_DEVICES=${{devices[node]}}
  fi
  exec "$python" {agent}
}}

if [[ -n ${{NODE_RANK:-}} ]]; then
  if [[ ! $NODE_RANK =~ ^(0|[1-9][0-9]{{0,8}})$ ]] || ((NODE_RANK >= {num_nodes})); then
    echo "NODE_RANK is '$NODE_RANK'; 0 to $(({num_nodes} - 1)) was expected." >&2
    exit 2
  fi
  run_agent "$NODE_RANK" "$@"
elif (({num_nodes} == 1)); then
  run_agent 0 "$@"
fi

script=$(realpath -- "${{BASH_SOURCE[0]}}")
agents=()
trap 'kill "${{agents[@]}}" 2>/dev/null || true' EXIT
for node in "${{!hosts[@]}}"; do
  printf -v remote '%q ' env NODE_RANK="$node" HOSTS="${{hosts[*]}}" MASTER_PORT="$port" PYTHON="$python" {pass_key}bash "$script" "$@"
  printf -v folder '%q' "$PWD"
  ${{REMOTE_SHELL:-ssh}} "${{hosts[node]}}" "cd $folder && $remote" </dev/null &
  agents+=($!)
done
{wait}"""
