"""What does a reader see of the ledger? Writes the claims as a page: what did not hold first, then all, by topic."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

from ledger import Claim, Figure, Measured, Said, Status, Topic, measured

HEAD = """# Claims

Which of the figures that are said about training speed, by us and by the texts that Paceline was made after, hold up?
This page is written by `scripts/claims` from `benchmarks/claims.yaml`; change it there. Each bold number in the tables
below is read from a file in `benchmarks/results/`, and `scripts/check` fails if a number, a quoted sentence, a command
or a file has moved away from the others, or if README.md, CHANGELOG.md or a page of docs/ has a figure that no claim
here answers for. It looks for numbers in digits with %, ×, "times", "points", a time (from µs to hours), memory (MB,
MiB, GB, GiB), images, samples or tokens a second; not for words such as "twice" or "half", other units, or what stands
in code. Limits, defaults and the like are let off by `benchmarks/claims_exempt.yaml`, each with its reason.

| status | means |
|---|---|
| **confirmed** | measured, and what is said is what was measured, on that machine |
| **partly** | it holds in some of the cases it is said for; the verdict says which |
| **refuted** | measured or counted, and it is not so |
| **waiting** | said, or to be said, and no result file is kept: do not rely on it |
| **not measurable here** | our machines lack what it takes; nothing is claimed by us |
| **cited** | somebody else's published figure; we have not measured it |

What is *ours* we say in our own pages; a *rule of thumb* or a *published* figure is somebody else's. To measure a claim
again, run its command from the root of the repository and then `scripts/claims`; names in capitals are places on your
machine. `python benchmarks/counted.py` makes all counts anew; claims marked ⟳ are counted again in every run of the
tests, the refuted ones too: they must stay refuted. n is how often something was measured, the median is told unless it
says otherwise, and the result file has the spread.

