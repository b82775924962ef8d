"""Retry requests that fail temporarily, and report it."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.errors import StorageError
from paceline.storage.addresses import without_secrets

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
# Errors that another try would meet again.
_LASTING = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ImportError, TypeError),
)
_LASTING_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_LASTING_ON_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG)
_ADVICE = {
    "FileNotFoundError": "check the address: bucket and path must exist",
    "PermissionError": "check the credentials in the environment, and what they may do there",
    "NoCredentialsError": "set them in the environment (docs/guide/object-storage.md)",
    "PartialCredentialsError": "set all of them in the environment (docs/guide/object-storage.md)",
}


def _nowhere(_: str) -> None:
    """Report nothing."""


@dataclass
class Retries:
    """Retries temporary failures: pauses double from 0.2 to 10 seconds, each shortened at random by up to a half.

    Attributes:
        patience_seconds: How long one request may fail before it is given up.
        told: Takes one line about a request that failed at first and then worked.
        given_up: Set it when nobody waits for the outcome any more; pauses end at once, and nothing is retried.
    """

    patience_seconds: float = 60.0
    told: Callable[[str], None] = _nowhere
    given_up: threading.Event = field(default_factory=threading.Event)
    # Of its own: the draws of a run belong to the run.
    _draws: random.Random = field(default_factory=random.Random, repr=False)

    def __call__(self, action: str, call: Callable[[], T]) -> T:
        """Call something, and retry it if it fails.

        Args:
            action: What it does, to follow "cannot": ``read s3://bucket/x``.
            call: The request.

        Raises:
            StorageError: If the failure is permanent, patience has run out, or it was given up.
        """
        begun = time.monotonic()
        failures, reason = 0, ""
        while True:
            if self.given_up.is_set():
                raise StorageError(f"cannot {action}{f' ({reason})' if failures else ''}: it was given up.")
            try:
                result = call()
            except Exception as error:  # noqa: BLE001  # each protocol's library has errors of its own
                failures += 1
                waited = time.monotonic() - begun
                if _lasts(error) or waited >= self.patience_seconds or self.given_up.is_set():
                    raise StorageError(_in_words(action, error, failures, waited)) from None
                reason = describe(error)
            else:
                if failures:
                    waited = time.monotonic() - begun
                    self.told(
                        f"{action}: done after {failures} failure{'s' * (failures > 1)} and {waited:.1f} s ({reason})"
                    )
                return result
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS)
            self.given_up.wait(pause * self._draws.uniform(0.5, 1.0))


def describe(error: BaseException) -> str:
    """One line about an error, without secrets."""
    text = " ".join(without_secrets(str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _lasts(error: Exception) -> bool:
    return (
        isinstance(error, _LASTING)
        or type(error).__name__ in _LASTING_NAMES
        or (isinstance(error, OSError) and error.errno in _LASTING_ON_DISK)
    )


def _in_words(action: str, error: Exception, failures: int, waited: float) -> str:
    advice = _ADVICE.get(type(error).__name__, "check the address, the network and the server")
    tries = "" if failures == 1 else f" ({failures} tries in {waited:.0f} s)"
    return f"cannot {action}{tries}: {describe(error)}; {advice}."
