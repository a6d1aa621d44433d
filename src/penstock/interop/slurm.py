"""A plan as a Slurm batch script: one torchrun agent on each node, nodes of several kinds as a heterogeneous job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.interop.torchrun import (
    MAKE_KEY,
    NOTICE_S,
    LaunchNode,
    agent_words,
    bash_list,
    comment,
    launch_nodes,
    node_groups,
    safe_name,
)
from penstock.plans.telling import model_title

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan

__all__ = ["slurm_script"]


def slurm_script(plan: Plan, cluster: Cluster, command: Sequence[str], *, supervised: bool = False) -> str:
    """A script for `sbatch` that runs `command` (a module or a file, and arguments) in one process for each rank of the plan; `supervised`:
    in a supervisor on each node, which survive the loss of others."""
    nodes = launch_nodes(plan, cluster, idle=supervised)
    groups = node_groups(nodes)
    mixed = len(groups) > 1
    directives = "\n#SBATCH hetjob\n".join(_directives(group, mixed) for group in groups)
    return _SCRIPT.format(
        title=comment(model_title(plan)),
        name=safe_name(f"penstock-{model_title(plan)}"),
        directives=directives,
        nodes="\n".join(
            f"#   {len(group)} × {comment(group[0].node.label)}, {plural(group[0].num_processes, 'process')} each" for group in groups
        ),
        processes=bash_list([str(node.num_processes) for node in nodes]),
        command=bash_list(command),
        het_group=f" --het-group=0-{len(groups) - 1}" if mixed else "",
        no_kill=f"\n#SBATCH --no-kill\n#SBATCH --signal=B:TERM@{NOTICE_S}" if supervised else "",
        on_failure="--kill-on-bad-exit=0 --no-kill" if supervised else "--kill-on-bad-exit=1",
        key=_KEY if supervised else "",
        agent=agent_words('"${@:3}"', len(nodes), '"$SLURM_PROCID"', '"${processes[SLURM_PROCID]}"', '"$1"', '"$2"', supervised=supervised),
    )


def _directives(group: Sequence[LaunchNode], mixed: bool) -> str:
    """What one component asks for. In a mixed job the kind of device is named: sites call it by the family (a100, h100)."""
    first = group[0]
    lines = [f"#SBATCH --nodes={len(group)}", "#SBATCH --ntasks-per-node=1"]
    if first.has_accelerators:
        kind = f"{safe_name(first.node.device.name.partition('-')[0])}:" if mixed else ""
        lines.append(f"#SBATCH --gres=gpu:{kind}{first.num_processes}")
    return "\n".join([*lines, "#SBATCH --exclusive"])


_KEY = f"""
# The job's key, which nodes get through their environment.
export PENSTOCK_STORE_KEY=${{PENSTOCK_STORE_KEY:-$({MAKE_KEY})}}
"""
_SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --output=%x-%j.log
{directives}{no_kill}

# Trains {title} on
{nodes}
#
#   sbatch THIS_FILE --data DATA --steps STEPS --out RUN
#
# PYTHON and MASTER_PORT replace python3 and a port made from the job's number. PENSTOCK_IMAGE names a container image to run in (needs
# the pyxis plugin); the folder of the plan and the current one are then mounted, PENSTOCK_MOUNTS adds more (FROM:TO,...).
set -euo pipefail

command={command}

# The node list; the first node is where all ranks meet.
read -r address < <(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
port=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}
{key}
container=()
if [[ -n ${{PENSTOCK_IMAGE:-}} ]]; then
  folder=$(dirname -- "${{command[-1]}}")
  container=(--container-image="$PENSTOCK_IMAGE" --container-workdir="$PWD"
    --container-mounts="$PWD:$PWD,$folder:$folder${{PENSTOCK_MOUNTS:+,$PENSTOCK_MOUNTS}}")
fi

# What each node runs. Its number among all nodes is that of its only task.
read -r -d '' agent <<'AGENT' || true
processes={processes}
exec "${{PYTHON:-python3}}" {agent}
AGENT

exec srun{het_group} {on_failure} ${{container[@]+"${{container[@]}}"}} \\
  bash -euo pipefail -c "$agent" agent "$address" "$port" "${{command[@]}}" "$@"
"""
