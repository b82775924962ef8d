"""`paceline pack --text`: write text as tokens into a few files for fast reading in any order."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from paceline.command import Shape
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.files import SkippedItems
from paceline.parsing.units import counted, format_bytes


@dataclass(frozen=True, kw_only=True)
class PackText:
    """SOURCE is text: write tokens for memory-mapped reading.

    With --text, SOURCE is a folder of .txt files, or of train and val with such; or `docs`, the documentation that
    Python's help() shows. Train on DEST with data.dataset=tokens data.path=DEST; it is written completely and read
    back, or not at all.

    Examples:
      paceline pack --text books packed/books
    """

    tokenizer: Annotated[
        str, Shape(metavar="NAME", path="local", only="text"), "With --text: tokenizer, as in data.text.tokenizer."
    ] = "bytes"
    validation_fraction: Annotated[
        float,
        Ge(0),
        Lt(1),
        Shape(metavar="SHARE", only="text"),
        "With --text: share of the documents to hold out, if SOURCE has no split.",
    ] = 0.1

    def pack(self, source: str, destination: Path) -> Result:
        """Write the tokens of the documents."""
        from paceline_text.corpus import split_by_name, write_tokens
        from paceline_text.sets.documents import check_some_text, folder_splits, python_documentation
        from paceline_text.tokenizer import open_tokenizer

        skipped = SkippedItems()
        if source == "docs":
            train, validation = split_by_name(python_documentation(), self.validation_fraction)
        else:
            train, validation, _ = folder_splits(Path(source), self.validation_fraction, skipped)
        check_some_text(source, train, validation, "--validation-fraction")
        packed = write_tokens({"train": train, "validation": validation}, open_tokenizer(self.tokenizer), destination)
        counts = " and ".join(f"{packed.tokens[split]:,} {split}" for split in packed.tokens)
        documents = counted(sum(packed.documents.values()), "document")
        lines = [f"note: {sentence}" for sentence in skipped.summaries()]
        lines.append(f"{destination}: {counts} tokens of {documents}, {format_bytes(packed.size_bytes)}")
        document = {"destination": str(destination), **asdict(packed), "left_out": skipped.summaries()}
        return Document(document=document, shown=Shown(blocks=lines))
