"""How are records handed to a process that may be slow, hang or die, without ever waiting for it?

A pipe that does not block, and a bounded queue before it: what finds no room is left out and counted. There is no
thread here that could hold the interpreter, and what the other process imports, prints or breaks stays there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.records.run_directory import encode_json

_CHUNK = 65536
END = b"\n"
"""An empty line: no record comes after it. The pipe's own end may come late, since forked loaders hold it open too."""


class TrackerLostError(Exception):
    """A tracker takes no more records; says why, after its name."""


class TrackerBehindError(Exception):
    """A tracker cannot take all records; says so, after its name."""


class HandOver:
    """A tracker in a process of its own, which is started with the first record.

    Args:
        tool: Which one: a key of :data:`paceline.telemetry.tracker_process.TOOLS`.
        directory: Where it may write.
        facts: What it is told first.
        most_waiting: Records that wait for it at most.
    """

    def __init__(
        self, tool: str, directory: Path, facts: Mapping[str, Any] | None = None, *, most_waiting: int = 1000
    ) -> None:
        self._tool = tool
        self._directory = directory
        self._facts = dict(facts or {})
        self._most_waiting = most_waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        self._said = b""
        self._taken = self._done = 0
        self.left_out = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event; hands over what finds room, and keeps the rest.

        Raises:
            TrackerBehindError: If it is the first that is left out.
            TrackerLostError: If the process has failed.
        """
        if self._process is None:
            self._process = self._start()
        self._listen()
        is_end = event["event"] == "finish"  # short, and without it the run would look killed
        if len(self._waiting) >= self._most_waiting and not is_end:
            self.left_out += 1
            if self.left_out == 1:
                raise TrackerBehindError(
                    f"does not keep up: {self._most_waiting} records wait for it, and more are left out"
                )
            return
        self._waiting.append(encode_json(dict(event)).encode() + b"\n")
        self._taken += 1
        if is_end:
            self._waiting.append(END)
        self._push()

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for what is under way, then end the process, whatever it does.

        Raises:
            TrackerLostError: If it did not take everything; says how much.
        """
        process = self._process
        if process is None:
            return
        self._waiting.append(END)
        try:
            self._wait(process, time.monotonic() + seconds)
        finally:
            self._process = None
            # Of its session: what it has started too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        missing = self._taken - self._done + self.left_out
        if missing:
            whole = self._taken + self.left_out
            raise TrackerLostError(f"did not take {missing} of {whole} records in time; events.jsonl has them all")

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        """Until everything is handed over, taken and put away."""
        assert process.stdin is not None
        assert process.stdout is not None
        # Descriptors of a large run may have numbers that `select` does not know.
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        left = 1.0
        # What it has said already is heard in any case.
        while left > 0:
            left = deadline - time.monotonic()
            self._push()
            if self._waiting:
                poller.register(process.stdin, select.POLLOUT)
            # A process that has gone has closed its end, which counts as something to read.
            poller.poll(1000 * max(0.0, min(left, 0.5)))
            if self._waiting:
                poller.unregister(process.stdin)
            if not self._listen():
                return

    def _start(self) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        searched = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        with (self._directory / "paceline.log").open("ab") as log:
            process = subprocess.Popen(
                # Not from the working directory, where a folder of the user's may have a library's name.
                [sys.executable, "-P", "-m", "paceline.telemetry.tracker_process", self._tool],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
                # What stops the run is not for this process, which has its last records to write.
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._waiting.append(encode_json({"directory": str(self._directory), **self._facts}).encode() + b"\n")
        return process

    def _push(self) -> None:
        """Write as much as the pipe takes now."""
        assert self._process is not None
        assert self._process.stdin is not None
        while self._waiting:
            piece = self._waiting[0]
            try:
                written = os.write(self._process.stdin.fileno(), piece[:_CHUNK])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._listen()
                return
            if written < len(piece):
                self._waiting[0] = piece[written:]
            else:
                self._waiting.popleft()

    def _listen(self) -> bool:
        """Read what the process says: a line for each record it has taken. False once it has ended as it should.

        Raises:
            TrackerLostError: If it has not.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                heard = os.read(self._process.stdout.fileno(), _CHUNK)
            except BlockingIOError:
                return True
            if not heard:
                break
            *lines, self._said = (self._said + heard).split(b"\n")
            for line in lines:
                self._hear(line)
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            raise TrackerLostError("has gone silent") from None
        if code:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise TrackerLostError(f"ended {how}; '{self._directory / 'paceline.log'}' may say why")
        return False

    def _hear(self, line: bytes) -> None:
        if line == b"+":
            self._done += 1
        elif line.startswith(b"!"):
            raise TrackerLostError(str(json.loads(line[1:])))
