"""What is claimed, and does it still stand? Reads ``claims.yaml`` and holds each claim against files and results."""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "benchmarks" / "claims.yaml"
RESULTS = ROOT / "benchmarks" / "results"

Topic = Literal[
    "speed of input",
    "speed of a step",
    "precision and layout",
    "memory",
    "several processes",
    "convergence",
    "saving, stopping, going on",
    "tools",
    "beside other trainers",
]
Status = Literal["confirmed", "refuted", "partly", "waiting", "not measurable here", "cited"]
Kind = Literal["ours", "rule of thumb", "published"]
Words = Annotated[str, Field(min_length=3)]
# One, or several that are run one after the other.
Commands = Annotated[list[Words], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class Strict(BaseModel):
    """An entry in which a word that nobody reads is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Said(Strict):
    """Where a claim stands: in a file of ours, word for word, or elsewhere, named so that others can find it."""

    file: str | None = None
    quote: Words | None = None
    by: Words | None = None


class Figure(Strict):
    """A number of a result file.

    Attributes:
        what: What was measured.
        at: Where it stands: keys and places in lists, joined by ``/``; ``*`` for all, which ``take`` makes one of.
        over: What it is divided by, in the same way.
        less: What is taken from it.
        one_over: Whether one divided by it is told: of a rate, the time for the same.
        says: The number as it is written, which says how exactly it is held to the file.
        times: What the file's number is multiplied by, 100 for a share that is told in percent.
        unit: Of what is written.
        runs: How often it was measured, where the file does not say so beside it.
        result: Another file than the claim's.
        beside: Whether it bears on the claim without being said in it.
    """

    what: str
    at: str
    says: Annotated[str, Field(pattern=r"^-?\d[\d,]*(\.\d+)?$")]
    over: str | None = None
    less: str | None = None
    one_over: bool = False
    take: Literal["median", "mean", "least", "most", "sum", "number"] | None = None
    times: float = 1.0
    unit: str = ""
    runs: int | None = None
    result: str | None = None
    beside: bool = False


class Claim(Strict):
    """One sentence with a figure, where it is said, and what became of it when it was measured."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    topic: Topic
    kind: Kind
    claim: Words
    said: Annotated[list[Said], Field(min_length=1)]
    status: Status
    verdict: Words | None = None
    result: str | None = None
    figures: list[Figure] = []
    command: Commands = []
    check: str | None = None
    holds: dict[str, tuple[float, float]] = {}
    test: str | None = None
    tested: dt.date | None = None
    needs: Words | None = None
    source: Words | None = None


class LedgerError(Exception):
    """The ledger cannot be read."""


def read(path: Path = LEDGER) -> list[Claim]:
    """All claims, in the order of the file.

    Raises:
        LedgerError: If an entry is not as it must be; the message names it.
    """
    claims: list[Claim] = []
    for number, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")), start=1):
        name = entry.get("id", f"entry {number}") if isinstance(entry, dict) else f"entry {number}"
        try:
            # By way of JSON, so that lists may stand for pairs and text for dates, and nothing else for anything.
            claims.append(TypeAdapter(Claim).validate_json(json.dumps(entry, default=str)))
        except ValidationError as error:
            first = error.errors()[0]
            raise LedgerError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return claims


@dataclass(frozen=True)
class Measured:
    """A figure as its result file has it.

    Attributes:
        value: In the unit of what is written.
        text: The same with as many decimals as are written.
        runs: How often it was measured.
        facts: On what, when and by which command, as the file states it.
    """

    value: float
    text: str
    runs: int
    facts: dict[str, Any]


@cache
def document(name: str) -> dict[str, Any]:
    """A result file."""
    path = RESULTS / name
    if not path.is_file():
        raise LedgerError(f"there is no result file {name}")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _followed(content: object, keys: list[str]) -> Iterator[tuple[Any, int | None]]:
    """Each value at a place, with the ``runs`` nearest to it."""
    places: list[tuple[Any, int | None]] = [(content, None)]
    for key in keys:
        reached: list[tuple[Any, int | None]] = []
        for value, runs in places:
            if isinstance(value, dict):
                beside = value.get("runs", value.get("rounds"))
                nearest = beside if isinstance(beside, int) else runs
                reached += [(each, nearest) for each in (value.values() if key == "*" else [value[key]])]
            else:
                reached += [(each, runs) for each in (value if key == "*" else [value[int(key)]])]
        places = reached
    yield from places


def _number(name: str, place: str, take: str | None) -> tuple[float, int | None]:
    try:
        found = list(_followed(document(name), [key.replace("~1", "/") for key in place.strip("/").split("/")]))
    except (KeyError, IndexError, ValueError, TypeError):
        raise LedgerError(f"{name} has nothing at {place}") from None
    values = sorted(float(value) for value, _ in found) if take != "number" else []
    if take is None:
        if len(values) != 1:
            raise LedgerError(f"{name} has {len(values)} numbers at {place}; say which to take")
        return values[0], found[0][1]
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2 if values else 0.0
    taken = {
        "median": middle,
        "mean": sum(values) / max(len(values), 1),
        "least": min(values, default=0.0),
        "most": max(values, default=0.0),
        "sum": sum(values),
        "number": float(len(found)),
    }
    return taken[take], len(found)


def measured(claim: Claim, figure: Figure) -> Measured:
    """What the result file says of a figure.

    Raises:
        LedgerError: If there is no such file or number, or nobody knows how often it was measured.
    """
    name = figure.result or claim.result
    if name is None:
        raise LedgerError(f"{figure.what}: no result file is named")
    value, runs = _number(name, figure.at, figure.take)
    if figure.over is not None:
        divisor = _number(name, figure.over, figure.take)[0]
        if not divisor:
            raise LedgerError(f"{figure.what}: {name} has 0 at {figure.over}, by which nothing can be divided")
        value /= divisor
    if figure.less is not None:
        value -= _number(name, figure.less, figure.take)[0]
    if figure.one_over:
        value = 1 / value
    value *= figure.times
    runs = figure.runs or runs
    if runs is None:
        raise LedgerError(f"{figure.what}: {name} does not say how many runs it has; say so")
    decimals = len(figure.says.partition(".")[2])
    return Measured(value, f"{value:,.{decimals}f}", runs, document(name)["facts"])


def agrees(figure: Figure, found: Measured) -> bool:
    """Whether the file's number, rounded as it is written, is what is written."""
    decimals = len(figure.says.partition(".")[2])
    return abs(found.value - float(figure.says.replace(",", ""))) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def plain(path: Path) -> str:
    """A file's text with each run of white space as one blank, and without the signs of comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        text = re.sub(r"(?m)^\s*#+ ?", " ", text)
    return " ".join(text.split())


def stands(said: Said) -> bool:
    """Whether a quote is still found in its file."""
    if said.file is None or said.quote is None:
        return False
    path = ROOT / said.file
    wanted = " ".join(said.quote.split())
    return path.is_file() and wanted in plain(path)


def objections(claims: list[Claim], today: dt.date | None = None) -> Iterator[str]:
    """What is wrong with the ledger, sentence by sentence; nothing if all is well."""
    ids = [claim.id for claim in claims]
    yield from (f"{name} stands twice" for name in sorted({name for name in ids if ids.count(name) > 1}))
    for claim in claims:
        for objection in (*_of_places(claim), *_of_evidence(claim), *_of_commands(claim), *_of_figures(claim, today)):
            yield f"{claim.id}: {objection}"


def _of_places(claim: Claim) -> Iterator[str]:
    for said in claim.said:
        if (said.file is None) == (said.by is None) or (said.file is not None and said.quote is None):
            yield "said needs either a file and a quote from it, or by whom (by)"
        elif said.file is not None and not stands(said):
            yield f"{said.file} no longer says: {said.quote}"


# Where each figure has a result file; the guides may lean on tests.
MEASURED = ("README.md", "docs/measured.md")
NEEDED = {
    "refuted": ("verdict", "one sentence that says what is so"),
    "partly": ("verdict", "one sentence that says what is so"),
    "not measurable here": ("needs", "what it would take"),
    "cited": ("source", "where it was published"),
}


def _of_evidence(claim: Claim) -> Iterator[str]:
    yield from _of_tests(claim)
    evidence = bool(claim.figures) or claim.test is not None
    if claim.status in ("confirmed", "refuted", "partly") and not evidence:
        yield f"{claim.status} needs a figure of a result file, or a test"
    field, meaning = NEEDED.get(claim.status, ("claim", ""))
    if getattr(claim, field) is None:
        yield f"{claim.status} needs {field}: {meaning}"
    if claim.status == "refuted" and not any(figure.says in (claim.verdict or "") for figure in claim.figures):
        yield "refuted needs one of its figures in its verdict"
    measured = any(said.file in MEASURED for said in claim.said)
    if measured and claim.status in ("confirmed", "partly") and not claim.figures:
        yield f"a figure in {' or '.join(MEASURED)} needs a result file"


def _of_tests(claim: Claim) -> Iterator[str]:
    if (claim.check is None) != (not claim.holds):
        yield "check and holds need one another"
    if (claim.test is None) != (claim.tested is None):
        yield "test and tested, the day on which its figure was looked at, need one another"
    if claim.test is not None:
        path, _, name = claim.test.partition("::")
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")):
            yield f"there is no test {claim.test}"


def reproduces(command: str, kept: str) -> bool:
    """Whether a command is the one that a result file keeps, word by word.

    A program's folder does not matter, since some were run from inside ``benchmarks/``. A name in capitals, as in
    ``data.path=CIFAR10``, stands for a place on the reader's machine and for whatever the file has there. What the file
    has behind ``--note`` or in brackets is a remark.
    """
    words, kept = " ".join(shlex.split(command)), re.split(r" --note | \(", kept)[0]
    words, kept = (re.sub(r"\S+/(\w+\.py)\b", r"\1", each) for each in (words, kept))
    return re.fullmatch(re.sub(r"(?<!\w)[A-Z][A-Z0-9]+(?!\w)", r"\\S+", re.escape(words)), kept) is not None


def _of_commands(claim: Claim) -> Iterator[str]:
    if claim.status != "cited" and not claim.command:
        yield f"{claim.status} needs command: the command that measures it, or that would"
    names = dict.fromkeys(name for name in (claim.result, *(figure.result for figure in claim.figures)) if name)
    for name in names:
        kept = document(name)["facts"]["command"] if (RESULTS / name).is_file() else None
        if kept is not None and not any(reproduces(each, kept) for each in claim.command):
            yield f"no command is that of {name}: {kept}"
    if claim.test is not None and not any(claim.test.partition("::")[0] in each for each in claim.command):
        yield f"no command runs {claim.test}"


def _of_figures(claim: Claim, today: dt.date | None) -> Iterator[str]:
    words = " ".join([claim.claim, *(said.quote or "" for said in claim.said)])
    for figure in claim.figures:
        try:
            found = measured(claim, figure)
        except LedgerError as error:
            yield str(error)
            continue
        if not agrees(figure, found):
            yield f"{figure.what}: {figure.says} is written, and the result file has {found.value:.6g}"
        if claim.kind == "ours" and claim.status == "confirmed" and not figure.beside and figure.says not in words:
            yield f"{figure.what}: {figure.says} is in neither the claim nor a quote"
        day = dt.date.fromisoformat(str(found.facts["date"]))
        if day > (today or dt.datetime.now(tz=dt.UTC).date()):
            yield f"{figure.what}: measured on {day}, which is not yet"
