"""`paceline export`: weights as a file or folder for other programs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paceline.command import Best, Log, Overrides, Shape, Target, TrustCode, Weights, command
from paceline.inference.formats import formats
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.units import format_bytes

if TYPE_CHECKING:
    from paceline.inference.export import Exported


def _phrases() -> dict[str, str]:
    return {name: each.phrase for name, each in formats().items()}


@command("export")
@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the weights of TARGET (a run directory, a checkpoint, a safetensors file or a hub folder) for other
    programs.

    Works on a CPU, for runs of any strategy: shards of parallel.strategy=fsdp are combined,
    and low-rank adapters are merged into the weights. An exported model is compared with the network at several batch
    sizes before the file is put in place.

    --quantize int8 uses some of the run's images; overrides give their current path.

    --push uploads the result to the Hugging Face hub, in the environment's HF_TOKEN's name; without --yes it only lists
    the files. A missing repository is created as a private one.

    Examples:
      paceline export runs/photos --output photos.safetensors
      paceline export runs/photos --best --format timm --output photos-resnet50
      paceline export runs/photos --format timm --push me/photos-resnet50
      paceline export runs/photos --format onnx --output photos.onnx
      paceline export runs/photos --format folder --output photos-model
      paceline export runs/photos data.path=photos --format onnx --quantize int8 --output small.onnx
    """

    target: Target
    overrides: Annotated[Overrides, Shape(metavar="[data.KEY=VALUE]...", argument=True)] = ()
    form: Annotated[str, Shape(name="--format", choices=_phrases)] = "safetensors"
    output: Annotated[
        Path | None,
        Shape(without=("push",)),
        "The file or folder to write (default: a name made of TARGET's and the format's); missing parent folders are "
        "created.",
    ] = None
    push: Annotated[
        str | None,
        Shape(metavar="OWNER/NAME"),
        "Upload to this model repository of the Hugging Face hub, instead of --output.",
    ] = None
    yes: Annotated[bool, Shape(only="push"), "Do upload; without it --push lists the files and their sizes."] = False
    quantize: Annotated[
        Literal["int8", "bf16"] | None,
        "int8: ONNX with 8-bit integers, a quarter of the size, compared with fp32 on held-out images; bf16: half "
        "the size, for the other formats.",
    ] = None
    weights: Weights = "auto"
    best: Best = False
    trust_code: TrustCode = False

    def run(self, _: Log) -> Result:
        """Write the weights to a file or folder, or upload them."""
        if self.push is not None:
            document, lines = self._pushed(self.push)
        else:
            name = self.target.stem if self.target.is_file() else self.target.resolve().name
            usual = Path(f"{name}{formats()[self.form].ending or f'-{self.form}'}")
            document, lines = self._written(self.output or usual)
            lines += [f"  {advice}"] if (advice := formats()[self.form].advice) else []
        return Document(document=document, shown=Shown(blocks=lines))

    def _pushed(self, repository: str) -> tuple[dict[str, Any], list[str]]:
        from paceline.storage.hub import check_token, upload

        if self.yes:
            check_token()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "upload"
            ending = formats()[self.form].ending
            document, (_, *lines) = self._written(folder / f"model{ending}" if ending else folder)
            files = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
            lines = [f"{name}: {format_bytes(size)}" for name, size in files.items()] + lines
            if self.yes:
                lines.append(f"uploaded to {upload(folder, repository)}")
            else:
                lines.append(f"Nothing was uploaded: add --yes to upload these files to {repository}.")
        return document | {"output": repository, "files": files, "uploaded": self.yes}, lines

    def _written(self, output: Path) -> tuple[dict[str, Any], list[str]]:
        """Write the weights; return the facts, and lines about the output and about its comparison."""
        from paceline.checkpoint.weights import weights_sha256
        from paceline.inference.export import ExportRequest, export

        options = {key: value for key, value in vars(self).items() if key not in ("output", "push", "yes")}
        written = export(ExportRequest(output=output, **options))
        size = written.size_bytes / 2**20
        tensors = f"{len(written.saved.plain)} tensors of the {written.saved.weights} weights, {size:.1f} MiB"
        lines = [f"{output}: {tensors}{f' in {self.quantize}' if self.quantize else ''}"]
        digest = weights_sha256(written.saved.state)
        lines += [f"  {line}" for line in (*_checks(written, self.form), f"weights_sha256 {digest}")]
        document: dict[str, Any] = {
            "output": str(output),
            "format": self.form,
            "weights": written.saved.weights,
            "weights_sha256": digest,
            "bytes": written.size_bytes,
            "largest_difference": written.largest_difference,
        }
        if (trial := written.trial) is not None:
            document |= {"top1_accuracy_fp32": trial.before, "top1_accuracy": trial.after, "samples": trial.images}
            document["calibration_samples"] = trial.calibration_images
        return document, lines


def _checks(written: Exported, form: str) -> list[str]:
    """Describe the comparison in words."""
    lines = []
    if written.largest_difference is not None:
        reader, difference = formats()[form].reader, f"{written.largest_difference:.1e}"
        where = getattr(written.largest_difference, "where", "in the logits")
        lines.append(f"{reader} matches the network: largest difference {difference} {where}")
    trial = written.trial
    if trial is not None and trial.before is not None and trial.after is not None:
        lines.append(
            f"top-1 on {trial.images:,} held-out images: {trial.before:.2f} % in fp32, {trial.after:.2f} % in int8 "
            f"(ranges from {trial.calibration_images:,} training images)"
        )
    elif trial is not None:
        lines.append("not compared with fp32: no images are held out")
    return lines