One name of a processor stands for several: *AMD EPYC* was here one with AVX-512 and bf16 on some days, one with AVX2
alone on others. Newer results say which vectors PyTorch used (*with AVX2*), older ones do not. *Load 8.7 on 2 cores*:
so many processes wanted a core when it began, so other work took part of the machine.
"""
MANY_DECIMALS = 4
REFUTED_FIRST: tuple[Status, ...] = ("refuted", "partly")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _where(said: Said) -> str:
    if said.file is None:
        return said.by or ""
    target = said.file.removeprefix("docs/") if said.file.startswith("docs/") else f"../{said.file}"
    # Files in the guide and the decisions by their own name, which says enough.
    return f"[{said.file.rsplit('/', 1)[-1] if said.file.startswith('docs/') else said.file}]({target})"


def _figure(claim: Claim, figure: Figure) -> str:
    found = measured(claim, figure)
    unit = figure.unit if figure.unit in ("", "×") else f" {figure.unit}"
    return f"{figure.what}: **{_readable(found)}{unit}**"


def _readable(found: Measured) -> str:
    """The number as it is written; of one that is all zeros, how small it is."""
    decimals = len(found.text.partition(".")[2])
    if decimals <= MANY_DECIMALS or found.text.strip("-0.,"):
        return found.text
    return f"below 1e-{decimals}" if found.value else "0"


def _evidence(claim: Claim) -> Iterator[str]:
    """When, where and how often it was measured, file by file."""
    seen: dict[str, tuple[dict[str, Any], set[int]]] = {}
    for figure in claim.figures:
        found = measured(claim, figure)
        seen.setdefault(figure.result or claim.result or "", (found.facts, set()))[1].add(found.runs)
    for name, (facts, runs) in seen.items():
        counted = name.startswith("counted_")
        where = "a count, the same on any machine" if counted else f"{_machine(facts)}, n = {_range(runs)}"
        # The page beside the JSON is the one for people.
        page_of_it = f"../benchmarks/results/{name.removesuffix('.json')}.md"
        yield f"[{name.partition('_')[0]}]({page_of_it}), {facts['date']}: {where}"
    if claim.test is not None:
        path = claim.test.partition("::")[0]
        yield f"[{path.rsplit('/', 1)[-1]}](../{path}), {claim.tested}: run with all tests"


def _machine(facts: dict[str, Any]) -> str:
    """The processor with its vectors, where the file has them, and what else kept it busy."""
    device = facts["device"]
    if device == "cpu":
        device = facts["cpu"] + (f" with {facts['vectors']}" if "vectors" in facts else "")
    load, cores = facts.get("load_average_before"), facts["cores"]
    return f"{device}, " + (f"load {load:.1f} on " if load is not None and load > cores else "") + f"{cores} cores"


def _range(runs: set[int]) -> str:
    return f"{min(runs)}" if len(runs) == 1 else f"{min(runs)} to {max(runs)}"


def _result(claim: Claim) -> str:
    parts = [claim.verdict, "; ".join(_figure(claim, figure) for figure in claim.figures)]
    parts += [claim.needs and f"Needs {claim.needs}.", claim.source and f"Source: {claim.source}."]
    parts += [f"*{each}*" for each in _evidence(claim)]
    parts += [f"`{each}`" for each in claim.command]
    return "<br>".join(part for part in parts if part)


def _row(claim: Claim) -> str:
    mark = " ⟳" if claim.check is not None else ""
    where = "; ".join(dict.fromkeys(_where(said) for said in claim.said))
    said = f'<a id="{claim.id}"></a>{claim.claim}<br>*{claim.kind}: {where}*'
    return f"| {_cell(said)} | **{claim.status}**{mark} | {_cell(_result(claim))} |"


def _summary(claims: list[Claim]) -> Iterator[str]:
    counts = Counter((claim.kind, claim.status) for claim in claims)
    statuses = get_args(Status)
    yield "\n## In numbers\n"
    yield f"| | {' | '.join(statuses)} | all |"
    yield f"|---|{'---|' * (len(statuses) + 1)}"
    for kind in ("ours", "rule of thumb", "published"):
        row = [counts[kind, status] for status in statuses]
        yield f"| {kind} | {' | '.join(map(str, row))} | {sum(row)} |"
    again = sum(claim.check is not None for claim in claims)
    figures = sum(len(claim.figures) for claim in claims)
    yield (
        f"\n{len(claims)} claims, {figures} numbers read from result files, {again} claims counted again by every run "
        "of the tests."
    )


def _front(claims: list[Claim]) -> Iterator[str]:
    """What did not hold, told in sentences: these are what a page like this is for."""
    yield "\n## What did not hold up\n"
    for status in REFUTED_FIRST:
        found = [claim for claim in claims if claim.status == status]
        yield {"refuted": "Refuted:\n", "partly": "\nTrue in part:\n"}[status] if found else ""
        for claim in found:
            said = claim.said[0].by or f"our own {claim.said[0].file}"
            yield f"- [{_bare(claim.claim)}](#{claim.id}) ({said}). **{_first(claim.verdict)}**{_rest(claim.verdict)}"


def _bare(text: str) -> str:
    return re.sub(r"[\[\]]", "", text)


def _first(verdict: str | None) -> str:
    """The first sentence, which is what a reader in a hurry takes along."""
    return re.split(r"(?<=[.])\s", verdict or "", maxsplit=1)[0]


def _rest(verdict: str | None) -> str:
    return (verdict or "")[len(_first(verdict)) :]


def page(claims: list[Claim]) -> str:
    """The whole page."""
    lines = [HEAD.rstrip(), *_summary(claims), *_front(claims)]
    for topic in get_args(Topic):
        found = [claim for claim in claims if claim.topic == topic]
        lines.append(f"\n## {topic[0].upper()}{topic[1:]}\n")
        if not found:
            lines.append("Nothing is said yet.")
            continue
        lines += ["| what is said | status | what was measured |", "|---|---|---|"]
        lines += [_row(claim) for claim in found]
    return "\n".join(line for line in lines if line is not None) + "\n"
