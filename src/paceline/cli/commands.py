"""The commands in their groups, built in or added by installed packages; listing them imports none of them.

Built-in commands are listed here. An installed package adds commands through entry points, which are loaded in the same
way::

    [project.entry-points."paceline.commands"]
    embed = "mypackage.embed:Embed"

The entry point refers to a dataclass declared by :func:`paceline.command.command`, or to a click command.
"""

from __future__ import annotations

import pkgutil
from typing import NamedTuple

import click

from paceline.errors import PacelineError
from paceline.references import load_reference
from paceline.registry import installed


class Listed(NamedTuple):
    """A command as listed by `--help`: its summary, and the ``module:name`` that it is loaded from."""

    line: str
    reference: str


_ADVISOR = "paceline_advisor.commands"
_OPS = "paceline_ops"
_OURS = "paceline.cli"
GROUPS: dict[str, dict[str, Listed]] = {
    "Train": {
        "train": Listed("Train a recipe, or your images.", f"{_OURS}.train:Train"),
        "resume": Listed("Resume a run with the options it was started with.", f"{_OURS}.train:Resume"),
        "watch": Listed("Watch runs in the terminal while they train.", f"{_OURS}.watch:Watch"),
        "launch": Listed("Write and submit a job for Slurm, torchrun or Kubernetes.", f"{_OPS}.launch:Launch"),
    },
    "Use": {
        "evaluate": Listed("Score the weights of a run, a checkpoint or a file.", f"{_OURS}.evaluate:Evaluate"),
        "predict": Listed("Label images, or write text, with trained weights.", f"{_OURS}.predict:Predict"),
        "export": Listed("Write weights as timm, safetensors, ONNX or torch.export.", f"{_OURS}.export:Export"),
        "serve": Listed("Serve predictions over HTTP, with a web page.", f"{_OPS}.serve:Serve"),
        "report": Listed("Write one HTML page about runs, or print where step time went.", f"{_OURS}.report:Report"),
    },
    "Data": {
        "check-data": Listed("Find images that would break or spoil a run.", f"{_OURS}.check_data:CheckData"),
        "pack": Listed("Pack images or text into a few files that load fast.", f"{_OURS}.pack:Pack"),
    },
    "Before a run": {
        "estimate": Listed("Estimate training memory on any GPU, whether or not you have it.", f"{_ADVISOR}:Estimate"),
        "plan": Listed("Choose the number of GPUs for a deadline or a budget.", f"{_ADVISOR}:Plan"),
        "scale": Listed("Predict scaling over GPUs, and measure it where possible.", f"{_ADVISOR}:Scale"),
    },
    "Advise": {
        "doctor": Listed("Find what limits a run's speed, and measure each change.", f"{_ADVISOR}:Doctor"),
        "find-lr": Listed("Find a learning rate by a range test.", f"{_ADVISOR}:FindLr"),
        "find-batch": Listed("Find the largest micro-batch that fits, by trying.", f"{_ADVISOR}:FindBatch"),
        "tune": Listed("Search for better recipe values with Optuna; each trial is a run.", f"{_ADVISOR}:Tune"),
    },
    "Verify": {
        "audit": Listed("Prove that a run used each sample exactly once per epoch.", f"{_OURS}.report:Audit"),
        "prove": Listed("Prove that a recipe computes what it says, also with your own code.", f"{_ADVISOR}:Prove"),
        "drill": Listed("Kill and disturb runs of a recipe, and check that nothing is lost.", f"{_ADVISOR}:Drill"),
    },
    "Study": {
        "bench": Listed("Measure how fast a recipe trains or answers, and compare.", f"{_ADVISOR}:bench"),
        "roofline": Listed("Compare a training step with a device's limits, layer by layer.", f"{_ADVISOR}:Roofline"),
        "noise-scale": Listed(
            "Measure the gradient noise scale: how large a batch still pays.", f"{_ADVISOR}:NoiseScale"
        ),
        "sweep-batch": Listed(
            "Train to a target with several batch sizes; fit where larger ones stop paying.", f"{_ADVISOR}:SweepBatch"
        ),
        "landscape": Listed("Plot the loss around a run's weights, and measure sharpness.", f"{_ADVISOR}:Landscape"),
        "formulas": Listed(
            "Compute a rule of thumb: rooflines, memory, batch sizes, scaling, time.", f"{_ADVISOR}:Formulas"
        ),
    },
    "More": {
        "recipes": Listed("List the shipped recipes, or show one.", f"{_OURS}.available:Recipes"),
        "models": Listed("List the networks a recipe can name.", f"{_OURS}.available:Models"),
        "explain": Listed("Explain a recipe key: values, default, effect, example.", f"{_OURS}.explain:Explain"),
        "import": Listed(
            "Convert a command line of timm's or NVIDIA's trainer into a recipe.", f"{_OPS}.import_recipe:Import"
        ),
        "labs": Listed(
            "Work through the course: start a lab, check exercises, mark the assessment.",
            "paceline_course.command:command",
        ),
        "env": Listed("Show versions, devices and what is available here.", f"{_OURS}.available:Environment"),
        "mlperf": Listed("Write logs of runs in MLPerf's format.", f"{_OPS}.mlperf.command:MlperfLogs"),
        "completion": Listed("Print the completion script of a shell.", f"{_OURS}.completion:Completion"),
    },
}
COMMANDS = {name: listed for group in GROUPS.values() for name, listed in group.items()}
# Groups whose commands `paceline --help` lists one by one.
OPEN_GROUPS = ("Train", "Use", "Data", "Before a run", "Advise")
# Old names, which still work but are not listed, and the words they stand for.
ALIASES = {
    "attribution": ("report", "--timing"),
    "environment": ("env",),
    "import-nvidia": ("import", "nvidia"),
    "import-timm": ("import", "timm"),
    "pack-text": ("pack", "--text"),
}


def added_commands() -> dict[str, str]:
    """Return the commands that installed packages add, by name; they cannot replace built-in ones."""
    return {name: reference for name, reference in installed("commands").items() if name not in COMMANDS}


def command_of(name: str) -> click.Command:
    """Import and return a command.

    Raises:
        KeyError: If there is no such command.
        PacelineError: If an installed package's command cannot be imported.
    """
    if name in COMMANDS:
        kind = pkgutil.resolve_name(COMMANDS[name].reference)
    else:
        kind = load_reference(added_commands()[name], PacelineError, installed=True)
    if isinstance(kind, type):
        from paceline.cli.derive import click_command

        return click_command(kind)
    return kind if isinstance(kind, click.Command) else kind()
