"""`paceline audit`: the proof that each sample was used exactly once per epoch."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import concluded, echo, print_json, print_table
from paceline.units import format_count


@click.command("audit", short_help="Prove from its ledger that a run used each sample exactly once per epoch.")
@click.argument("run", type=LocalPath())
@json_option
def command(run: Path, as_json: bool) -> int:
    """Audit the ledger in the run directory RUN: what every process really trained on.

    Exit code 1 and one sentence per objection if a sample was repeated, left out, or used out of order.
    """
    from paceline.report.audit import audit_run

    audit = audit_run(run)
    code = concluded(passed=audit.passed)
    if as_json:
        print_json(audit.to_json())
        return code
    rows = [
        (
            one.epoch + 1,
            format_count(one.used),
            one.duplicates,
            one.missing,
            one.broken,
            _state(one.is_over, one.is_complete),
        )
        for one in audit.epochs
    ]
    print_table(("epoch", "used", "duplicates", "missing", "broken", ""), rows, indent="")
    for name, count in audit.left_out.items():
        words = name.replace("_", " ")
        echo(
            f"left out: {format_count(count)} {words.removesuffix('s') if count == 1 else words}, of which no sample "
            "was made"
        )
    for objection in audit.objections:
        echo(f"objection: {objection}")
    if audit.passed:
        echo(
            f"Passed: over {format_count(audit.steps)} steps each of {format_count(audit.samples_per_epoch)} samples "
            f"was used{', or found broken,' * any(one.broken for one in audit.epochs)} exactly once per "
            f"{'finished ' * any(not one.is_over for one in audit.epochs)}epoch, in the recipe's order."
        )
    return code


def _state(is_over: bool, is_complete: bool) -> str:
    return "complete" if is_complete else ("WRONG" if is_over else "under way")
