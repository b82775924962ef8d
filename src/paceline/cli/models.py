"""`paceline models`: which networks a recipe can name."""

from __future__ import annotations

import click

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json


@click.command("models", short_help="List the networks a recipe can name.")
@click.argument("pattern", default="*")
@json_option
def command(pattern: str, as_json: bool) -> None:
    """List model names that contain PATTERN, or match it as a shell pattern (resnet*, *vit*224*).

    A network of your own is named package.module:factory.
    """
    from paceline.errors import ModelError, did_you_mean
    from paceline.models.build import model_names

    names = model_names(pattern)
    if not names:
        raise ModelError(f"no model matches '{pattern}'.{did_you_mean(pattern, model_names())}")
    if as_json:
        print_json(names)
    else:
        echo("\n".join(names))
