"""How far do the curves of a shipped recipe lie apart between seeds, and how often does a further seed leave its band?

Trains the recipe once per seed, as a user would, and writes the band that is shipped beside the recipe. Then each run
is held against the band of all others, and further seeds (``--fresh``), which had no part in the band, against it. Runs
are kept in the folder that is named, and those that are there already are not trained again. ``--planted`` trains
digits with each bug of planted.py, and counts in how many seeds its band sees it.

    python benchmarks/bands.py digits --runs runs/bands --seeds 1-40 --fresh 1001-1100 --planted 2001-2010
    python benchmarks/bands.py dlrm-synthetic --runs runs/bands --seeds 1-8
    python benchmarks/bands.py gpt-small-docs --runs runs/bands --seeds 1-5
    python benchmarks/bands.py bert-tiny-docs --runs runs/bands --seeds 1-5
    python benchmarks/bands.py shapes-maskrcnn --runs runs/bands --seeds 1-5
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import facts, write_result
from planted import BUGS, train_with
from scipy.stats import beta

from paceline.insight.bands.band import make_band, read_band, write_band
from paceline.insight.bands.judge import check_run
from paceline.recipe.load import shipped_recipes
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory


def train(recipe: str, seed: int, folder: Path) -> Path:
    """One run by the command line, which goes on with one that was stopped; one that has ended is left as it is."""
    run = folder / recipe / str(seed)
    if (run / "summary.json").is_file() and read_summary(RunDirectory(run)).status == "completed":
        return run
    asked = [recipe, f"seed={seed}", "telemetry.report=false", "telemetry.trackers=[]"]
    command = [sys.executable, "-m", "paceline", "train", *asked, "--run-dir", str(run)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return run


def seen_in(name: str, among: Sequence[int], folder: Path, band: Path) -> int:
    """In how many seeds a run with the bug leaves the band."""
    runs = [train_with(BUGS[name], seed, folder / name.replace(" ", "-") / str(seed)) for seed in among]
    return sum(bool(check_run(run, band).departures) for run in runs)


def seeds(text: str) -> list[int]:
    """``1-3`` is 1, 2, 3."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def share(count: int, of: int) -> dict[str, Any]:
    """A share with its 95 % interval (Clopper and Pearson 1934)."""
    low = 0.0 if count == 0 else float(beta.ppf(0.025, count, of - count + 1))
    high = 1.0 if count == of else float(beta.ppf(0.975, count + 1, of - count))
    return {"left": count, "runs": of, "low": low, "high": high}


def in_words(found: dict[str, Any]) -> str:
    """``1 of 40 (0.1 % to 13.2 %)``."""
    return f"{found['left']} of {found['runs']} ({100 * found['low']:.1f} % to {100 * found['high']:.1f} %)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write the band, and count false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=list(shipped_recipes()))
    parser.add_argument("--runs", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", type=seeds, nargs="+", required=True, help="what the band is made of")
    parser.add_argument("--fresh", type=seeds, nargs="*", default=[], help="further seeds, held against it")
    parser.add_argument("--planted", type=seeds, default=[], help="seeds with a bug, held against it (digits)")
    options = parser.parse_args(arguments)
    if options.planted and options.recipe != "digits":
        parser.error("the bugs of --planted are those of digits")
    known = facts()  # before the band that is written changes the tree
    file = shipped_recipes()[options.recipe].with_suffix(".band.json")
    band = make_band([train(options.recipe, seed, options.runs) for part in options.seeds for seed in part])
    write_band(band, file)
    fresh = [train(options.recipe, seed, options.runs) for part in options.fresh for seed in part]
    left = [verdict.to_json() for run in fresh if (verdict := check_run(run, file)).departures]
    planted = {name: seen_in(name, options.planted, options.runs, file) for name in BUGS if options.planted}
    result: dict[str, Any] = {
        "recipe": options.recipe,
        "made_with": read_band(file).made_with,
        "limit_standard_errors": band.limit,
        "points": sum(len(each.windows) for each in band.curves),
        "left_one_out": share(len(band.outsiders), band.count) if band.count > 5 else None,
        "fresh": share(len(left), len(fresh)) if fresh else None,
        "fresh_departures": [{**each, "run": Path(each["run"]).name} for each in left],
        "planted": {name: share(seen, len(options.planted)) for name, seen in planted.items()},
    }
    lines = [
        f"{options.recipe}: a band of {band.count} seeds, {result['points']} points, {file.stat().st_size:,} bytes."
    ]
    if result["left_one_out"]:
        lines.append(f"Held against all others, {in_words(result['left_one_out'])} leave their band.")
    if fresh:
        lines.append(f"Of seeds that had no part in it, {in_words(result['fresh'])} leave it.")
    lines += [f"With {name} {in_words(found)} leave it." for name, found in result["planted"].items()]
    print("\n".join(lines))
    print(write_result(f"bands-{options.recipe}", result, lines, known))


if __name__ == "__main__":
    main()
