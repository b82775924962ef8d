"""Predictions section: mistakes, confusion matrix, per-class precision and recall, calibration of the confidence.

For regression, predicted against actual values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.metrics.confusion import matrix_of, scores_by_class
from paceline.pages.page import Block, Chart, Gallery, Picture, Table, Text
from paceline.reports.html.runs import RunRecord

Matrix = Sequence[Sequence[int]]

_MOST_CLASSES, _MOST_FIGURES, _MOST_PICTURES, _MOST_PAIRS, _MOST_BARS, _MOST_COLUMNS = 100, 14, 60, 12, 20, 12


def predictions(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks; none for runs that keep no predictions, such as language models."""
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        confusion, examples = run.extra("evaluation/confusion.json"), run.extra("evaluation/examples.json")
        if examples is not None:
            yield from _examples(examples, prefix)
        if confusion is not None:
            yield from _confusion(confusion, prefix)
        details = run.extra("evaluation/details.json")
        if details is not None:
            yield from _details(details, prefix)
        if figures := run.extra("evaluation/figures.json"):
            yield from _figures(figures["examples"], prefix)
        if first := run.extra("first_batch.json"):
            yield _gallery(first["examples"], f"{prefix}The first training batch, as the network sees it")
        if run.recipe.get("evaluate.keep_examples") == 0:
            yield Text(f"{prefix}No predictions are kept: the recipe has `evaluate.keep_examples=0`.")


def _details(details: Mapping[str, Any], prefix: str) -> Iterator[Block]:
    if "points" in details:
        yield from _numbers(details, prefix)
    if "label_scores" in details:
        yield _bars(details["label_scores"], prefix)
        yield _thresholds(details, prefix)
    if "class_iou" in details:
        yield _overlaps(details, prefix)
    if details.get("class_ap"):
        yield _average_precisions(details, prefix)


def _examples(examples: Mapping[str, Any], prefix: str) -> Iterator[Block]:
    def name(number: int) -> str:
        return str(examples["classes"][number]) if number >= 0 else "no answer"

    wrong: list[Picture] = []
    right: list[Picture] = []
    for each in examples["examples"][:_MOST_PICTURES]:
        actual, predicted = name(each["label"]), name(each["predicted"])
        is_wrong = each["label"] != each["predicted"]
        confidence = "" if each["probability"] is None else f", {each['probability']:.0%}"
        picture = Picture(
            data=str(each.get("image", "")),
            caption=f"{actual} → {predicted}{confidence}" if is_wrong else f"{predicted}{confidence}",
            alternative=f"{each.get('name', each['sample'])}: actual {actual}, predicted {predicted}{confidence}",
        )
        (wrong if is_wrong else right).append(picture)
    if wrong:
        caption = f"{prefix}Most confident mistakes: actual → predicted, confidence ({_origin(examples)})"
        yield Gallery(pictures=wrong, caption=caption)
    if right:
        yield Gallery(pictures=right, caption=f"{prefix}{len(right)} right answers", folded=True)


