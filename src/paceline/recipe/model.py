"""The recipe's `model` section with its adapters: which network, from which weights, how it lies in memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.plain_yaml import as_switch
from paceline.recipe.fields import (
    STRICT,
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
)
from paceline.references import is_reference

OPENING_OPTIONS = frozenset(
    # timm's, torchvision's, Transformers'
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path", "cache_dir"}
    | {"weights", "weights_backbone", "pretrained_backbone"}
    | {"auto_map", "_name_or_path", "name_or_path", "quantization_config"}
    | {f"{start}{what}_implementation" for start in ("", "_") for what in ("attn", "experts")}
)
"""Arguments of the libraries' factories that open or fetch other files, some of which could run code."""

# What it was before there was a choice.
_Full = BeforeValidator(lambda value: "full" if as_switch(value) is True else value)
_GROUPED = Needs(
    ("several groups in a micro-batch",),
    "no micro-batch has more than {largest_micro_batch} samples: each is one group anyway",
)
_ADAPTED = Needs(("model.adapters.rank",), "there are no adapters (model.adapters.rank)")
_Rank = Annotated[PositiveInt, Field(le=65_536)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adapters:
    """Low-rank adapters (Hu et al. 2021): only they and the classifier are trained."""

    rank: Annotated[_Rank | None, Off] = None
    """Rank of the matrices beside a layer's weights, or `off`. An output layer that shares the embedding's weights
    stays frozen and gets none; transposed linear layers (GPT-2's `Conv1D`) count as linear ones."""
    alpha: Annotated[PositiveFloat, _ADAPTED] = 16.0
    """What they compute is multiplied by this over `rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), _ADAPTED] = ("*",)
    """Shell patterns of layers that get them: linear ones and convolutions, but for the classifier."""
    dropout: Annotated[OpenFraction, _ADAPTED] = 0.0
    """Share of an adapter's input that is dropped in training."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Model:
    """Which network is trained."""

    name: str = "small_resnet"
    """`small_resnet`, `speed_net`, a timm name, `torchvision:NAME`, of language models `gpt`, `bert`,
    `transformers:NAME` (an architecture of Hugging Face Transformers: gpt2, bert, llama, …) or `transformers:FOLDER`
    (with a config.json), or `package.module:factory`."""
    # Earlier versions stored it as false with every run.
    pretrained: Annotated[Switch, Applies("initialize_from", (None,), also_off=False)] = False
    """Start from the library's published weights."""
    initialize_from: Annotated[LocalPath | None, Off] = None
    """Start a new run from these weights: a safetensors file, a checkpoint, a run directory or a hub folder."""
    initialize_partly: Annotated[
        Switch, Needs(("model.initialize_from",), "there is nothing to take (model.initialize_from)")
    ] = False
    """Take from `initialize_from` the tensors whose names and shapes fit, and leave the others as they begin: another
    number of classes, say. The run says which."""
    frozen: tuple[str, ...] = ()
    """Shell patterns of parameters that are not trained. A later one wins, and `!` takes back: ["*", "!fc.*"] trains
    the classifier alone. Norms without a trained parameter keep their statistics too."""
    unfreeze: dict[str, Length] = Field(default_factory=dict)
    """Patterns of frozen parameters that are trained after all, and after how long, by the earliest that matches:
    {"layer4.*": "2 epochs", "*": "4 epochs"}."""
    freeze_after: dict[str, Length] = Field(default_factory=dict)
    """Patterns of parameters that are trained only so long, by the latest that matches, and then stay as they are:
    {"whitening.bias": "3 epochs"}. What they would have cost is saved (after Brock et al. 2017)."""
    adapters: Adapters = Adapters()
    """Low-rank matrices that are trained instead of the network's own weights."""
    activation_checkpointing: Annotated[Literal["full", "selective"] | None, Off, _Full] = None
    """Keep fewer activations for the backward pass and compute them again, block by block: less memory, more time (Chen
    et al. 2016). `full` keeps each block's input, `selective` what its matrix products and convolutions come to;
    `true` is `full`; or `off`."""
    ghost_batch_norm: Annotated[PositiveInt | None, Field(ge=2), Off, _GROUPED] = None
    """Have BatchNorm normalise by groups of so many samples inside a micro-batch, which they must divide (ghost batch
    normalisation, Hoffer et al. 2017), or `off`."""
    channels_last: Auto | Switch = "auto"
    """Keep images and filters with the channel as the fastest axis; those of `Conv1d` and `Conv3d` stay as they are."""
    compile: Switch = False
    """Compile the network with torch.compile, for training and evaluation; before the first step its gradient is
    compared with the network's own, and both are timed."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], Applies("compile", (True,))
    ] = "default"
    """inductor's: `reduce-overhead` and `max-autotune` record CUDA graphs, the latter two time kernels and take the
    fastest."""
    compile_backend: Annotated[str, Applies("compile", (True,))] = "inductor"
    """`inductor`, or another back-end that torch knows: `aot_eager` tells a fault of inductor's from one of tracing."""
    options: Annotated[Options, Belongs("name")] = Field(default_factory=dict)
    """Keyword arguments for the network's factory, e.g. `drop_rate`; none that open other files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        opening = sorted(OPENING_OPTIONS & self.options.keys())
        if opening and not is_reference(self.name):
            raise ValueError(
                f"found options.{opening[0]}, which makes the factory open other files, but weights come from "
                "model.initialize_from or model.pretrained alone"
            )
        return self
