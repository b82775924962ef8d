"""Which world a process finds, by the variables that torchrun, mpirun, Slurm and the own launcher set."""

from __future__ import annotations

import pytest
from golden_sentences import raises

from paceline.distributed.environment import RENDEZVOUS_VARIABLE, read_launch
from paceline.errors import LaunchError
from paceline.host.world import World

SLURM = {
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[003-004]",
}


def test_alone() -> None:
    launch = read_launch({})
    assert (launch.world, launch.source) == (World(), "alone")


def test_a_batch_script_without_srun_is_alone() -> None:
    """Inside a Slurm allocation, but not started as one of its tasks."""
    assert read_launch({"SLURM_NTASKS": "7", "SLURM_JOB_ID": "1"}).source == "alone"
    assert read_launch({**SLURM, "SLURM_NTASKS": "1"}).source == "alone"


def test_torchrun() -> None:
    launch = read_launch({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert launch.world == World(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert (launch.rendezvous, launch.source) == ("env://", "torchrun")


def test_the_own_launcher() -> None:
    launch = read_launch({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", RENDEZVOUS_VARIABLE: "file:///tmp/x"})
    assert (launch.rendezvous, launch.source) == ("file:///tmp/x", "paceline")
    assert launch.world.local_world_size == 2


def test_slurm() -> None:
    launch = read_launch(SLURM)
    assert launch.world == World(rank=5, local_rank=1, world_size=7, local_world_size=3)
    assert (launch.rendezvous, launch.source) == ("tcp://node003:24711", "slurm")


@pytest.mark.parametrize(
    ("layout", "node", "tasks"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("8", 0, 8), ("2(x16)", 15, 2)],
)
def test_slurms_tasks_per_node(layout: str, node: int, tasks: int) -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": layout, "SLURM_NODEID": str(node), "SLURM_NTASKS": "40"}
    assert read_launch(environ).world.local_world_size == tasks


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node003", "node003"),
        ("node[003-005,9],other", "node003"),
        ("a,b", "a"),
        ("gpu-12-[7,9]", "gpu-12-7"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
    ],
)
def test_slurms_first_node(nodes: str, host: str) -> None:
    assert read_launch({**SLURM, "SLURM_STEP_NODELIST": nodes}).rendezvous == f"tcp://{host}:24711"


def test_slurm_on_one_node_meets_at_home() -> None:
    node = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_SRUN_COMM_HOST": "10.1.2.3"}
    environ = {**SLURM, **node, "SLURM_STEP_TASKS_PER_NODE": "7"}
    assert read_launch(environ).rendezvous.startswith("tcp://127.0.0.1:")


def test_slurm_with_an_address_of_ones_own() -> None:
    environ = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert read_launch(environ).rendezvous == "tcp://10.0.0.1:4000"


def test_slurm_without_nodes() -> None:
    environ = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        read_launch(environ)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_mpirun() -> None:
    """Also within a job of Slurm, whose variables are those of mpirun's own daemons."""
    launch = read_launch({**SLURM, **OPEN_MPI, "MASTER_ADDR": "first", "MASTER_PORT": "4000"})
    assert launch.world == World(rank=3, local_rank=1, world_size=4, local_world_size=2)
    assert (launch.rendezvous, launch.source) == ("tcp://first:4000", "mpirun")
    one_machine = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    meetings = [read_launch({**one_machine, "PMIX_NAMESPACE": job}).rendezvous for job in ("1", "2", "1")]
    assert meetings[0] == meetings[2] != meetings[1]
    assert all(each.startswith("tcp://127.0.0.1:") for each in meetings)
    with raises(LaunchError):
        read_launch(OPEN_MPI)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is outside a world of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', but it must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is '', but it must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1', but it must be a whole number"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many', but it must be a whole number"),
        ({**SLURM, "SLURM_PROCID": "7"}, "rank 7 is outside a world of 7"),
        ({**SLURM, "SLURM_NNODES": "few", "SLURM_SRUN_COMM_HOST": "10.1.2.3"}, "SLURM_NNODES is 'few'"),
        ({**SLURM, "MASTER_PORT": "none"}, "MASTER_PORT is 'none'"),
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "5", "LOCAL_RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "local rank 4"),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "9"}, "9"),
    ],
)
def test_what_contradicts_itself_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_launch(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_world_has_its_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 2"):
        World(rank=rank, world_size=2)
    assert World(rank=0, world_size=2).is_first
    assert not World(rank=1, world_size=2).is_first
