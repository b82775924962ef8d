"""Section Predictions: confusion matrix, and examples with their pictures.

From ``RUN/evaluation/confusion.json`` and ``examples.json``, which an evaluation leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.pages.page import Block, Chart, Gallery, Picture, Table, Text
from paceline.report.html.runs import RunRecord

_MOST_CLASSES, _MOST_FIGURES, _MOST_PICTURES, _MOST_PAIRS = 100, 14, 60, 12


def predictions(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """The section's blocks."""
    for run in runs:
        whose = f"{run.name}: " if len(runs) > 1 else ""
        confusion, examples = run.extra("evaluation/confusion.json"), run.extra("evaluation/examples.json")
        if confusion is None and examples is None:
            yield Text(
                f"{whose}No predictions are kept here: evaluations of classifiers leave them behind, unless "
                "evaluate.keep_examples=0."
            )
            continue
        named = (confusion or examples or {}).get("classes")
        classes = [str(each) for each in named] if isinstance(named, list) else []
        matrix = _matrix(confusion, len(classes))
        if matrix and len(matrix) == len(classes):
            yield from _confusion(matrix, classes, f"{whose}{_of(confusion or {})}", whose)
        pictures = list(_pictures(examples or {}, classes))
        if pictures:
            wrong = sum(each.is_wrong for each in pictures)
            yield Text(
                f"{whose}{len(pictures)} examples, {wrong} of them wrong, which ✗ marks. Beneath each: what was "
                f"predicted, with its probability, and what it is{_of(examples or {}, ', ')}."
            )
            yield Gallery(pictures)


def _matrix(confusion: Mapping[str, Any] | None, classes: int) -> list[list[int]]:
    """The whole matrix, of which only what is not zero is written where there are many classes."""
    rows = (confusion or {}).get("matrix")
    triples = (confusion or {}).get("triples")
    if rows is None and isinstance(triples, list):
        rows = [[0] * classes for _ in range(classes)]
        try:
            for label, predicted, count in triples:
                rows[label][predicted] = int(count)
        except (TypeError, ValueError, IndexError):  # damaged
            return []
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return []
    return rows


def _of(document: Mapping[str, Any], before: str = "") -> str:
    said = [f"{document['weights']} weights"] if document.get("weights") else []
    said += [f"after step {document['step']:,}"] if isinstance(document.get("step"), int) else []
    return before + ", ".join(said) if said else ""


def _confusion(matrix: Sequence[Sequence[int]], classes: Sequence[str], told: str, whose: str) -> Iterator[Block]:
    count = len(classes)
    sums = [sum(row) for row in matrix]
    if count <= _MOST_CLASSES:
        yield _heatmap(matrix, sums, classes, told, f"{whose}confusion matrix" if whose else "Confusion matrix")
    pairs = sorted(
        ((matrix[a][b], a, b) for a in range(count) for b in range(count) if a != b and matrix[a][b]), reverse=True
    )
    rows = [(classes[a], classes[b], number, f"{number / sums[a]:.1%}") for number, a, b in pairs[:_MOST_PAIRS]]
    if rows:
        columns = ("is", "taken for", "times", "of its samples")
        yield Table(
            columns=columns, rows=rows, caption=f"{whose}what is confused most" if whose else "What is confused most"
        )
    recall = [(classes[at], sums[at], matrix[at][at], _share(matrix[at][at], sums[at])) for at in range(count)]
    columns = ("class", "samples", "right", "share")
    yield Table(
        columns=columns,
        rows=recall,
        caption=f"{whose}right answers by class" if whose else "Right answers by class",
        folded=True,
    )


def _heatmap(
    matrix: Sequence[Sequence[int]], sums: Sequence[int], classes: Sequence[str], told: str, title: str
) -> Chart:
    shares = [[value / total if total else None for value in row] for row, total in zip(matrix, sums, strict=True)]
    places = list(range(len(classes)))
    labels = [name if len(name) <= 18 else f"{name[:17]}…" for name in classes]
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": labels, "showgrid": False, "constrain": "domain"}
    if len(classes) > 30:
        ticks = {"showgrid": False, "constrain": "domain"}
    trace = {
        "type": "heatmap",
        "z": shares,
        "customdata": [
            [[row, column, matrix[at][to]] for to, column in enumerate(classes)] for at, row in enumerate(classes)
        ],
        "hovertemplate": "%{customdata[0]} taken for %{customdata[1]}: %{customdata[2]:,} (%{z:.1%})<extra></extra>",
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "var(--low)"], [1, "var(--high)"]],
        "colorbar": {"tickformat": ".0%", "thickness": 12, "outlinewidth": 0},
        # With its figure in each cell, a scale tells nothing more.
        "showscale": len(classes) > _MOST_FIGURES,
        "xgap": 1,
        "ygap": 1,
    }
    if len(classes) <= _MOST_FIGURES:
        trace |= {"text": [[str(value) for value in row] for row in matrix], "texttemplate": "%{text}"}
    return Chart(
        title=title,
        traces=[trace],
        layout={
            "height": min(760, 190 + 30 * len(classes)),
            "xaxis": {"title": "predicted", **ticks},
            "yaxis": {"title": "is", "autorange": "reversed", **ticks},
        },
        description=f"Counts of held-out samples, coloured by their share of the row; {told}".rstrip("; ") + ".",
        wide=len(classes) > _MOST_FIGURES,
        table=Table(
            columns=("is \\ predicted", *classes),
            rows=[(name, *row) for name, row in zip(classes, matrix, strict=True)],
            caption="Figures of this chart",
            folded=True,
        ),
    )


def _pictures(examples: Mapping[str, Any], classes: Sequence[str]) -> Iterator[Picture]:
    def name(index: Any) -> str:
        return classes[index] if isinstance(index, int) and 0 <= index < len(classes) else str(index)

    for each in (examples.get("examples") or ())[:_MOST_PICTURES]:
        if not isinstance(each, Mapping):
            continue
        label, predicted, probability = each.get("label"), each.get("predicted"), each.get("probability")
        sure = f" {probability:.0%}" if isinstance(probability, (int, float)) else ""
        is_wrong = label != predicted
        truth = f", is {name(label)}" if is_wrong else ""
        yield Picture(
            data=str(each.get("image", "")),
            caption=f"{name(predicted)}{sure}{truth}",
            alternative=f"sample {each.get('sample')}: predicted {name(predicted)}, is {name(label)}",
            is_wrong=is_wrong,
        )


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.1%}" if whole else None
