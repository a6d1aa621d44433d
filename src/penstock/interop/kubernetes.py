"""A plan as Kubernetes objects: an indexed Job for each kind of node, a headless service by which pods find each other, the plan itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.clusters.instances import INSTANCES
from penstock.errors import InputError
from penstock.interop.torchrun import MAKE_KEY, NOTICE_S, LaunchNode, agent_words, comment, launch_nodes, node_groups, safe_name
from penstock.plans.telling import model_title

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan

__all__ = ["PLAN_PATH", "kubernetes_objects", "kubernetes_text"]

PLAN_PATH = "/etc/penstock/plan.json"
"""Where the plan lies in each pod."""
_MOST_BYTES = 10**6
"""Of a ConfigMap, a little less than its limit."""
_PORT = 29500

# Kubernetes itself replaces what stands in $(…), so the shell's own form of that is not used.
_AGENT = """\
node=$JOB_COMPLETION_INDEX
((node += {first})) || true
exec "${{PYTHON:-python3}}" {words}
"""

_HEAD = """\
# Trains {title}: kubectl apply -f THIS_FILE
#
# Before that, set in each Job: the image, which must hold Penstock, and the arguments after 'train'; and make the claims
# 'penstock-data' (read) and 'penstock-runs' (written by all nodes), or put other volumes in their place.
"""
_KEY_HEAD = f"""\
# The job's key is in a secret: kubectl create secret generic {{secret}} --from-literal=key="$({MAKE_KEY})"
"""


def kubernetes_text(plan: Plan, cluster: Cluster, plan_json: str, command: Sequence[str], *, supervised: bool = False) -> str:
    """All objects as one YAML file."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Every value written out, texts of several lines as such."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Plain.add_representer(str, text)
    objects = kubernetes_objects(plan, cluster, plan_json, command, supervised=supervised)
    key = _KEY_HEAD.format(secret=_secret(_name(plan))) if supervised else ""
    return _HEAD.format(title=comment(model_title(plan))) + key + yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=120)


def _name(plan: Plan) -> str:
    return safe_name(f"penstock-{model_title(plan)}")


def _secret(name: str) -> str:
    return f"{name}-key"


def kubernetes_objects(
    plan: Plan, cluster: Cluster, plan_json: str, command: Sequence[str], *, supervised: bool = False
) -> list[dict[str, Any]]:
    """The objects that run `command` (a module or a file, and arguments) in one process for each rank of the plan; `supervised`: in a
    supervisor on each node, which survive the loss of others."""
    if len(plan_json.encode()) > _MOST_BYTES:
        raise InputError(f"the plan has {len(plan_json.encode())} bytes; a ConfigMap holds {_MOST_BYTES}. Write its model as a name.")
    nodes = launch_nodes(plan, cluster, idle=supervised)
    groups = node_groups(nodes)
    name = _name(plan)
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": name}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
        # Names must resolve before pods are ready: they become ready only after they have met.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": [{"name": "meet", "port": _PORT}]},
    }  # fmt: skip
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"plan.json": plan_json}}
    jobs, first = [], 0
    for index, group in enumerate(groups):
        place = f"{name}-0-0.{name}", str(_PORT)
        words = agent_words('"$@"', len(nodes), '"$node"', str(group[0].num_processes), *place, supervised=supervised)
        job = _job(f"{name}-{index}", name, labels, group, _AGENT.format(first=first, words=words), command)
        jobs.append(_supervised(job, name) if supervised else job)
        first += len(group)
    return [service, config, *jobs]


def _job(job: str, name: str, labels: dict[str, str], group: Sequence[LaunchNode], agent: str, command: Sequence[str]) -> dict[str, Any]:
    """An indexed Job whose pods are the nodes of a group, all of one kind."""
    node = group[0]
    container: dict[str, Any] = {
        "name": "penstock",
        "image": "penstock:latest",
        "command": ["bash", "-euo", "pipefail", "-c", agent, "agent", *command],
        "args": ["--data", "/data", "--steps", "1000", "--out", f"/runs/{name}"],
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_PATH.rpartition("/")[0], "readOnly": True},
            {"name": "data", "mountPath": "/data", "readOnly": True},
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if node.has_accelerators:
        container["resources"] = {"limits": {_resource(node): node.num_processes}}
    pod: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "Never",
        # A node of the plan is a machine: two pods on one would share what the plan counts twice.
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]}},
        "containers": [container],
        "volumes": [
            {"name": "plan", "configMap": {"name": name}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "penstock-data", "readOnly": True}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": "penstock-runs"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    if node.node.name in INSTANCES:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": node.node.name}
    spec = {
        "completionMode": "Indexed", "completions": len(group), "parallelism": len(group), "backoffLimit": 0,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }  # fmt: skip
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job, "labels": labels}, "spec": spec}


def _supervised(job: dict[str, Any], name: str) -> dict[str, Any]:
    """A job whose nodes share a key, and go on when one of them fails."""
    spec = job["spec"]
    del spec["backoffLimit"]
    spec |= {"backoffLimitPerIndex": 0, "maxFailedIndexes": spec["completions"]}
    key = {"name": "PENSTOCK_STORE_KEY", "valueFrom": {"secretKeyRef": {"name": _secret(name), "key": "key"}}}
    spec["template"]["spec"]["containers"][0]["env"] = [key]
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = NOTICE_S
    return job


def _resource(node: LaunchNode) -> str:
    """What a cluster calls such devices."""
    return "amd.com/gpu" if node.node.device.name.lower().startswith("mi") else "nvidia.com/gpu"
