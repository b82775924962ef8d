"""A command that is asked to end takes it as an exit, so that what it has started ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
