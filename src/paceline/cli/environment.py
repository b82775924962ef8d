"""`paceline environment`: what is here, and why something is not."""

from __future__ import annotations

import click

from paceline.cli.options import json_option
from paceline.cli.output import print_json, print_pairs


@click.command("environment", short_help="Show versions, devices and what is available here.")
@json_option
def command(as_json: bool) -> None:
    """Show versions, hardware and devices, with the reason why something cannot be used."""
    from paceline.distributed.device import available_devices, choose_device, describe_machine
    from paceline.records.environment import capture_environment
    from paceline.world import World

    machine = describe_machine(choose_device("auto", World()))
    document = {
        **capture_environment(),
        "devices": available_devices(),
        "default_device": machine.device,
        "default_precision": {
            "name": "bf16" if machine.fast_bf16 else "fp32",
            "reason": machine.reasons["fast_bf16"],
        },
    }
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        if isinstance(value, dict):
            click.echo(name)
            print_pairs(value, indent="    ")
        else:
            print_pairs({name: value}, indent="")
