"""`paceline pack`: write images, or text as tokens, into a few files that are read fast, in any order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import FiniteRange, LocalPath, json_option, refuse_idle
from paceline.cli.output import concluded, echo, print_json
from paceline.cli.streams import ends_in_order
from paceline.files import LeftOut
from paceline.machine import available_cores
from paceline.units import format_bytes, format_count, format_seconds

# As paceline.data.packing.origins has them, which would take its time to import for --help.
KINDS = (
    "image_folder",
    "csv",
    "parquet",
    "webdataset",
    "huggingface",
    "cifar10",
    "cifar100",
    "mnist",
    "fashion_mnist",
    "packed",
)
_EVERY_SECONDS = 5.0


def _mebibytes(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    return None if value is None else value * 2**20


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(name.strip() for name in value.split(","))


@click.command("pack")
@click.argument("source", type=LocalPath(str))
@click.argument("destination", metavar="[DEST]", required=False, type=LocalPath())
@click.option(
    "--mode",
    type=click.Choice(["original", "jpeg", "raw"]),
    help="original keeps the image files byte for byte (the default), jpeg encodes each image anew, raw stores pixels "
    "(the default where the source holds pixels).",
)
@click.option(
    "--max-side",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="With jpeg and raw: make images smaller whose longer side is longer than this; their shape stays.",
)
@click.option(
    "--quality", type=click.IntRange(1, 100), metavar="1-100", help="With jpeg: the quality of encoding (default: 90)."
)
@click.option(
    "--size",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="With raw: squares of this side, the centre of each image, resized; all are read at once by the memory "
    "back-end.",
)
@click.option(
    "--kind", type=click.Choice(KINDS), help="What SOURCE is; without it, that is seen from the files and told."
)
@click.option(
    "--image-column", default="auto", metavar="NAME", help="Of a table: the column of images, or their paths."
)
@click.option("--label-column", default="auto", metavar="NAME", help="Of a table: the column of labels.")
@click.option(
    "--split-column",
    default="auto",
    metavar="NAME",
    help="Of a table: the column of train, val or test; or off.",
)
@click.option(
    "--only-classes", callback=_names, metavar="A,B,…", help="Pack these classes, by name or number, and no others."
)
@click.option(
    "--subset",
    metavar="N|N%",
    help="Pack so many training images, or such a share of them, of each class alike.",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    type=click.IntRange(min=1),
    callback=_mebibytes,
    metavar="MIB",
    help="About how long each file is to be (default: a 64th of all, from 16 to 1024 MiB).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=available_cores,
    metavar="N",
    help="Processes that make shards (default: one per core); they change no byte.",
)
@click.option("--skip-broken", is_flag=True, help="Leave out images that cannot be read, and list them in packed.json.")
@click.option(
    "--verify",
    is_flag=True,
    help="Read everything back afterwards and compare it with its digests; without DEST, SOURCE is a packed dataset "
    "and only that is done.",
)
@click.option("--text", is_flag=True, help="SOURCE is text: write tokens, to be mapped into memory.")
@click.option(
    "--tokenizer",
    type=LocalPath(str),
    default="bytes",
    show_default=True,
    metavar="NAME",
    help="With --text: as data.text.tokenizer.",
)
@click.option(
    "--validation-fraction",
    type=FiniteRange(min=0, max=1, max_open=True),
    default=0.1,
    show_default=True,
    metavar="SHARE",
    help="With --text: share of the documents that is held out, where SOURCE has no split of its own.",
)
@json_option
def command(
    source: str,
    destination: Path | None,
    verify: bool,
    text: bool,
    tokenizer: str,
    validation_fraction: float,
    as_json: bool,
    **given: Any,
) -> int:
    """Pack SOURCE into the directory DEST, to be trained on with data.dataset=packed data.path=DEST.

    SOURCE is an image folder, a CSV file of paths and labels, parquet tables, WebDataset tars (a folder of them, or
    'train-{000..146}.tar'), a Hugging Face dataset on the local disk (save_to_disk, or parquet), CIFAR-10, CIFAR-100,
    MNIST or Fashion-MNIST as published, or a packed dataset. Nothing in it is changed. The files of DEST are Arrow's;
    reading them opens no file per image and takes no library. Writing them needs `pip install 'paceline[pack]'`.

    If it is interrupted or killed, the same command resumes. DEST is a dataset only when it is whole. The same source
    gives the same bytes. Images that cannot be read are named at the end, with exit code 2, unless --skip-broken says
    to leave them out.

    With --text, SOURCE is a folder of .txt files, or of train and val with such; or `docs`, the documentation that
    Python's help() shows. DEST is trained on with data.dataset=tokens data.path=DEST; it is written whole and read
    back, or not at all.

    \b
    Examples:
      paceline pack photos packed/photos --verify
      paceline pack imagenet packed/imagenet-500 --mode jpeg --max-side 500 --quality 90
      paceline pack cifar-10-batches-bin packed/cifar10
      paceline pack 'tars/train-{000..146}.tar' packed/train
      paceline pack labels.csv packed/tenth --subset 10% --only-classes cat,dog
      paceline pack packed/photos --verify
      paceline pack --text books packed/books
    """
    context = click.get_current_context()
    if destination is None and (text or not verify):
        verifying = "." if text else "; or --verify, to read a packed dataset back."
        raise click.UsageError(f"Missing argument 'DEST': where to write{verifying}")
    if text:
        idle, why = ("verify", *given), "it is for images, and --text packs text"
    elif destination is None:
        idle, why = tuple(given.keys() - {"workers"}), "without DEST nothing is written"
    else:
        idle, why = ("tokenizer", "validation_fraction"), "it is for --text"
    for name in idle:
        refuse_idle(context, name, why)
    if text and destination is not None:
        _pack_text(source, destination, tokenizer, validation_fraction, as_json=as_json)
        return 0
    with ends_in_order():
        document: dict[str, Any] = {}
        if destination is not None:
            document = _pack(source, destination, given)
        damage = _verify(destination or Path(source), given["workers"]) if verify else []
    if verify:
        document |= {"destination": str(destination or source), "verified": not damage, "damage": damage}
    code = concluded(passed=not damage)
    if as_json:
        print_json(document)
    else:
        _show(document)
    return code


def _pack(source: str, destination: Path, given: dict[str, Any]) -> dict[str, Any]:
    from paceline.data.packing.origins import wanted_part
    from paceline.data.packing.pack import Request, pack

    begun = time.monotonic()
    names = ("image_column", "label_column", "split_column", "only_classes", "subset")
    part = wanted_part(**{name: given[name] for name in names})
    form = {name: value for name, value in given.items() if name not in names}
    request = Request(source=source, destination=destination, wanted=part, **form)
    packed = pack(request, _Telling("packed", format_count, "images"), lambda line: echo(line, err=True))
    manifest = packed.manifest
    return {
        "destination": str(destination),
        "kind": manifest.origin.kind,
        "mode": manifest.form.mode,
        "max_side": manifest.form.max_side,
        "quality": manifest.form.quality,
        "size": manifest.form.size,
        "classes": len(manifest.classes),
        "samples": dict(manifest.samples),
        "left_out": [vars(each) for each in manifest.left_out],
        "bytes": manifest.size_bytes,
        "shards": len(manifest.shards),
        "digest": manifest.digest,
        "found": packed.found,
        "seconds": time.monotonic() - begun,
    }


def _pack_text(source: str, destination: Path, tokenizer: str, validation_fraction: float, *, as_json: bool) -> None:
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
        return
    for sentence in left_out.told():
        echo(f"note: {sentence}")
    counts = " and ".join(f"{packed.tokens[split]:,} {split}" for split in packed.tokens)
    number = sum(packed.documents.values())
    documents = f"{number:,} document{'s' * (number != 1)}"
    echo(f"{destination}: {counts} tokens of {documents}, {format_bytes(packed.size_bytes)}")


def _verify(root: Path, workers: int) -> list[str]:
    from paceline.data.packing.pack import verify

    return verify(root, workers, _Telling("read back", format_bytes, ""))


def _show(document: dict[str, Any]) -> None:
    if "mode" in document:
        counts = " and ".join(f"{count:,} {split}" for split, count in document["samples"].items())
        total = sum(document["samples"].values())
        had = "all of them before" if document["found"] >= total else f"in {format_seconds(document['seconds'])}"
        echo(
            f"{document['destination']}: {counts} images of {document['classes']:,} classes, "
            f"{format_bytes(document['bytes'])} in {document['shards']} shard{'s' * (document['shards'] != 1)}, {had}"
        )
        for each in document["left_out"][:10]:
            echo(f"left out: {each['name']} ({each['reason']})")
        if len(document["left_out"]) > 10:
            echo(f"left out: {len(document['left_out']) - 10:,} more, which packed.json lists")
    if "verified" in document:
        for line in document["damage"]:
            echo(line)
        if document["verified"]:
            echo(f"{document['destination']}: read back, every byte is what was written")


class _Telling:
    """Says now and then on standard error how far it is."""

    def __init__(self, verb: str, spell: Callable[[float], str], unit: str) -> None:
        self._verb, self._spell, self._unit = verb, spell, unit
        self._next = time.monotonic() + _EVERY_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next and done < total:
            self._next = now + _EVERY_SECONDS
            of = f"{self._spell(done)} of {self._spell(total)} {self._unit}".rstrip()
            echo(f"{self._verb} {of}", err=True)
