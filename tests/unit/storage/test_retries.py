"""What passes is tried again and told; what lasts is refused at once."""

from __future__ import annotations

import time

import pytest

from paceline.errors import StorageError
from paceline.storage.remote import Retries


class Failing:
    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 7


def test_what_passes_is_tried_again_and_told_once() -> None:
    lines = list[str]()
    action = Failing(2, ConnectionResetError("gone"))
    assert Retries(log=lines.append)("read x", action) == 7
    assert action.calls == 3
    assert len(lines) == 1
    assert lines[0].startswith("read x: done after 2 failures")


@pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x"), OSError(28, "no space")])
def test_what_lasts_is_not_tried_again(error: Exception) -> None:
    action = Failing(9, error)
    with pytest.raises(StorageError, match="cannot read x"):
        Retries()("read x", action)
    assert action.calls == 1


def test_patience_ends_and_the_message_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0123456789secret")
    action = Failing(10**6, OSError("denied 0123456789secret"))
    with pytest.raises(StorageError) as caught:
        Retries(patience_seconds=0.5)("write x", action)
    assert action.calls > 1
    assert "0123456789secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_given_up_ends_a_pause() -> None:
    retries = Retries(patience_seconds=100)
    retries.cancelled.set()
    started = time.monotonic()
    with pytest.raises(StorageError):
        retries("read x", Failing(10**6, OSError("gone")))
    assert time.monotonic() - started < 50


def test_what_was_given_up_is_not_even_begun() -> None:
    retries, action = Retries(), Failing(0, OSError())
    retries.cancelled.set()
    with pytest.raises(StorageError, match="cannot read x: it was abandoned"):
        retries("read x", action)
    assert action.calls == 0