def _figures(examples: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[Block]:
    if texts := [(str(each["caption"]), str(each["text"])) for each in examples if "text" in each]:
        caption = f"{prefix}Written by the model after the last evaluation"
        yield Table(columns=("given", "written"), rows=texts, caption=caption)
    if drawn := [each for each in examples if "image" in each]:
        yield _gallery(drawn, f"{prefix}Drawn by the task after the last evaluation")


def _gallery(examples: Sequence[Mapping[str, Any]], caption: str) -> Gallery:
    pictures = [
        Picture(data=str(each["image"]), caption=str(each["caption"]), alternative=f"{each['name']}: {each['caption']}")
        for each in examples
    ]
    return Gallery(pictures=pictures, caption=caption)


def _confusion(confusion: Mapping[str, Any], prefix: str) -> Iterator[Block]:
    matrix, classes = matrix_of(confusion), [str(each) for each in confusion["classes"]]
    sums = [sum(row) for row in matrix]
    if len(classes) <= _MOST_CLASSES:
        yield _heatmap(matrix, sums, classes, prefix, _origin(confusion))
    yield _bars(scores_by_class(confusion), prefix)
    if confusion.get("reliability"):
        yield _reliability(confusion["reliability"], prefix)
    pairs = sorted(
        (
            (count, actual, predicted)
            for actual, row in enumerate(matrix)
            for predicted, count in enumerate(row)
            if count and actual != predicted
        ),
        reverse=True,
    )
    if pairs:
        yield Table(
            columns=("actual", "predicted", "samples", "of its class"),
            rows=[(classes[a], classes[b], count, f"{count / sums[a]:.1%}") for count, a, b in pairs[:_MOST_PAIRS]],
            caption=f"{prefix}Most frequent confusions",
        )


def _numbers(details: Mapping[str, Any], prefix: str) -> Iterator[Chart]:
    """Plot predicted against actual values, one chart per column."""
    points = details["points"]
    for index, column in enumerate(details["columns"][:_MOST_COLUMNS]):
        pairs = [(each["actual"][index], each["predicted"][index], each["sample"]) for each in points]
        diagonal = (
            [extreme(value for pair in pairs for value in pair[:2]) for extreme in (min, max)] if pairs else [0, 1]
        )
        largest_errors = sorted(pairs, key=lambda pair: -abs(pair[1] - pair[0]))
        yield Chart(
            title=f"{prefix}{column}: predicted against actual",
            traces=[
                {"x": diagonal, "y": diagonal, "mode": "lines", "name": "exact", "hoverinfo": "skip"}
                | {"line": {"color": "var(--muted)", "dash": "dot", "width": 1.5}},
                {
                    "x": [actual for actual, *_ in pairs],
                    "y": [predicted for _, predicted, _ in pairs],
                    "customdata": [sample for *_, sample in pairs],
                    "mode": "markers",
                    "name": "samples",
                    "hovertemplate": "sample %{customdata}: actual %{x}, predicted %{y}<extra></extra>",
                    "marker": {"color": "var(--series-1)", "size": 6, "opacity": 0.6},
                },
            ],
            layout={"height": 430, "xaxis": {"title": "actual"}, "yaxis": {"title": "predicted"}},
            description=f"{len(points):,} held-out samples; {_origin(details)}.",
            table=Table(
                columns=("sample", "actual", "predicted"),
                rows=[(sample, actual, predicted) for actual, predicted, sample in largest_errors[:_MOST_BARS]],
                caption="Largest errors",
                folded=True,
            ),
        )


def _thresholds(details: Mapping[str, Any], prefix: str) -> Table:
    """Plot average precision and the best threshold of each class; classes without samples have no threshold."""
    keys = ("average_precision", "f1", "threshold", "best_f1", "best_threshold")
    return Table(
        columns=("class", "samples", "average precision, %", "F1, %", "threshold", "best F1, %", "its threshold"),
        rows=[
            (each["class"], each["count"], *("" if each[key] is None else f"{each[key]:.4g}" for key in keys))
            for each in details["label_scores"]
        ],
        caption=f"{prefix}Thresholds: the best are fitted to these samples ({_origin(details)})",
    )


def _origin(document: Mapping[str, Any]) -> str:
    return f"{document.get('weights')} weights, after step {document.get('step')}"


def _class_axis(title: str, classes: Sequence[str]) -> dict[str, Any]:
    """Return an axis with one class per integer, since shortened names may coincide."""
    labels = [name if len(name) <= 18 else f"{name[:9]}…{name[-8:]}" for name in classes]
    ticks = {"tickmode": "array", "tickvals": list(range(len(classes))), "ticktext": labels}
    return {"title": title, "showgrid": False, "constrain": "domain", **(ticks if len(classes) <= 30 else {})}


def _heatmap(matrix: Matrix, sums: Sequence[int], classes: Sequence[str], prefix: str, origin: str) -> Chart:
    trace = {
        "type": "heatmap",
        "z": [[value / total if total else None for value in row] for row, total in zip(matrix, sums, strict=True)],
        "customdata": [
            [[actual, predicted, matrix[at][to]] for to, predicted in enumerate(classes)]
            for at, actual in enumerate(classes)
        ],
        "hovertemplate": (
            "actual %{customdata[0]}, predicted %{customdata[1]}: %{customdata[2]:,} (%{z:.1%})<extra></extra>"
        ),
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "var(--low)"], [1, "var(--high)"]],
        "colorbar": {"tickformat": ".0%", "thickness": 12, "outlinewidth": 0},
        # Each cell shows its value, so a colour scale adds nothing.
        "showscale": len(classes) > _MOST_FIGURES,
        "xgap": 1,
        "ygap": 1,
    }
    if len(classes) <= _MOST_FIGURES:
        figures = [[str(value) for value in row] for row in matrix]
        trace |= {"text": figures, "texttemplate": "%{text}", "textfont": {"color": "var(--text)"}}
    return Chart(
        title=f"{prefix}Confusion matrix",
        traces=[trace],
        layout={
            "height": min(760, 190 + 30 * len(classes)),
            "xaxis": _class_axis("predicted", classes),
            "yaxis": {**_class_axis("actual", classes), "autorange": "reversed"},
        },
        description=f"Held-out samples, coloured by their share of the row; {origin}.",
        wide=True,
        table=Table(
            columns=("actual \\ predicted", *classes),
            rows=[(name, *row) for name, row in zip(classes, matrix, strict=True)],
            caption="Figures of this chart",
            folded=True,
        ),
    )


def _bars(scores: Sequence[Mapping[str, Any]], prefix: str) -> Chart:
    """Plot two bars per class, one filled and one outlined, lowest F1 first."""
    shown = f"The {_MOST_BARS} worst of {len(scores)} classes" if len(scores) > _MOST_BARS else "The worst class"
    return _by_class(
        scores,
        title=f"{prefix}Precision and recall by class",
        bars={"precision": ("var(--series-1)", "var(--series-1)"), "recall": ("var(--series-2)", "var(--band-2)")},
        columns={"count": "samples", "precision": "precision, %", "recall": "recall, %", "f1": "F1, %"},
        description=f"{shown} first, by F1. Precision: right among those predicted; recall: found among the actual.",
    )


