"""`paceline import`: convert command lines of other trainers to recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from paceline.cli.output import echo, print_json
from paceline.command import Shape, command
from paceline.errors import RecipeError
from paceline.parsing.files import refuse_special_outputs

if TYPE_CHECKING:
    from paceline_ops.imports.draft import Conversion


@command("import", group="More", place=3)
@dataclass(frozen=True, kw_only=True)
class Import:
    """Convert a command line of timm's or NVIDIA's trainer into a recipe.

    The trainers are timm's train.py and NVIDIA's of ConvNets.

    SOURCE is a file with its command, or the command after --. For timm it may be an args.yaml that train.py wrote;
    defaults of train.py are converted too, and written out. For NVIDIA, the presets of launch.py are supported: model,
    mode, precision and platform choose one.

    \b
    Every option ends in one of three places:
      mapped to recipe keys;
      listed, because it has no effect here;
      refused by name, because it would change the result and is unsupported (exit code 2, unless --skip names it).

    Without --output the recipe goes to standard output and the report to standard error.

    Examples:
      paceline import timm output/train/20261122-resnet50-224/args.yaml --processes 8 --output recipe.yaml
      paceline import timm --output recipe.yaml -- ./distributed_train.sh 4 --data-dir /imagenet --model seresnet34
      paceline import timm train.sh --skip aug-splits > recipe.yaml
      paceline import nvidia DGXA100_resnet50_AMP_90E.sh --output recipe.yaml
      paceline import nvidia -- python ./multiproc.py --nproc_per_node 8 ./main.py --arch resnet50 --amp /imagenet
      paceline import nvidia --processes 8 -- launch.py --model resnet50 --precision AMP --mode convergence
          --platform DGXA100 /imagenet
    """

    trainer: Literal["timm", "nvidia"]
    source: Annotated[tuple[str, ...], Shape(metavar="SOURCE|-- COMMAND...", argument=True)]
    output: Annotated[Path | None, Shape(metavar="FILE"), "Write the recipe here."] = None
    overwrite: Annotated[bool, "Overwrite an existing file."] = False
    processes: Annotated[
        int | None, Ge(1), "Number of processes, if the source does not give it; they share the global batch."
    ] = None
    skip: Annotated[tuple[str, ...], Shape(metavar="OPTION", repeatable=True), "Ignore this option (repeatable)."] = ()

    def _convert(self) -> Conversion:
        if self.trainer == "nvidia":
            from paceline_ops.imports.nvidia import convert_nvidia, read_nvidia

            return convert_nvidia(*read_nvidia(self.source), processes=self.processes, skipped=self.skip)
        from paceline_ops.imports.timm import InputSettings, convert_timm, read_timm
        from paceline_ops.published import published_settings

        options, arguments = read_timm(self.source)
        name = str(arguments.get("model", "resnet50"))
        settings = published_settings(name)
        if settings is None:
            echo(f"Note: the installed timm has no network {name}; its image settings are not known.", err=True)
        return convert_timm(
            options, arguments, InputSettings(**settings or {}), processes=self.processes, skipped=self.skip
        )

    def stream(self, *, as_json: bool) -> int:
        """Write the recipe and report on the conversion.

        Raises:
            RecipeError: If an option is refused, or the file exists.
        """
        from paceline_ops.imports.draft import refusal, shown_value

        conversion, output = self._convert(), self.output
        if conversion.refused:
            raise refusal(conversion)
        if output is not None:
            refuse_special_outputs(output)
            if output.exists() and not self.overwrite:
                raise RecipeError(f"{output} exists already; choose another --output, or add --overwrite.")
            try:
                output.write_text(conversion.to_yaml(), encoding="utf-8")
            except OSError as error:
                raise RecipeError(f"{output} cannot be written: {error.strerror}.") from None
        if as_json:
            print_json({**conversion.to_json(), "output": None if output is None else str(output)})
            return 0
        if output is None:
            echo(conversion.to_yaml(), nl=False)
        lines: list[str] = []
        for outcome, title in (("mapped", "Mapped"), ("listed", "No effect here")):
            entries = [each for each in conversion.entries if each.outcome == outcome]
            lines += [f"{title}: {len(entries)}"] if entries else []
            typed = [
                each.option if each.value is True else f"{each.option} {shown_value(each.value)}" for each in entries
            ]
            width = min(max(map(len, typed), default=0), 40)
            lines += [f"  {words:<{width}}  {each.reason}" for words, each in zip(typed, entries, strict=True)]
        lines += [f"Not identical: {len(conversion.differences)}"] if conversion.differences else []
        lines += [f"  {option}: {says}" for option, says in conversion.differences]
        lines += [f"Left out: {name}" for name in conversion.left_out]
        lines += [f"Note: {notice}" for notice in conversion.notices]
        # Standard output carries the recipe, which may be redirected to a file.
        echo("\n".join(lines), err=output is None)
        if output is not None:
            echo(f"Wrote {output}: paceline train {output} --plan-only shows its plan.")
        return 0
