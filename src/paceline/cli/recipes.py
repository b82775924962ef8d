"""`paceline recipes`: what comes with Paceline."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json, print_table
from paceline.errors import RecipeError, did_you_mean
from paceline.recipe.load import load_recipe, shipped_recipes, to_tree


@click.command("recipes", short_help="List the shipped recipes, or show one.")
@click.argument("action", required=False, metavar="[show]")
@click.argument("name", required=False)
@json_option
def command(action: str | None, name: str | None, as_json: bool) -> None:
    """List the shipped recipes, or with `show NAME` print one as it stands.

    Copy what it prints to a file of your own, change it, and train the file.
    """
    if action is not None:
        if action != "show":
            known = action if action in shipped_recipes() else "NAME"
            raise click.UsageError(
                f"found '{action}', but this is `paceline recipes` or `paceline recipes show {known}`."
            )
        if name is None:
            raise click.UsageError(f"'recipes show' needs a name: {', '.join(shipped_recipes())}.")
        _show(name, as_json=as_json)
        return
    rows = [(each, path.parent.name, headline(path)) for each, path in shipped_recipes().items()]
    if as_json:
        print_json([{"name": each, "task": task, "description": text} for each, task, text in rows])
    else:
        print_table(("name", "task", "description"), rows, indent="")


def _show(name: str, *, as_json: bool) -> None:
    shipped = shipped_recipes()
    if name not in shipped:
        if hint := did_you_mean(name, shipped):
            raise RecipeError(f"no shipped recipe '{name}'.{hint} `paceline recipes` lists all.")
        raise RecipeError(f"there is no shipped recipe '{name}'; `paceline recipes` lists them.")
    loaded = load_recipe(name)
    if as_json:
        print_json(to_tree(loaded.recipe))
    else:
        echo(shipped[name].read_text(encoding="utf-8"), nl=False)


def headline(path: Path) -> str:
    """The first comment line of a recipe file."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
