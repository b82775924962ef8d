"""Text from and for others: parse JSON from untrusted files, and escape the names of files, classes and runs.

A terminal or a spreadsheet never interprets an escaped name.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

# Controls (except tab and newline), invisible and direction-changing marks, line separators, and code points that
# cannot be encoded. The joiners U+200C and U+200D are kept: scripts and emoji need them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Escape (``\\x1b``) characters that move the cursor, hide or reorder text, or set a title."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    """Like :func:`printable`, but also escape newlines and tabs, so that a name cannot look like several lines."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def quoted(name: str) -> str:
    """Return a name in quotation marks, with invisible characters and combining accents escaped (``cafe\\u0301``)."""
    return "".join(f"\\u{ord(each):04x}" if unicodedata.combining(each) else each for each in repr(name))


def one_form(names: Iterable[str], known: Iterable[str] = ()) -> dict[str, str]:
    """Map names, in their order, to one spelling each: in Unicode, é has a composed form and a decomposed one.

    Args:
        names: The names.
        known: Names whose spelling is used; by default, the first spelling of each name is.
    """
    known, names, spelled = dict.fromkeys(known), list(names), dict[str, str]()
    for name in (*known, *sorted(names)):
        spelled.setdefault(unicodedata.normalize("NFC", name), name)
    return {name: name if name in known else spelled[unicodedata.normalize("NFC", name)] for name in names}


def html_text(text: str, *, quote: bool = True) -> str:
    """Like :func:`printable`, for an HTML page: also escape HTML, and quotation marks if requested."""
    return html.escape(printable(text), quote=quote)


def utf8(name: str) -> str:
    """Return a file name for JSON, CSV or Parquet: only bytes that are not UTF-8 are escaped, as all else is data."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: text that a spreadsheet would read as a formula gets an apostrophe prefix."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def text_of_cell(cell: str) -> str:
    """Return the original text of a :func:`csv_cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def load_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parse one JSON document, as ``json.loads`` does with these options.

    Raises:
        ValueError: If it is not JSON, not UTF-8, or nested too deeply for Python's parser.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
