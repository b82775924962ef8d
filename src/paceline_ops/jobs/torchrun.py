"""The torchrun command that starts a run's processes on this host."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import LaunchError


def torchrun_command(
    python: str, arguments: Sequence[str], *, nodes: int, processes_per_node: int, endpoint: str | None, restarts: int
) -> list[str]:
    """Return the command as a list of words, the same on every host.

    Args:
        python: The interpreter of the processes.
        arguments: Arguments of ``paceline``.
        nodes: Number of hosts.
        processes_per_node: Processes on each.
        endpoint: HOST:PORT of torchrun's store; not needed for one host.
        restarts: How often torchrun may restart all processes.

    Raises:
        LaunchError: If several hosts have no endpoint.
    """
    if endpoint is None and nodes > 1:
        raise LaunchError(
            f"{nodes} hosts need a rendezvous address; name one of them and a free port, the same on every host: "
            "--rdzv-endpoint HOST:29500."
        )
    if endpoint is not None and not endpoint.rpartition(":")[2].isdigit():
        raise LaunchError(f"--rdzv-endpoint {endpoint} is not HOST:PORT; for example host1:29500.")
    rendezvous = ["--standalone"] if endpoint is None else ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    size = [f"--nnodes={nodes}", f"--nproc-per-node={processes_per_node}", f"--max-restarts={restarts}"]
    return [python, "-P", "-m", "torch.distributed.run", *size, *rendezvous, "-m", "paceline", *arguments]
