"""JSON that others wrote ends in an error that callers expect, whatever it holds."""

from __future__ import annotations

import pytest

from paceline.plain_json import load_json


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, b"[" * 100_000, b"\xff\xfe{", "", "{"])
def test_what_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 — of whichever kind
        load_json(text)


def test_documents_are_read_with_the_options_of_json() -> None:
    assert load_json(b'{"a": [1, NaN]}', parse_constant=str) == {"a": [1, "NaN"]}
