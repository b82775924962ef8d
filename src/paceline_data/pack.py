"""`paceline pack`: write images, or data of other kinds, into a few files for fast reading in any order.

Packages add other kinds through the entry points ``paceline.packers``. A packer is a dataclass: it is used with the
flag of its name, and its fields are further options, each with ``Shape(only=NAME)``. The first line of its docstring
is the help of the flag; the rest is added to that of the command. Its method ``pack(source, destination)`` writes the
data and returns a :class:`~paceline.pages.shown.Result`.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import click
from annotated_types import Ge, Le

from paceline.command import Log, Shape, command
from paceline.errors import DataError, PacelineError
from paceline.host.machine import available_cores
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.units import counted, format_bytes, format_count, format_seconds
from paceline.plugins.registry import load_all
from paceline.storage.cache import local_path

_EVERY_SECONDS = 5.0
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_NAMED = 10
_EXAMPLES = "\n\nExamples:\n"
PACKERS: dict[str, Any] = {name: each for name, each in load_all("packers").items() if is_dataclass(each)}


def _images(metavar: str | None = None, name: str | None = None) -> Shape:
    """Return the shape of an option that applies only to packed images."""
    return Shape(metavar=metavar, name=name, only="destination", without=tuple(PACKERS))


@dataclass(frozen=True, kw_only=True)
class _Pack:
    """Pack images or text into a few files that load fast.

    They are written into the directory DEST; train on it with data.dataset=packed data.path=DEST.

    SOURCE is an image folder, a CSV file of paths and labels, parquet tables, WebDataset tars (a folder of them, or
    'train-{000..146}.tar'), a Hugging Face dataset on the local disk (save_to_disk, or parquet), CIFAR-10, CIFAR-100,
    MNIST or Fashion-MNIST as published, or a packed dataset; or the address of one (s3://…). Nothing in it is changed.
    DEST holds Arrow files; reading
    them opens no file per image and needs no library. Writing them needs `pip install 'paceline[pack]'`.

    If it is interrupted or killed, the same command resumes. DEST is a dataset only once it is complete. The same
    source
    gives the same bytes. Images that cannot be read are named at the end, with exit code 2, unless --skip-broken leaves
    them out.

    Examples:
      paceline pack photos packed/photos --verify
      paceline pack imagenet packed/imagenet-500 --mode jpeg --max-side 500 --quality 90
      paceline pack cifar-10-batches-bin packed/cifar10
      paceline pack 'tars/train-{000..146}.tar' packed/train
      paceline pack labels.csv packed/tenth --subset 10% --only-classes cat,dog
      paceline pack packed/photos --verify
    """

    source: Annotated[str, Shape(path="local")]
    destination: Annotated[Path | None, Shape(metavar="[DEST]", argument=True)] = None
    mode: Annotated[
        Literal["original", "jpeg", "raw"] | None,
        _images(),
        "original keeps the image files byte for byte (the default), jpeg encodes each image anew, raw stores pixels "
        "(the default where the source holds pixels).",
    ] = None
    max_side: Annotated[
        int | None,
        Ge(1),
        _images("PIXELS"),
        "With jpeg and raw: shrink images whose longer side exceeds this, keeping their aspect ratio.",
    ] = None
    quality: Annotated[int | None, Ge(1), Le(100), _images("1-100"), "With jpeg: encoding quality (default: 90)."] = (
        None
    )
    size: Annotated[
        int | None,
        Ge(1),
        _images("PIXELS"),
        "With raw: store the centre of each image, resized to a square of this side; the memory back-end reads all at "
        "once.",
    ] = None
    kind: Annotated[
        str | None,
        _images("NAME"),
        "Format of SOURCE, as in data.dataset, such as csv or webdataset (default: detected from the files and "
        "reported).",
    ] = None
    image_column: Annotated[str, _images("NAME"), "For a table: the column with images, or their paths."] = "auto"
    label_column: Annotated[str, _images("NAME"), "For a table: the column with labels."] = "auto"
    split_column: Annotated[str, _images("NAME"), "For a table: the column with train, val or test; or off."] = "auto"
    only_classes: Annotated[tuple[str, ...] | None, _images("A,B,…"), "Pack only these classes, by name or number."] = (
        None
    )
    subset: Annotated[
        str | None, _images("N|N%"), "Pack only this number or share of the training images, stratified by class."
    ] = None
    shard_mebibytes: Annotated[
        int | None,
        Ge(1),
        _images("MIB", "--shard-size"),
        "Approximate size of each file (default: a 64th of all, from 16 to 1024 MiB).",
    ] = None
    workers: Annotated[
        int | None,
        Ge(1),
        Shape(without=tuple(PACKERS)),
        "Threads that write shards (default: one per core); the bytes are the same with any number.",
    ] = None
    skip_broken: Annotated[bool, _images(), "Leave out images that cannot be read, and list them in packed.json."] = (
        False
    )
    verify: Annotated[
        bool,
        Shape(without=tuple(PACKERS)),
        "Read everything back afterwards and compare it with its digests; without DEST, SOURCE is a packed dataset and "
        "is only verified.",
    ] = False

    def __post_init__(self) -> None:
        is_other = any(getattr(self, name) for name in PACKERS)
        if self.destination is None and (is_other or not self.verify):
            verifying = "." if is_other else "; or --verify, to read a packed dataset back."
            raise click.UsageError(f"Missing argument 'DEST': where to write{verifying}")

    def run(self, log: Log) -> Result:
        """Pack the source, or read a packed dataset back."""
        for name, packer in PACKERS.items():
            if getattr(self, name):
                options = {each.name: getattr(self, each.name) for each in fields(packer)}
                result: Result = packer(**options).pack(local_path(self.source, key="SOURCE"), self.destination)
                return result
        document: dict[str, Any] = {}
        damage: list[str] = []
        if self.destination is not None:
            document = _packed(self, self.destination, log)
        if self.verify:
            from paceline_data.packing.pack import verify

            root = self.destination or Path(local_path(self.source, key="SOURCE"))
            damage = verify(
                root, self.workers or available_cores(), _progress_logger("read back", format_bytes, "", log)
            )
            document |= {"destination": str(root), "verified": not damage, "damage": damage}
        return Document(document=document, shown=Shown(blocks=_lines(document), ok=not damage or ""))


def _with_packers() -> type[_Pack]:
    """Return the command with the options and the help of all packers."""
    text, _, examples = inspect.cleandoc(_Pack.__doc__ or "").partition(_EXAMPLES)
    added, taken = list[tuple[str, Any, Any]](), {each.name for each in fields(_Pack)}
    for name, packer in PACKERS.items():
        if twice := taken & (names := {name, *(each.name for each in fields(packer))}):
            raise PacelineError(
                f"paceline.packers: '{name}' and `paceline pack`, or another packer, have the option '{min(twice)}'; "
                "rename one."
            )
        taken |= names
        flag, _, more = inspect.cleandoc(packer.__doc__).partition("\n\n")
        paragraphs, _, uses = more.partition(_EXAMPLES)
        text, examples = f"{text}\n\n{paragraphs}", f"{examples}\n{uses}"
        hints = get_type_hints(packer, include_extras=True)
        added.append((name, Annotated[bool, flag], False))
        added += [(each.name, hints[each.name], each.default) for each in fields(packer)]
    namespace = {"__doc__": f"{text}{_EXAMPLES}{examples}"}
    return command("pack", group="Data", place=2)(
        make_dataclass("Pack", added, bases=(_Pack,), namespace=namespace, frozen=True, kw_only=True)
    )


Pack = _with_packers()


def _packed(options: _Pack, destination: Path, log: Log) -> dict[str, Any]:
    from paceline.recipe.data import Data, check_part
    from paceline_data.packing.pack import Request, pack

    started, subset, classes = time.monotonic(), options.subset, options.only_classes
    try:
        subset_value = None if subset is None else check_part(int(subset) if subset.isdecimal() else subset)
    except ValueError as error:
        raise DataError(f"--subset: {error}.") from None
    names = ("source", "kind", "mode", "max_side", "quality", "size", "skip_broken")
    request = Request(
        **{name: getattr(options, name) for name in names},
        destination=destination,
        shard_bytes=None if options.shard_mebibytes is None else options.shard_mebibytes * 2**20,
        workers=options.workers or available_cores(),
        part=Data(
            image_column=options.image_column,
            label_column=options.label_column,
            split_column=None if options.split_column == "off" else options.split_column,
            only_classes=classes and tuple(int(each) if _NUMBER.fullmatch(each) else each for each in classes),
            subset=subset_value,
        ),
    )
    manifest, already_packed = pack(request, _progress_logger("packed", format_count, "images", log), log)
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
        "found": already_packed,
        "seconds": time.monotonic() - started,
    }


def _lines(document: Mapping[str, Any]) -> list[str]:
    """Report what was packed, and the result of reading it back."""
    lines = []
    if "mode" in document:
        counts = " and ".join(f"{count:,} {split}" for split, count in document["samples"].items())
        total = sum(document["samples"].values())
        had = "all of them before" if document["found"] >= total else f"in {format_seconds(document['seconds'])}"
        lines.append(
            f"{document['destination']}: {counts} images of {document['classes']:,} classes, "
            f"{format_bytes(document['bytes'])} in {counted(document['shards'], 'shard')}, {had}"
        )
        lines += [f"left out: {each['name']} ({each['reason']})" for each in document["left_out"][:_NAMED]]
        if len(document["left_out"]) > _NAMED:
            lines.append(f"left out: {len(document['left_out']) - _NAMED:,} more, which packed.json lists")
    lines += document.get("damage", ())
    if document.get("verified"):
        lines.append(f"{document['destination']}: read back, every byte matches")
    return lines


def _progress_logger(verb: str, form: Callable[[float], str], unit: str, log: Log) -> Callable[[int, int], None]:
    """Return a function that periodically logs the progress."""
    due = time.monotonic() + _EVERY_SECONDS

    def log_progress(done: int, total: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due and done < total:
            due = now + _EVERY_SECONDS
            log(f"{verb} {form(done)} of {form(total)} {unit}".rstrip())

    return log_progress
