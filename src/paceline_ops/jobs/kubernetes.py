"""Generate a Kubernetes manifest that trains a run and restarts its pods until it is complete.

This only generates text; nothing is sent to a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from paceline.errors import LaunchError
from paceline_ops.jobs.torchrun import torchrun_command

_PORT = 29500
# The first pod hosts torchrun's store. By default torchrun would detect that from the pod's own name, which the cluster
# may not resolve yet when the pod starts. The others wait for it as long as its image takes to load.
_RENDEZVOUS_CONFIG = "is_host={},read_timeout=600"
_HOST_SCRIPT = (
    f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then PET_RDZV_CONF={_RENDEZVOUS_CONFIG.format(1)}; '
    f'else PET_RDZV_CONF={_RENDEZVOUS_CONFIG.format(0)}; fi; export PET_RDZV_CONF; exec "$@"'
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run on a Kubernetes cluster.

    Attributes:
        name: Name of the job, a valid host name.
        image: The container image, with Python, torch and Paceline.
        arguments: Arguments of ``paceline``.
        run_dir: The run directory within the container, below ``mount``.
        mount: Mount path of the volume.
        claim: The volume that all pods share.
        nodes: Number of pods.
        processes_per_node: Processes in each.
        gpus_per_node: GPUs of each pod.
        cpus_per_node: Cores of each pod; None requests no specific number.
        shared_memory: Size of /dev/shm, through which loader processes hand over batches.
        grace_seconds: Time between the stop request and the kill; a step, an evaluation and a save must fit in.
    """

    name: str
    image: str
    arguments: Sequence[str]
    run_dir: PurePosixPath
    mount: PurePosixPath
    claim: str
    nodes: int
    processes_per_node: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    shared_memory: str = "8Gi"
    grace_seconds: int = 300


def check(workload: Workload) -> None:
    """Refuse settings that a cluster would reject or that would lose data.

    Raises:
        LaunchError: If there is such a setting.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", workload.name):
        raise LaunchError(
            f"--job-name {workload.name} is not a valid name for a Kubernetes job; use small letters, digits and "
            f"hyphens, "
            "a letter first, 52 at most."
        )
    if ".." in workload.run_dir.parts or not workload.run_dir.is_relative_to(workload.mount):
        raise LaunchError(
            f"--run-dir {workload.run_dir} is not below {workload.mount}, where the volume is (--mount), so it would "
            "be lost with its pod."
        )


def job_name(text: str) -> str:
    """Return the nearest name that Kubernetes accepts."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:52].strip("-")


def indexed_job(workload: Workload) -> str:
    """Return an indexed Job of ``nodes`` pods, and the service by which they find the first one."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": workload.name},
        # A pod must be resolvable before it is ready: the others wait for it to start.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": workload.name}},
    }
    if workload.nodes == 1:
        # Without torchrun the exit code says whether the run is complete.
        processes = str(workload.processes_per_node)
        pod = _pod(workload, ["python", "-P", "-m", "paceline", *workload.arguments, "--processes", processes])
    else:
        pod = _pod(workload, ["sh", "-c", _HOST_SCRIPT, "sh", *_torchrun(workload, "{0}-0.{0}")])
        pod["subdomain"] = workload.name  # which gives pods the name NAME-INDEX.SUBDOMAIN
    failure_rules = [
        # A drained node is not a failure of the run.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        # Exit code 2 is a usage error, which a retry would repeat.
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": workload.nodes,
        "parallelism": workload.nodes,
        "backoffLimit": 100,
        "podFailurePolicy": {"rules": failure_rules},
        "template": {"metadata": {"labels": {"app": workload.name}}, "spec": pod},
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": workload.name}, "spec": spec}
    return _documents([service, job] if workload.nodes > 1 else [job])


def pytorch_job(workload: Workload) -> str:
    """Return a PyTorchJob of the Kubeflow training operator, which tells the pods where the first one is."""
    specs = {"Master": _replicas(workload, 1, is_first=True)}
    if workload.nodes > 1:
        specs["Worker"] = _replicas(workload, workload.nodes - 1, is_first=False)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": workload.name},
        "spec": {"runPolicy": {"backoffLimit": 100, "cleanPodPolicy": "None"}, "pytorchReplicaSpecs": specs},
    }
    return _documents([job])


def _replicas(workload: Workload, count: int, *, is_first: bool) -> dict[str, Any]:
    # The operator's pods are named NAME-master-0 and so on, each with a service of the same name.
    pod = _pod(workload, _torchrun(workload, "{0}-master-0"))
    # The operator uses the replicas' restart policy, and requires the container to be named pytorch.
    del pod["restartPolicy"]
    (container,) = pod["containers"]
    container["name"] = "pytorch"
    if workload.nodes > 1:
        container["env"] = [{"name": "PET_RDZV_CONF", "value": _RENDEZVOUS_CONFIG.format(int(is_first))}]
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _pod(workload: Workload, command: Sequence[str]) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if workload.cpus_per_node is not None:
        resources["cpu"] = str(workload.cpus_per_node)
    if workload.gpus_per_node:
        resources["nvidia.com/gpu"] = workload.gpus_per_node
    container = {
        "name": "train",
        "image": workload.image,
        "command": list(command),
        **({"resources": {"limits": resources}} if resources else {}),
        "volumeMounts": [
            {"name": "runs", "mountPath": str(workload.mount)},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        # A Job's pod failure policy supports only this restart policy; the Job creates a new pod.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": workload.grace_seconds,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": workload.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": workload.shared_memory}},
        ],
    }


def _torchrun(workload: Workload, first: str) -> list[str]:
    return torchrun_command(
        "python",
        workload.arguments,
        nodes=workload.nodes,
        processes_per_node=workload.processes_per_node,
        endpoint=f"{first.format(workload.name)}:{_PORT}" if workload.nodes > 1 else None,
        restarts=3,
    )


def _documents(documents: Sequence[Mapping[str, Any]]) -> str:
    text: str = yaml.dump_all(documents, sort_keys=False, width=120, Dumper=_Plain)
    return text


class _Plain(yaml.SafeDumper):
    """Dumps YAML without anchors: repeated values are written repeatedly."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
