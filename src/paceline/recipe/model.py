"""The recipe's `model` section with its adapters: which network, from which weights, and its memory layout."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline.parsing.plain_yaml import to_boolean
from paceline.plugins.references import is_reference
from paceline.recipe.fields import (
    Applies,
    Auto,
    Belongs,
    Length,
    LocalPath,
    Needs,
    Off,
    OpenFraction,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
    section,
)

OPENING_OPTIONS = frozenset(
    # timm's, torchvision's, Transformers'
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir"}
    | {"weights", "weights_backbone", "pretrained_backbone"}
    | {"auto_map", "_name_or_path", "name_or_path", "quantization_config"}
    | {f"{start}{what}_implementation" for start in ("", "_") for what in ("attn", "experts")}
)
"""Arguments of the libraries' factories that open or fetch other files, some of which could run code."""

# The default before there was a choice.
_Full = BeforeValidator(lambda value: "full" if to_boolean(value) is True else value)
_GROUPED = Needs(
    ("several groups in a micro-batch",),
    "no micro-batch has more than {largest_micro_batch} samples: each is one group anyway",
)
_ADAPTED = Needs(("model.adapters.rank",), "there are no adapters (model.adapters.rank)")
_Rank = Annotated[PositiveInt, Field(le=65_536)]


@section
class Adapters:
    """Low-rank adapters (Hu et al. 2021): only they and the classifier are trained."""

    rank: Annotated[_Rank | None, Off] = None
    """Rank of the matrices added to a layer's weights, or `off`. An output layer that shares the embedding's weights
    stays frozen and gets none; transposed linear layers (GPT-2's `Conv1D`) count as linear ones."""
    alpha: Annotated[PositiveFloat, _ADAPTED] = 16.0
    """Their output is multiplied by this over `rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), _ADAPTED] = ("*",)
    """Shell patterns of the layers that get them: linear ones and convolutions, except the classifier. They match whole
    names or, as in peft, their ends: `query` is `*.query`, too."""
    dropout: Annotated[OpenFraction, _ADAPTED] = 0.0
    """Share of an adapter's input that is dropped in training."""


@section
class ModelSection:
    """Which network is trained."""

    name: str = "small_resnet"
    """`small_resnet`, `speed_net`, a timm name, `hf-hub:OWNER/NAME` (a network of timm on the Hugging Face hub),
    `torchvision:NAME`, for language models `gpt`, `bert`, `transformers:NAME` (an architecture of Hugging Face
    Transformers: gpt2, bert, llama, …), `transformers:FOLDER` (with a config.json) or `transformers:OWNER/NAME` (on the
    hub), or `package.module:factory`."""
    # False is accepted with `initialize_from`: it turns off what a recipe file turned on.
    pretrained: Annotated[Switch, Applies("initialize_from", (None,), also_off=False)] = False
    """Start from the library's published weights; with `transformers:FOLDER` or `OWNER/NAME`, from those there."""
    initialize_from: Annotated[LocalPath | None, Off] = None
    """Start a new run from these weights: a safetensors file, a checkpoint, a run directory or a hub folder."""
    initialize_partly: Annotated[
        Switch, Needs(("model.initialize_from",), "there is nothing to take (model.initialize_from)")
    ] = False
    """Load from `initialize_from` only tensors whose names and shapes match, and keep the initial values of the others:
    for another number of classes, say. The run lists them."""
    frozen: tuple[str, ...] = ()
    """Shell patterns of parameters that are not trained. A later one wins, and `!` excludes: ["*", "!fc.*"] trains only
    the classifier. Norms and spectral norms without a trained parameter keep their statistics."""
    unfreeze: dict[str, Length] = Field(default_factory=dict)
    """Patterns of frozen parameters and when their training starts; the earliest match counts:
    {"layer4.*": "2 epochs", "*": "4 epochs"}."""
    freeze_after: dict[str, Length] = Field(default_factory=dict)
    """Patterns of parameters and when their training ends; the latest match counts: {"whitening.bias": "3 epochs"}.
    This saves their training cost (after Brock et al. 2017)."""
    adapters: Adapters = Adapters()
    """Low-rank matrices to train instead of the network's own weights."""
    activation_checkpointing: Annotated[Literal["full", "selective"] | None, Off, _Full] = None
    """Keep fewer activations for the backward pass and compute them again, block by block: less memory, more time (Chen
    et al. 2016). `full` keeps each block's input, `selective` the results of matrix products and convolutions; `true`
    is `full`; or `off`."""
    ghost_batch_norm: Annotated[PositiveInt | None, Field(ge=2), Off, _GROUPED] = None
    """Let BatchNorm normalise groups of this many samples, a divisor of the micro-batch (ghost batch
    normalisation, Hoffer et al. 2017), or `off`."""
    channels_last: Auto | Switch = "auto"
    """Use the channels-last memory format for images and filters; those of `Conv1d` and `Conv3d` keep theirs."""
    compile: Switch = False
    """Compile the network with torch.compile, for training and evaluation; before the first step its gradient is
    compared with the uncompiled network's, and both are timed."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], Applies("compile", (True,))
    ] = "default"
    """inductor's: `reduce-overhead` and `max-autotune` record CUDA graphs, the latter two benchmark kernels and use the
    fastest."""
    compile_backend: Annotated[str, Applies("compile", (True,))] = "inductor"
    """`inductor`, or another torch back-end: `aot_eager` separates inductor faults from tracing faults."""
    options: Annotated[Options, Belongs("name")] = Field(default_factory=dict)
    """Keyword arguments for the network's factory, such as `drop_rate`, but none that open other files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        opening = sorted(OPENING_OPTIONS & self.options.keys())
        if opening and not is_reference(self.name):
            raise ValueError(
                f"found options.{opening[0]}, which makes the factory open other files, but weights come from "
                "model.initialize_from or model.pretrained alone"
            )
        return self
