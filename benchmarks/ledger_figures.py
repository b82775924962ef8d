"""Which figures of our pages does no claim answer for?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from ledger import ROOT, Claim, LedgerError

EXEMPTIONS = ROOT / "benchmarks" / "claims_exempt.yaml"
# Written by scripts from something that is checked elsewhere.
GENERATED = {"docs/claims.md", "docs/performance.md", "docs/recipe-reference.md"}

_NUMBER = r"\d(?:[\d,.]*\d)?"
_FIGURES = re.compile(
    rf"{_NUMBER}\s?(?:%|(?:ms|µs|s|seconds?|minutes?|hours?|[MG]i?B|times|images/s|samples/s|tokens/s|points)\b)"
    rf"|{_NUMBER}\s?×(?!\s?[\dA-Z(])|{_NUMBER}\s?x (?:faster|slower)"
    rf"|(?:a|two|few|about) ?(?:seconds?|minutes?|hours?) (?:of training|of processor time|on (?:a|one|two) )"
    rf"|\b(?:seconds|minutes) on (?:a|one|two) "
)
_FENCE = re.compile(r"(?ms)^\s*(```|~~~).*?^\s*\1\s*$")
_NOT_PROSE = (re.compile(r"<!--.*?-->", re.DOTALL), re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)\n]*\)"))


@dataclass(frozen=True)
class Exemption:
    """Words round a figure that make it no claim.

    Attributes:
        pattern: Found round the figure, white space as single blanks.
        file: The only file it is for; every one if empty.
        reason: Why nobody needs to measure it.
    """

    pattern: str
    reason: str
    file: str = ""


@dataclass(frozen=True)
class Loose:
    """A figure that no claim quotes."""

    file: str
    figure: str
    around: str


def pages(root: Path = ROOT) -> list[str]:
    """The files whose figures must be answered for."""
    found = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return ["README.md", "CHANGELOG.md", *(each for each in found if each not in GENERATED)]


def exemptions(path: Path = EXEMPTIONS) -> list[Exemption]:
    """What is no claim, with reasons."""
    return [Exemption(**each) for each in yaml.safe_load(path.read_text(encoding="utf-8"))]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"\S", "\u00a0", match[0])


def _one_line(text: str) -> str:
    return re.sub(r"[ \t\n]+", " ", text)


def prose(text: str) -> tuple[str, str]:
    """A page as one line without its code blocks, and the same with code, comments and addresses blanked."""
    text = _FENCE.sub("", text)
    blanked = text
    for pattern in _NOT_PROSE:
        blanked = pattern.sub(_blank, blanked)
    return _one_line(text), _one_line(blanked)


def _spans(text: str, wanted: str) -> Iterator[tuple[int, int]]:
    place = text.find(wanted)
    while place >= 0:
        yield place, place + len(wanted)
        place = text.find(wanted, place + 1)


def loose(
    claims: list[Claim], exempt: list[Exemption], files: list[str] | None = None, root: Path = ROOT
) -> tuple[list[Loose], list[Exemption]]:
    """The figures that neither a quote nor an exemption covers, and the exemptions that cover none."""
    found: list[Loose] = []
    used: set[Exemption] = set()
    for file in pages(root) if files is None else files:
        whole, bare = prose((root / file).read_text(encoding="utf-8"))
        if len(whole) != len(bare):
            raise LedgerError(f"{file}: code or a comment cannot be told from its text")
        quotes = [_one_line(said.quote) for claim in claims for said in claim.said if said.file == file and said.quote]
        covered = [span for quote in quotes for span in _spans(whole, quote)]
        excused = [
            (match.span(), each)
            for each in exempt
            if each.file in ("", file)
            for match in re.finditer(each.pattern, whole)
        ]
        for match in _FIGURES.finditer(bare):
            start, end = match.span()
            if any(low <= start and end <= high for low, high in covered):
                continue
            reasons = {each for (low, high), each in excused if low < end and start < high}
            used |= reasons
            if not reasons:
                found.append(Loose(file, match[0], whole[max(start - 70, 0) : end + 50]))
    return found, [each for each in exempt if each not in used]
