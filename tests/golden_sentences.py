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
from typing import TypeVar

import pytest

from paceline.errors import PacelineError

E = TypeVar("E", bound=PacelineError)
SENTENCES = Path(__file__).parent / "golden" / "sentences.txt"
_LONGEST = 160  # a list of all keys or names is cut, so that a new one changes no sentence
# Temporary folders and the identities of runs.
_CHANGING = re.compile(rf"({re.escape(tempfile.gettempdir())}|/dev/shm)[^ ':]*/|\b[0-9a-f]{{32}}\b")

_NUMBERED = re.compile(r"\b(test_\w+?)\d+\b")  # a test's own folder


@contextmanager
def raises(kind: type[E], **fields: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Assert that the block raises an error of this class with these fields, whose sentence is in the golden file.

    Fields are compared as text, so that a duration may be given as a string; of a relative ``path`` only its end.
    """
    with pytest.raises(kind) as caught:
        yield caught
    found, path = caught.value, str(fields.pop("path", ""))
    assert {name: str(getattr(found, name)) for name in fields} == {name: str(each) for name, each in fields.items()}
    assert not path or str(found.path) == path or Path(str(found.path)).match(path), found.path
    check_sentence(found)


def check_sentence(error: PacelineError) -> None:
    """Assert that the golden file has each line of an error, without what changes, and cut if it is long."""
    known = SENTENCES.read_text(encoding="utf-8").splitlines()
    heads = [_CHANGING.sub("", str(each)).partition("\n")[0] for each in error.args]
    heads = [_NUMBERED.sub(r"\1", each) for each in heads]
    lines = [f"{type(error).__name__}: {each}"[:_LONGEST] for each in heads]
    missing = [each for each in lines if each not in known]
    if missing and os.environ.get("WRITE_SENTENCES"):
        SENTENCES.write_text("\n".join(sorted({*known, *missing})) + "\n", encoding="utf-8")
        return
    assert not missing, f"not in {SENTENCES.name}: {missing}"
