"""`paceline attribution`: where the time of a run's steps went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import echo, print_json, print_table
from paceline.units import format_count

if TYPE_CHECKING:
    from paceline.report.attribution import Attribution, PhaseTime


@click.command("attribution", short_help="Say where the time of a run's steps went, and what holds them back.")
@click.argument("run", type=LocalPath())
@json_option
def command(run: Path, as_json: bool) -> int:
    """Read the step records in the run directory RUN: how long each phase of a step takes, and which share of it.

    The run may be over or under way. With several processes, also who waits for whom. For example:

        paceline attribution runs/mine
    """
    from paceline.report.attribution import attribute_run

    found = attribute_run(run)
    if as_json:
        print_json(found.to_json())
        return 0
    print_table(_header(found), [_row(found, each) for each in _rows(found)], indent="")
    echo(
        f"{format_count(found.steps)} step{'s' * (found.steps > 1)} in {format_count(found.records)} "
        f"record{'s' * (found.records > 1)}: {_ms(found.step_seconds)} ms per step, in the middle record "
        f"{_ms(found.median_step_seconds)} ms."
    )
    if found.waiting is not None and "waiting for rank" not in (found.bottleneck or ""):
        echo(
            f"Rank {found.waiting.waiting_rank} waits longest, and rank {found.waiting.rank} is waited for: it takes "
            f"{found.waiting.factor:.2f} times as long as the others, most of it in {found.waiting.phase}."
        )
    for note in found.notes:
        echo(f"Note: {note}")
    echo(f"Bound by {found.bottleneck}" if found.bottleneck else "No single thing clearly holds the steps back.")
    return 0


def _rows(found: Attribution) -> list[PhaseTime]:
    from paceline.report.attribution import PhaseTime

    rest = PhaseTime(name="rest", seconds=found.rest_seconds, share=found.rest_seconds / found.step_seconds)
    whole = PhaseTime(name="step", seconds=found.step_seconds, share=1.0)
    return [*found.phases, *([rest] if found.rest_seconds else []), whole]


def _header(found: Attribution) -> tuple[str, ...]:
    head = ["phase", "ms per step", "share"]
    if _has_launches(found):
        head.append("ms of the host")
    if found.world_size > 1:
        head += ["least", "middle", "most over ranks", "whose"]
    return tuple(head)


def _row(found: Attribution, each: PhaseTime) -> tuple[str, ...]:
    cells = [each.name, _ms(each.seconds), f"{each.share:.1%}"]
    if _has_launches(found):
        cells.append("" if each.launch_seconds is None else _ms(each.launch_seconds))
    if found.world_size > 1:
        ranks = each.over_ranks
        if ranks is None:
            cells += [""] * 4
        else:
            cells += [*map(_ms, (ranks.minimum, ranks.median, ranks.maximum)), f"rank {ranks.most_rank}"]
    return tuple(cells)


def _has_launches(found: Attribution) -> bool:
    return any(each.launch_seconds is not None for each in found.phases)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"
