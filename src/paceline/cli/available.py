"""`paceline recipes`, `models` and `env`: what is available, and why something is not."""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json, print_pairs, print_table
from paceline.errors import ModelError, RecipeError, did_you_mean
from paceline.extras import EXTRAS, Extra
from paceline.units import format_bytes


@click.command("recipes")
@click.argument("action", required=False, metavar="[show]")
@click.argument("name", required=False)
@json_option
def recipes(action: str | None, name: str | None, as_json: bool) -> None:
    """List the shipped recipes, or with `show NAME` print one.

    Copy what it prints to a file of your own, change it, and train the file.
    """
    from paceline.recipe.load import load_recipe, shipped_recipes, to_tree

    shipped = shipped_recipes()
    if action not in (None, "show"):
        known = action if action in shipped else "NAME"
        raise click.UsageError(f"found '{action}', but this is `paceline recipes` or `paceline recipes show {known}`.")
    if action is None:
        rows = [(each, path.parent.name, headline(path)) for each, path in shipped.items()]
        if as_json:
            print_json([{"name": each, "task": task, "description": text} for each, task, text in rows])
        else:
            print_table(("name", "task", "description"), rows, indent="")
    elif name is None:
        raise click.UsageError(f"'recipes show' needs a name: {', '.join(shipped)}.")
    elif name not in shipped:
        raise RecipeError(f"no shipped recipe '{name}'.{did_you_mean(name, shipped)} `paceline recipes` lists all.")
    elif as_json:
        print_json(to_tree(load_recipe(name).recipe))
    else:
        load_recipe(name)  # refuses one that is not valid
        echo(shipped[name].read_text(encoding="utf-8"), nl=False)


def headline(path: Path) -> str:
    """The first comment line of a recipe file."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


@click.command("models")
@click.argument("pattern", default="*")
@json_option
def models(pattern: str, as_json: bool) -> None:
    """List model names that contain PATTERN, or match it as a shell pattern (resnet*, *vit*224*).

    A network of your own is named package.module:factory.
    """
    from paceline.models.build import model_names

    names = model_names(pattern)
    if not names:
        raise ModelError(f"no model matches '{pattern}'.{did_you_mean(pattern, model_names())}")
    if as_json:
        print_json(names)
    else:
        echo("\n".join(names))


@click.command("env")
@json_option
def env(as_json: bool) -> None:
    """Show versions, hardware and devices, with the reason why something cannot be used."""
    from paceline.data.image.decode import describe_decoder
    from paceline.data.image.pipeline import available_backends
    from paceline.distributed.device import available_devices, choose_device, describe_machine
    from paceline.records.environment import capture_environment
    from paceline.world import World

    machine = describe_machine(choose_device("auto", World()))
    document = {
        **capture_environment(),
        "devices": available_devices(),
        "default_device": machine.device,
        "backends": available_backends(),
        "extras": {
            extra.name: {
                "available": not extra.why_not,
                "why_not": extra.why_not or None,
                "brings": extra.brings,
                "install": extra.install,
                "versions": {library.distribution: library.version for library in extra.libraries},
            }
            for extra in EXTRAS
        },
        "arithmetic": {name: machine.lacks.get(name, "available") for name in ("bf16_products", "tf32", "fp8")},
        "jpeg_decoder": describe_decoder(),
        "default_precision": {
            "name": "bf16" if machine.fast_bf16 else "fp32",
            "reason": machine.reasons["fast_bf16"],
        },
    }
    if as_json:
        print_json(document)
        return
    memory = document["memory_bytes"]
    shown = document | {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(document["time"])),
        "memory_bytes": "the system does not tell" if memory is None else f"{memory} ({format_bytes(memory)})",
        "git": document["git"] or "no repository here",
        "extras": {extra.name: _in_words(extra) for extra in EXTRAS},
    }
    for name, value in shown.items():
        if isinstance(value, dict):
            echo(name)
            print_pairs(value, indent="    ")
        else:
            print_pairs({name: value}, indent="")


def _in_words(extra: Extra) -> str:
    if extra.why_not:
        return f"{extra.brings}: no, {extra.why_not}; {extra.install}"
    versions = ", ".join(f"{library.distribution} {library.version}" for library in extra.libraries)
    return f"{extra.brings}: {versions}"