def _overlaps(details: Mapping[str, Any], prefix: str) -> Chart:
    """Plot a bar per pixel class, lowest IoU first; absent classes are left out."""
    return _by_class(
        details["class_iou"],
        title=f"{prefix}Intersection over union by class",
        bars={"iou": ("var(--series-1)", "var(--series-1)")},
        columns={"count": "pixels", "iou": "IoU, %"},
        description=f"The lowest first; {_origin(details)}.",
    )


def _average_precisions(details: Mapping[str, Any], prefix: str) -> Chart:
    """Plot a bar per class for boxes, and one for masks if there are any, lowest first."""
    rows, names = details["class_ap"], {"average_precision": "boxes", "mask_average_precision": "masks"}
    kinds = {key: name for key, name in names.items() if key in rows[0]}
    colours = ("var(--series-1)", "var(--series-1)"), ("var(--series-2)", "var(--band-2)")
    return _by_class(
        rows,
        title=f"{prefix}Average precision by class",
        bars=dict(zip(kinds, colours, strict=False)),
        columns={"count": "held-out boxes"} | {key: f"AP of {name}, %" for key, name in kinds.items()},
        description=f"The lowest first, over overlaps 0.5 to 0.95; {_origin(details)}.",
    )


def _by_class(
    scores: Sequence[Mapping[str, Any]],
    *,
    title: str,
    bars: Mapping[str, tuple[str, str]],
    columns: Mapping[str, str],
    description: str,
) -> Chart:
    """Plot the first classes by the given keys and colours, with a table of all classes."""
    worst = scores[:_MOST_BARS]
    names = [str(each["class"]) for each in worst]
    return Chart(
        title=title,
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": key.replace("_", " "),
                "y": list(range(len(worst))),
                "x": [round(each[key], 2) for each in worst],
                "customdata": names,
                "hovertemplate": f"%{{customdata}}: {key} %{{x}} %<extra></extra>",
                "marker": {"color": fill, "line": {"color": colour, "width": 1.5}},
            }
            for key, (colour, fill) in bars.items()
        ],
        layout={
            "height": 130 + 30 * max(len(worst), 6),
            "barmode": "group",
            "xaxis": {"title": "%", "range": [0, 100]},
            "yaxis": {**_class_axis("", names), "autorange": "reversed"},
            "legend": {"traceorder": "normal"},
        },
        description=description,
        table=Table(
            columns=("class", *columns.values()),
            rows=[
                (each["class"], *(each[key] if key == "count" else f"{each[key]:.2f}" for key in columns))
                for each in scores
            ],
            caption="Figures of all classes",
            folded=True,
        ),
    )


def _reliability(bins: Sequence[Mapping[str, Any]], prefix: str) -> Chart:
    """Plot how often predictions are right by confidence; larger points hold more samples."""
    points = [
        (100 * each["probability"], 100 * each["right"] / each["samples"], each["samples"])
        for each in bins
        if each["samples"]
    ]
    total = sum(samples for *_, samples in points)
    error = sum(samples * abs(confidence - right) for confidence, right, samples in points) / max(total, 1)
    axis = {"range": [0, 100]}
    return Chart(
        title=f"{prefix}Reliability",
        traces=[
            {"x": [0, 100], "y": [0, 100], "mode": "lines", "name": "perfectly calibrated", "hoverinfo": "skip"}
            | {"line": {"color": "var(--muted)", "dash": "dot", "width": 1.5}},
            {
                "x": [confidence for confidence, *_ in points],
                "y": [right for _, right, _ in points],
                "customdata": [samples for *_, samples in points],
                "mode": "lines+markers",
                "cliponaxis": False,
                "name": "answers",
                "hovertemplate": "%{customdata:,} answers: confidence %{x:.1f} %, right %{y:.1f} %<extra></extra>",
                "line": {"color": "var(--series-1)", "width": 1.5},
                "marker": {
                    "color": "var(--series-1)",
                    "size": [6 + 16 * (samples / total) ** 0.5 for *_, samples in points],
                },
            },
        ],
        layout={
            "height": 430,
            "xaxis": {"title": "mean confidence, %", **axis},
            "yaxis": {"title": "right answers, %", **axis},
        },
        description=(
            "Larger points hold more predictions. Below the diagonal the network is overconfident."
            f" Expected calibration error: {error:.1f} %."
        ),
        table=Table(
            columns=("mean confidence, %", "right, %", "samples"),
            rows=[(f"{confidence:.1f}", f"{right:.1f}", samples) for confidence, right, samples in points],
            caption="Figures of this chart",
            folded=True,
        ),
    )
