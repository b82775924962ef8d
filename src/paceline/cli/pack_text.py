"""`paceline pack-text`: write text as tokens into files that are mapped into memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from paceline.cli.options import FiniteRange, LocalPath, json_option
from paceline.cli.output import echo, print_json
from paceline.files import LeftOut
from paceline.units import format_bytes


@click.command("pack-text", short_help="Write text as tokens into files that are mapped into memory.")
@click.argument("source", type=LocalPath(str))
@click.argument("destination", metavar="DEST", type=LocalPath())
@click.option(
    "--tokenizer",
    type=LocalPath(str),
    default="bytes",
    show_default=True,
    metavar="NAME",
    help="As data.text.tokenizer.",
)
@click.option(
    "--validation-fraction",
    type=FiniteRange(min=0, max=1, max_open=True),
    default=0.1,
    show_default=True,
    metavar="SHARE",
    help="Share of the documents that is held out, where SOURCE has no split of its own.",
)
@json_option
def command(source: str, destination: Path, tokenizer: str, validation_fraction: float, as_json: bool) -> int:
    """Write SOURCE as tokens into the folder DEST, to be trained on with data.dataset=tokens data.path=DEST.

    SOURCE is a folder of .txt files, or of train and val with such; or `docs`, the documentation that Python's help()
    shows. Nothing in it is changed. DEST comes into being whole and read back, or not at all.

    \b
    Examples:
      paceline pack-text books packed/books
      paceline train gpt-small-docs data.dataset=tokens data.path=packed/books
    """
    from paceline.data.text.corpus import write_tokens
    from paceline.data.text.datasets import check_some_text, folder_splits, python_documentation, split_by_name
    from paceline.data.text.tokenizer import open_tokenizer

    left_out = LeftOut()
    if source == "docs":
        train, validation = split_by_name(python_documentation(), validation_fraction)
    else:
        train, validation, _ = folder_splits(Path(source), validation_fraction, left_out)
    check_some_text(source, train, validation)
    packed = write_tokens({"train": train, "validation": validation}, open_tokenizer(tokenizer), destination)
    if as_json:
        print_json({"destination": str(destination), **dataclasses.asdict(packed), "left_out": left_out.told()})
        return 0
    for sentence in left_out.told():
        echo(f"note: {sentence}")
    counts = " and ".join(f"{packed.tokens[split]:,} {split}" for split in packed.tokens)
    number = sum(packed.documents.values())
    documents = f"{number:,} document{'s' * (number != 1)}"
    echo(f"{destination}: {counts} tokens of {documents}, {format_bytes(packed.size_bytes)}")
    return 0
