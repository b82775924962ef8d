"""Which cores a process gets, on machines made of files, and that it and what it starts run there and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises

from paceline.distributed.device import (
    CoreAssignment,
    Topology,
    assign_cores,
    bind,
    choose_cores,
    format_cpus,
    node_of_device,
    parse_cpus,
    read_topology,
    restore_affinity,
)
from paceline.errors import RecipeError
from paceline.host.world import World

LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads to cores")
UNIQUE = ("single_unique", "interleaved", "contiguous")


def machine(root: Path, *, nodes: int, cores: int, siblings: int) -> frozenset[int]:
    """Write a machine as Linux shows it: second threads are numbered after all first ones. Returns its CPUs."""
    count = nodes * cores
    for node in range(nodes):
        first = range(node * cores, (node + 1) * cores)
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        lists = [f"{first[0] + turn * count}-{first[-1] + turn * count}" for turn in range(siblings)]
        (folder / "cpulist").write_text(",".join(lists) + "\n")
        for core in first:
            threads = [core + turn * count for turn in range(siblings)]
            for cpu in threads:
                topology = root / f"devices/system/cpu/cpu{cpu}/topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, threads)) + "\n")
    return frozenset(range(count * siblings))


@pytest.fixture
def big(tmp_path: Path) -> Topology:
    """Two sockets of 64 cores with two threads each."""
    return read_topology(machine(tmp_path, nodes=2, cores=64, siblings=2), tmp_path)


EIGHT_GPUS = [0, 0, 0, 0, 1, 1, 1, 1]


def everyone(mode: str, topology: Topology, homes: list[int | None]) -> list[CoreAssignment]:
    return [assign_cores(mode, topology, rank, homes) for rank in range(len(homes))]


def test_a_machine_is_read(big: Topology) -> None:
    assert list(big.nodes) == [0, 1]
    assert big.nodes[0][:2] == ((0, 128), (1, 129))
    assert big.nodes[1][-1] == (127, 255)


@pytest.mark.parametrize(
    ("mode", "first", "sixth", "threads"),
    [
        ("socket", "0-63,128-191", "64-127,192-255", 16),
        ("single", "0,128", "64,192", 1),
        ("single_unique", "0,128", "65,193", 1),
        ("contiguous", "0-15,128-143", "80-95,208-223", 16),
    ],
)
def test_eight_gpus_on_two_sockets(big: Topology, mode: str, first: str, sixth: str, threads: int) -> None:
    given = everyone(mode, big, EIGHT_GPUS)
    assert (format_cpus(given[0].cpus), format_cpus(given[5].cpus)) == (first, sixth)
    assert {each.threads for each in given} == {threads}


def test_interleaved_cores(big: Topology) -> None:
    given = everyone("interleaved", big, EIGHT_GPUS)
    assert sorted(cpu for cpu in given[5].cpus if cpu < 128) == list(range(65, 128, 4))
    assert {each.threads for each in given} == {16}


@pytest.mark.parametrize("mode", UNIQUE)
@pytest.mark.parametrize("homes", [EIGHT_GPUS, [0, 0, 0, 1, 1], [None] * 8, [None] * 3, [None], [1, 1], [0, None, 1]])
def test_nobody_shares_a_core_or_has_more(big: Topology, mode: str, homes: list[int | None]) -> None:
    given = everyone(mode, big, homes)
    cpus = list(chain.from_iterable(each.cpus for each in given))
    assert len(cpus) == len(set(cpus))
    assert len({len(each.cpus) for each in given}) == 1
    for each, home in zip(given, homes, strict=True):
        assert len(each.cpus) == 2 * each.threads  # both threads of a core, or none
        if home is not None and None not in homes:
            assert each.cpus <= {cpu for core in big.nodes[home] for cpu in core}


def test_without_gpus_sockets_are_dealt_out(big: Topology) -> None:
    assert format_cpus(assign_cores("contiguous", big, 0, [None]).cpus) == "0-255"
    halves = [format_cpus(each.cpus) for each in everyone("socket", big, [None, None])]
    assert halves == ["0-63,128-191", "64-127,192-255"]


def test_a_container_lends_a_part(tmp_path: Path) -> None:
    machine(tmp_path, nodes=2, cores=64, siblings=2)
    lent = read_topology(frozenset([2, 3, 130, 131, 70, 71]), tmp_path)
    assert lent.nodes == {0: ((2, 130), (3, 131)), 1: ((70,), (71,))}
    given = everyone("contiguous", lent, EIGHT_GPUS[2:6])
    assert [format_cpus(each.cpus) for each in given] == ["2,130", "3,131", "70", "71"]
    # A GPU on the socket of which nothing is lent: whatever there is.
    other = read_topology(frozenset([2, 3]), tmp_path)
    assert format_cpus(assign_cores("socket", other, 0, [1]).cpus) == "2-3"
    with raises(RecipeError, key="parallel.affinity", value="contiguous"):
        assign_cores("contiguous", lent, 0, EIGHT_GPUS)


def test_one_socket_and_a_system_that_tells_nothing(tmp_path: Path) -> None:
    silent = read_topology(frozenset(range(4)), tmp_path)
    assert silent.nodes == {0: ((0,), (1,), (2,), (3,))}
    assert [format_cpus(each.cpus) for each in everyone("contiguous", silent, [None, None])] == ["0-1", "2-3"]
    assert assign_cores("socket", silent, 1, [None, None]).threads == 2


def test_a_device_is_on_a_node(tmp_path: Path) -> None:
    for bus, node in (("0000:17:00.0", "1"), ("0000:b1:00.0", "-1")):
        (tmp_path / "bus/pci/devices" / bus).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
    assert node_of_device("0000:17:00.0", tmp_path) == 1
    assert node_of_device("0000:B1:00.0", tmp_path) is None
    assert node_of_device("0000:00:00.0", tmp_path) is None


def test_lists_of_cpus_are_read_and_written() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert format_cpus(frozenset([0, 1, 2, 3, 8, 10, 11])) == "0-3,8,10-11"
    assert parse_cpus("") == frozenset()


def test_slurm_may_have_bound_the_tasks_already() -> None:
    environ = {"SLURM_STEP_ID": "0", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    with pytest.raises(RecipeError, match="Slurm has already bound each task to cores"):
        choose_cores("contiguous", World(world_size=2, local_world_size=2), torch.device("cpu"), environ)
    assert choose_cores("none", World(), torch.device("cpu"), environ) is None


@LINUX
def test_threads_and_children_inherit_and_all_is_put_back() -> None:
    import subprocess
    import threading

    before = os.sched_getaffinity(0)
    stay = threading.Event()
    other = threading.Thread(target=stay.wait)
    other.start()
    first = min(before)
    with restore_affinity():
        bind(CoreAssignment(frozenset([first]), 1, ""))
        inside = {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
        late = threading.Thread(target=stay.wait)
        late.start()
        child = subprocess.run(["grep", "Cpus_allowed_list", "/proc/self/status"], capture_output=True, check=True)
    after = {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    stay.set()
    other.join()
    late.join()
    assert len(inside) >= 2
    assert set(map(frozenset, inside.values())) == {frozenset([first])}
    assert child.stdout.split()[1] == str(first).encode()
    assert len(after) > len(inside)
    assert set(map(frozenset, after.values())) == {frozenset(before)}


@LINUX
def test_a_run_keeps_to_its_cores_and_leaves_the_process_as_it_was(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any]
) -> None:
    before, seen = os.sched_getaffinity(0), list[set[int]]()
    task = tiny_task(on_loss=lambda *_: seen.append(os.sched_getaffinity(0)))
    run = train_tiny("run", {"parallel.affinity": "single", "parallel.threads": "auto"}, task=task)
    assert all(len(each) <= 2 for each in seen)
    assert os.sched_getaffinity(0) == before
    plan = json.loads((run.run_dir / "plan.json").read_text())
    environment = json.loads((run.run_dir / "environment.json").read_text())
    assert plan["threads_per_process"] == 1
    assert plan["reasons"]["parallel.affinity"] == environment["affinity"]
    assert environment["affinity"].startswith("process 0 here runs on CPU")


def children_of_this() -> set[int]:
    """The processes of this one; one that libraries share (multiprocessing's tracker) may be there for good."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@LINUX
def test_loader_processes_keep_to_them_too(train_tiny: Any, tiny_task: Any) -> None:
    own, theirs, before = list[set[int]](), list[set[int]](), children_of_this()

    def look(*_: Any) -> None:
        own.append(os.sched_getaffinity(0))
        theirs.extend(os.sched_getaffinity(child) for child in children_of_this() - before)

    options = {"data.backend": "pytorch", "data.workers": 1, "train.duration": "1 steps", "evaluate.every": "off"}
    train_tiny("run", {"parallel.affinity": "single", **options}, task=tiny_task(on_loss=look))
    assert theirs
    assert all(each == own[0] for each in theirs)
    assert len(own[0]) < len(os.sched_getaffinity(0)) or len(own[0]) == 1


@LINUX
def test_a_run_that_fails_leaves_the_process_as_it_was(train_tiny: Any, tiny_task: Any) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("as planned")

    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="as planned"):
        train_tiny("run", {"parallel.affinity": "single"}, task=tiny_task(on_loss=fail))
    assert os.sched_getaffinity(0) == before
