"""`paceline recipes`, `models` and `env`: what is available, and why something is not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import click

from paceline.command import Log, Shape, command
from paceline.errors import ModelError, RecipeError, did_you_mean
from paceline.pages.page import Table
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.units import format_bytes
from paceline.plugins.extras import EXTRAS, Extra


@command("recipes")
@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the shipped recipes, or with `show NAME` print one.

    Save the output to a file, change it, and train the file.
    """

    action: Annotated[str | None, Shape(metavar="[show]", argument=True)] = None
    name: Annotated[str | None, Shape(argument=True)] = None

    def run(self, _: Log) -> Result:
        """List the recipes, or show one."""
        from paceline.recipe.load import load_recipe, shipped_recipes, to_tree

        shipped, name = shipped_recipes(), self.name
        if self.action is None:
            texts = {each: path.read_text(encoding="utf-8") for each, path in shipped.items()}
            summaries = {each: text.splitlines()[0].removeprefix("#").strip() for each, text in texts.items()}
            columns = ("name", "task", "description")
            rows = [(each, path.parent.name, summaries[each]) for each, path in shipped.items()]
            document = [dict(zip(columns, row, strict=True)) for row in rows]
            return Document(document=document, shown=Shown(blocks=[Table(columns=columns, rows=rows)]))
        if self.action != "show":
            raise click.UsageError(
                f"found '{self.action}', but this is `paceline recipes` or `paceline recipes show "
                f"{self.action if self.action in shipped else 'NAME'}`."
            )
        if name is None:
            raise click.UsageError(f"'recipes show' needs a name: {', '.join(shipped)}.")
        if name not in shipped:
            raise RecipeError(f"no shipped recipe '{name}'.{did_you_mean(name, shipped)} `paceline recipes` lists all.")
        tree = to_tree(load_recipe(name).recipe)  # refuses an invalid one
        text = shipped[name].read_text(encoding="utf-8")
        return Document(document=tree, shown=Shown(blocks=[text.removesuffix("\n")]))


@command("models")
@dataclass(frozen=True, kw_only=True)
class Models:
    """List model names that contain PATTERN, or match it as a shell pattern (resnet*, *vit*224*).

    Name your own network as package.module:factory.
    """

    pattern: Annotated[str, Shape(argument=True)] = "*"

    def run(self, _: Log) -> Result:
        """List the models.

        Raises:
            ModelError: If none matches.
        """
        from paceline.models.build import model_names

        names = model_names(self.pattern)
        if not names:
            raise ModelError(f"no model matches '{self.pattern}'.{did_you_mean(self.pattern, model_names())}")
        return Document(document=names, shown=Shown(blocks=names))


@command("env")
@dataclass(frozen=True, kw_only=True)
class Environment:
    """Show versions, hardware and devices, and why something cannot be used."""

    def run(self, _: Log) -> Result:
        """Inspect the machine and the installed packages."""
        from paceline.data.image.decode import describe_decoder
        from paceline.data.image.pipeline import available_backends
        from paceline.distributed.device import available_devices, choose_device, describe_machine
        from paceline.host.system import lacking
        from paceline.host.world import World
        from paceline.records.environment import capture_environment

        machine = describe_machine(choose_device("auto", World()))
        document = {
            **capture_environment(),
            "devices": available_devices(),
            "default_device": machine.device,
            "backends": available_backends(),
            "extras": {
                extra.name: {
                    "available": not extra.unavailable_reason,
                    "why_not": extra.unavailable_reason or None,
                    "brings": extra.features,
                    "install": extra.install,
                    "versions": {library.distribution: library.version for library in extra.libraries},
                }
                for extra in EXTRAS
            },
            "arithmetic": {name: machine.lacks.get(name, "available") for name in ("bf16_products", "tf32", "fp8")},
            "jpeg_decoder": describe_decoder(),
            "left_out": lacking(),
            "default_precision": {
                "name": "bf16" if machine.fast_bf16 else "fp32",
                "reason": machine.reasons["fast_bf16"],
            },
        }
        memory = document["memory_bytes"]
        shown = document | {
            "time": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(document["time"])),
            "memory_bytes": "unknown to the system" if memory is None else f"{memory} ({format_bytes(memory)})",
            "git": document["git"] or "no repository here",
            "extras": {extra.name: _in_words(extra) for extra in EXTRAS},
            "left_out": document["left_out"] or "nothing: this system has flock, fork and SIGUSR1",
        }
        blocks: list[Any] = []
        for name, value in shown.items():
            blocks += [name, value] if isinstance(value, dict) else [f"{name}  {value}"]
        return Document(document=document, shown=Shown(blocks=blocks))


def _in_words(extra: Extra) -> str:
    if extra.unavailable_reason:
        return f"{extra.features}: no, {extra.unavailable_reason}; {extra.install}"
    versions = ", ".join(f"{library.distribution} {library.version}" for library in extra.libraries)
    return f"{extra.features}: {versions}"
