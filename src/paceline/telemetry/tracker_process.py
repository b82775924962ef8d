"""What runs in the process that feeds MLflow or Weights & Biases? Started by ``hand_over.py``, never by a person.

Standard input brings one JSON object per line: what is to be known of the run, then its events; an empty line, or the
end of the input, is the last. Standard output answers ``+`` for each event taken, or ``!`` and why no more are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import re
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_LAST_SECONDS = 60.0
_LOOK_SECONDS = 2.0
_NICENESS = 10


class Tool(Protocol):
    """A tracker's library, with the run open in it.

    Attributes:
        at_once: How many events it is given at once, if so many are waiting.
    """

    at_once: int

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take some events, in their order."""
        ...

    def close(self, status: str) -> None:
        """The run ended as ``completed``, ``stopped`` or ``failed``; or nobody knows how, and it is empty."""
        ...


def _mlflow(directory: Path, facts: Mapping[str, Any]) -> Tool:
    from paceline.telemetry.mlflow_tracker import MlflowTool

    return MlflowTool(directory, facts)


def _wandb(directory: Path, facts: Mapping[str, Any]) -> Tool:
    from paceline.telemetry.wandb_tracker import WandbTool

    return WandbTool(directory, facts)


TOOLS: Mapping[str, Callable[[Path, Mapping[str, Any]], Tool]] = {"mlflow": _mlflow, "wandb": _wandb}


def main(name: str) -> int:
    """Feed a tool until there is no more; returns the exit code."""
    # Libraries print; what they say goes to the log, and not between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)  # training comes first
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, os.getppid()), daemon=True).start()

    def answer(text: str) -> None:
        # The run may have been killed; what it has handed over is still put away.
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, f"{text}\n".encode())

    try:
        _feed(name, lines, lambda: answer("+"))
    except Exception as error:  # noqa: BLE001  # whatever a library raises is told, and logged
        answer("!" + json.dumps(_without_secrets(f"failed: {type(error).__name__}: {error}")))
        sys.stderr.write(_without_secrets(traceback.format_exc()))
        return 1
    return 0


def _without_secrets(text: str) -> str:
    """What is said lies in the run directory, for all to read; addresses may hold a name and a password."""
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def _feed(name: str, lines: queue.SimpleQueue[bytes], answer: Callable[[], Any]) -> None:
    if not (first := lines.get()):
        return
    facts = json.loads(first)
    directory = Path(facts["directory"])
    with _alone(directory):
        _feed_one(TOOLS[name](directory, facts), lines, answer)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """After a process of the same run, killed and gone on with, has put away what it had."""
    with (directory / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _feed_one(tool: Tool, lines: queue.SimpleQueue[bytes], answer: Callable[[], Any]) -> None:
    status = ""
    for waiting in _waiting(lines, tool.at_once):
        events = [event for event in waiting if event["event"] != "finish"]
        status = next((str(event["status"]) for event in waiting if event["event"] == "finish"), status)
        if events:
            tool.write(events)
        for _ in events:
            answer()
    tool.close(status)
    if status:
        answer()


def _waiting(lines: queue.SimpleQueue[bytes], at_once: int) -> Iterator[list[dict[str, Any]]]:
    """The events that are there, at most so many at once, until an empty line."""
    while line := lines.get():
        found = [line]
        while line and len(found) < at_once and not lines.empty():
            if line := lines.get():
                found.append(line)
        yield [json.loads(each) for each in found]
        if not line:
            return


def _read(lines: queue.SimpleQueue[bytes], parent: int) -> None:
    """Read ahead, so that the end is seen whatever the library is doing; and see to it that there is one."""
    rest = b""
    while True:
        # A loader process of the run may hold the pipe open after the run has died; what is in it still counts.
        has_gone = os.getppid() != parent
        if not select.select([0], [], [], 0 if has_gone else _LOOK_SECONDS)[0]:
            if has_gone:
                break
            continue
        if not (read := os.read(0, 65536)):
            break
        *whole, rest = (rest + read).split(b"\n")
        for line in whole:
            if not line:
                lines.put(b"")
                break
            lines.put(line)
    lines.put(b"")
    threading.Event().wait(_LAST_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
