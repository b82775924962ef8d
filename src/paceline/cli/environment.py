"""`paceline environment`: what is here, and why something is not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json, print_pairs
from paceline.extras import EXTRAS, Extra
from paceline.units import format_bytes


@click.command("environment", short_help="Show versions, devices and what is available here.")
@json_option
def command(as_json: bool) -> None:
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
        "extras": {extra.name: _told(extra) for extra in EXTRAS},
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
    for name, value in for_people(document).items():
        if isinstance(value, dict):
            echo(name)
            print_pairs(value, indent="    ")
        else:
            print_pairs({name: value}, indent="")


def _told(extra: Extra) -> dict[str, Any]:
    """Whether an extra is here, what it is for, and how it is got."""
    return {
        "available": not extra.why_not,
        "why_not": extra.why_not or None,
        "brings": extra.brings,
        "install": extra.install,
        "versions": {library.distribution: library.version for library in extra.libraries},
    }


def _extra_in_words(told: Mapping[str, Any]) -> str:
    if told["available"]:
        versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        return f"{told['brings']}: {versions}"
    return f"{told['brings']}: no, {told['why_not']}; {told['install']}"


def for_people(document: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with a time and a size that can be read."""
    memory = document["memory_bytes"]
    told = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(document["time"])),
        "memory_bytes": "the system does not tell" if memory is None else f"{memory} ({format_bytes(memory)})",
        "git": document["git"] or "no repository here",
        "extras": {name: _extra_in_words(told) for name, told in document["extras"].items()},
    }
    return {**document, **told}
