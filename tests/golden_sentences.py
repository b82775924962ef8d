"""The sentences of errors, once: tests ask errors for their fields, and this file for the words.

``WRITE_SENTENCES=1`` adds those that are missing; then remove the lines that they replace.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import PacelineError

SENTENCES = Path(__file__).parent / "golden" / "sentences.txt"
_LONGEST = 160  # a list of all keys or names is cut, so that a new one changes no sentence
_FOLDER = re.compile(rf"({re.escape(tempfile.gettempdir())}|/dev/shm)[^ ':]*/")


@contextmanager
def refused(kind: type[PacelineError], **fields: object) -> Iterator[pytest.ExceptionInfo[PacelineError]]:
    """Assert that the block raises an error of this class with these fields, whose sentence is in the golden file.

    Fields are compared as text, so that a path may be a string, and a duration too.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert {name: str(getattr(caught.value, name)) for name in fields} == {k: str(v) for k, v in fields.items()}
    check_sentence(caught.value)


def check_sentence(error: PacelineError) -> None:
    """Assert that each line of an error is in the golden file, without temporary folders, and cut if it is long."""
    known = SENTENCES.read_text(encoding="utf-8").splitlines()
    lines = [f"{type(error).__name__}: {_FOLDER.sub('', str(each))}"[:_LONGEST] for each in error.args]
    missing = [each for each in lines if each not in known]
    if missing and os.environ.get("WRITE_SENTENCES"):
        SENTENCES.write_text("\n".join(sorted({*known, *missing})) + "\n", encoding="utf-8")
        return
    assert not missing, f"not in {SENTENCES.name}: {missing}"
