"""A command that is asked to end takes it as an exit, so that what it has started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.streams import exit_on_signals

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(params=SIGNALS)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    found: Any = request.param
    before = signal.getsignal(found)
    yield found
    signal.signal(found, before)


def test_a_request_to_end_is_an_exit(number: signal.Signals) -> None:
    def before(*_: Any) -> None: ...

    signal.signal(number, before)
    with pytest.raises(SystemExit) as ended, exit_on_signals():
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_what_was_to_be_ignored_still_is(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with exit_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_IGN


_STARTER = (
    "import os, subprocess, sys\n"
    "process = subprocess.Popen(sys.argv[1:])\n"
    "_, status, usage = os.wait4(process.pid, 0)\n"
    "print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, sep='\\n')\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of the peak differs")
def test_exit_handlers_run_and_destructors_of_libraries_do_not(tmp_path: Path) -> None:
    """Those of CUDA read large parts of its files, also in a run on a CPU."""
    program = (
        "import atexit, sys, threading, torch\n"
        "from paceline.cli import main\n"
        "from paceline.telemetry.clock import peak_resident_bytes\n"
        "kept = open('kept', 'w')\n"
        "kept.write('all')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
        "atexit.register(lambda: print('handler', peak_resident_bytes()))\n"
        "sys.argv = ['paceline', 'explain', sys.argv[1]]\n"
        "main.main()\n"
    )
    for key, code in (("optimizer.lr", 0), ("optimizer.rl", 2)):
        # Its peak begins with the size of the process that starts it: so a small one does.
        starter = [sys.executable, "-c", _STARTER, sys.executable, "-c", program, key]
        said = subprocess.run(
            starter, check=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        *_, thread, handler, ended, highest = said.stdout.splitlines()
        assert (int(ended), thread) == (code, "thread")
        assert (tmp_path / "kept").read_text() == "all"
        peak = int(handler.removeprefix("handler "))
        assert int(highest) * 1024 < peak + 40 * 2**20
