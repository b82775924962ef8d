"""Process groups with real processes and real signals: whatever happens to a child, nothing outlives the group."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.host.processes import Child, ProcessGroup, received_signals

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="descendants are found in /proc")
FOR_EVER = "import time; time.sleep(60)"
# A child with a descendant in another session, whose id it leaves in a file.
WITH_DESCENDANT = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", {descendant!r}], start_new_session=True)
open({path!r}, "w").write(str(started.pid))
time.sleep(60)
"""
# Counts requests to stop until it has a good reason to end: its descendant has had none.
COUNTS = """
import signal, subprocess, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
open({path!r}, "w").close()
sys.exit(75 if loader.wait() == 0 and received else 1)
"""


def start(group: ProcessGroup, program: str, name: str = "", log: Path | None = None) -> Child:
    return group.start([sys.executable, "-c", program], name=name, stdout=log, stderr=log)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{pid}/environ").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@LINUX_ONLY
def test_the_first_failure_ends_all_and_their_descendants(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with ProcessGroup() as group:
        other = start(group, WITH_DESCENDANT.format(descendant=FOR_EVER, path=str(path)), "rank 0")
        wait_for(path)
        failing = start(group, "import sys; print('no such file'); sys.exit(3)", "rank 1", tmp_path / "log")
        ending = group.wait()
        assert (ending.failed, ending.killed, ending.reason) == ((failing,), (other,), "failure")
        assert failing.exit_message == "no such file"
        assert other.code == -signal.SIGKILL
        assert group.members() == set()
    assert_gone(int(path.read_text() or 0))


# A loader process: once its parent is gone, it removes what that has left.
WITH_LOADER = """
import os, time
parent = os.getpid()
if os.fork():
    time.sleep(60)
open({path!r}, "w").close()
while os.getppid() == parent:
    time.sleep(0.1)
os.remove({path!r})
"""


@LINUX_ONLY
def test_descendants_have_time_to_remove_what_a_killed_child_leaves(tmp_path: Path) -> None:
    path = tmp_path / "left"
    with ProcessGroup(grace_seconds=30) as group:
        start(group, WITH_LOADER.format(path=str(path)))
        wait_for(path)
        assert group.wait(0).reason == "time"
        assert (path.exists(), group.members()) == (False, set())


@LINUX_ONLY
@pytest.mark.parametrize(
    ("leave", "number", "name"),
    [(0.0, signal.SIGKILL, "SIGKILL (the system may have been out of memory)"), (0.2, 40, "signal 40")],
)
def test_a_killed_child_is_named_and_its_descendants_do_not_outlive_the_group(
    tmp_path: Path, leave: float, number: int, name: str
) -> None:
    path = tmp_path / "pid"
    with ProcessGroup(grace_seconds=leave) as group:
        child = start(group, WITH_DESCENDANT.format(descendant=FOR_EVER, path=str(path)))
        wait_for(path)
        child.process.send_signal(number)
        assert group.wait().failed == (child,)
        assert child.exit_message == f"was ended by {name}"
    assert_gone(int(path.read_text() or 0))


def test_a_stopped_child_is_ended_when_its_time_is_up() -> None:
    with ProcessGroup() as group:
        child = start(group, FOR_EVER)
        child.process.send_signal(signal.SIGSTOP)
        ending = group.wait(0.2)
    assert (ending.reason, ending.killed, child.code) == ("time", (child,), -signal.SIGKILL)


def test_a_wait_can_be_cancelled() -> None:
    with ProcessGroup() as group:
        start(group, FOR_EVER)
        assert group.wait(cancelled=lambda: True).reason == "cancelled"


def test_graces_let_others_end_by_themselves() -> None:
    with ProcessGroup() as group:
        start(group, "import sys; sys.exit(1)")
        start(group, "import time; time.sleep(0.5)")
        ending = group.wait(after_failure=30)
        assert (len(ending.failed), ending.reason) == (1, "")
    with ProcessGroup() as group:
        start(group, "pass")
        slow = start(group, FOR_EVER)
        ending = group.wait(after_end=0.2)
        assert (ending.failed, ending.killed, ending.reason) == ((), (slow,), "end")


def test_a_storm_of_signals_reaches_the_child_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    with received_signals([signal.SIGTERM]) as received, ProcessGroup(success_codes=(0, 75), signals=received) as group:
        child = start(group, COUNTS.format(path=str(path)))
        wait_for(path)

        def storm() -> None:
            for _ in range(300):
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=storm)
        thread.start()
        ending = group.wait(30)
        thread.join()
    assert (child.code, ending.failed, ending.reason) == (75, (), "")
    assert received


def test_output_that_would_fill_a_pipe_does_not_block(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        child = start(group, "print('x' * 10_000_000); print('last'); raise SystemExit(2)", log=tmp_path / "log")
        assert group.wait(30).failed == (child,)
        assert child.exit_message == "last"


def test_children_are_ended_and_reaped_if_a_later_one_cannot_start() -> None:
    group = ProcessGroup()
    with group:
        start(group, FOR_EVER)
        with pytest.raises(FileNotFoundError):
            group.start(["/no/such/program"])
    assert [child.process.returncode for child in group.children] == [-signal.SIGKILL]


@LINUX_ONLY
def test_what_a_child_that_ended_well_has_detached_goes_on(tmp_path: Path) -> None:
    program = """
import subprocess, sys
for name, detached in (("detached", True), ("attached", False)):
    started = subprocess.Popen([sys.executable, "-c", {forever!r}], start_new_session=detached)
    open({folder!r} + "/" + name, "w").write(str(started.pid))
"""
    with ProcessGroup() as group:
        start(group, program.format(forever=FOR_EVER, folder=str(tmp_path)))
        assert group.wait(30).failed == ()
    detached, attached = (int((tmp_path / name).read_text()) for name in ("detached", "attached"))
    assert_gone(attached)
    try:
        os.kill(detached, 0)
    finally:
        os.kill(detached, signal.SIGKILL)
