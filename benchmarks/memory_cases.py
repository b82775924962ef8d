"""The steps whose memory is estimated and measured: networks, micro-batches, precisions, optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step.

    Attributes:
        model: ``model.name``.
        size: Height and width of images, in pixels.
        batch: Samples.
        precision: ``train.precision``.
        optimizer: ``optimizer.name``.
        more: Further overrides.
        source: The recipe. One other than ``synthetic`` keeps its data, and its network if ``model`` is empty.
    """

    model: str
    size: int
    batch: int
    precision: str = "fp32"
    optimizer: str = "sgd"
    more: Mapping[str, Any] | None = None
    source: str = "synthetic"

    @property
    def name(self) -> str:
        """What it is called in tables."""
        more = "".join(f", {key.rpartition('.')[2]}={value}" for key, value in (self.more or {}).items())
        if self.source != "synthetic":
            return f"{self.source} {self.model}, {self.batch} samples, {self.precision}{more}"
        return f"{self.model} {self.size}px, {self.batch} samples, {self.precision}, {self.optimizer}{more}"

    def recipe(self) -> Recipe:
        """The recipe of the step."""
        if self.source != "synthetic":
            network = {"model.name": self.model, "model.options": {}} if self.model else {}
            changes = {"batch.global_size": self.batch, "train.precision": self.precision}
            return load_recipe(self.source, {**changes, **network, **(self.more or {})}).recipe
        overrides = {
            "model.name": self.model,
            "data.image_size": self.size,
            "data.samples": 4096,
            # As many samples are scored at once as are trained on.
            "evaluate.every": "1 epochs",
            "batch.global_size": self.batch,
            "optimizer": None,
            "optimizer.name": self.optimizer,
            "optimizer.lr": 1e-4,
            "train.precision": self.precision,
            **(self.more or {}),
        }
        return load_recipe("synthetic", overrides).recipe


_MOMENTUM = {"optimizer.momentum": 0.9}

ON_CPU = (
    Case(model="small_resnet", size=32, batch=64),
    Case(model="small_resnet", size=32, batch=256, more={"train.ema": 0.99}),
    Case(model="small_resnet", size=32, batch=64, precision="bf16", optimizer="adamw"),
    Case(model="resnet18", size=64, batch=16, more=_MOMENTUM),
    Case(model="resnet18", size=64, batch=64, precision="bf16", more=_MOMENTUM),
    Case(model="resnet18", size=64, batch=16, optimizer="rmsprop"),
    Case(model="resnet50", size=64, batch=8, optimizer="adamw"),
    Case(model="resnet50", size=96, batch=16, precision="bf16", more=_MOMENTUM),
    Case(model="resnet50", size=64, batch=16, more={"model.activation_checkpointing": "full"}),
    Case(model="torchvision:mobilenet_v2", size=64, batch=16, more=_MOMENTUM),
    Case(model="efficientnet_b0", size=64, batch=16, optimizer="rmsprop", more={"train.ema": 0.99}),
    Case(model="vit_tiny_patch16_224", size=224, batch=8, optimizer="adamw"),
    Case(model="vit_tiny_patch16_224", size=224, batch=8, precision="bf16", optimizer="adamw"),
    Case(model="vit_tiny_patch16_224", size=224, batch=8, optimizer="lamb"),
    Case(model="convnext_atto", size=64, batch=16, optimizer="adamw"),
    Case(model="torchvision:vgg11", size=64, batch=4),
)

_NETWORKS = (
    *("resnet18", "resnet26", "resnext26ts", "seresnet33ts", "regnetx_002", "regnety_002", "densenet121"),
    *("mobilenetv2_100", "mobilenetv3_small_100", "mnasnet_100", "efficientnet_lite0", "ghostnet_100"),
    *("convnext_atto", "convnext_nano", "poolformer_s12", "repvgg_a0", "shufflenet_v2_x1_0", "dla34", "hardcorenas_a"),
)
_KNOWN = {"shufflenet_v2_x1_0": "torchvision:shufflenet_v2_x1_0"}

MORE_ON_CPU = (
    *(
        Case(model=_KNOWN.get(name, name), size=64, batch=8, precision=precision, optimizer=optimizer)
        for name in _NETWORKS
        for precision, optimizer in (("fp32", "sgd"), ("bf16", "adamw"))
    ),
    *(
        Case(model=name, size=64, batch=8, precision=precision, more={"model.channels_last": False})
        for name in ("resnet18", "resnet26", "mobilenetv2_100", "convnext_atto")
        for precision in ("fp32", "bf16")
    ),
    *(
        Case(source="shapes-segmentation", model=model, size=64, batch=batch, precision=precision)
        for model, batch in (("", 16), ("torchvision:deeplabv3_mobilenet_v3_large", 4), ("torchvision:fcn_resnet50", 2))
        for precision in ("fp32", "bf16")
    ),
)
"""More networks for the benchmark, small ones; half of them in 16 bits."""


def on_gpu() -> Iterator[Case]:
    """More and larger ones, for a GPU."""
    for precision in ("fp32", "bf16"):
        for model, size in (("resnet50", 224), ("vit_small_patch16_224", 224), ("convnext_tiny", 224)):
            for batch in (16, 64):
                yield Case(model=model, size=size, batch=batch, precision=precision, optimizer="adamw")
        yield Case(model="resnet50", size=224, batch=128, precision=precision, more=_MOMENTUM)
        yield Case(model="resnet18", size=64, batch=512, precision=precision, more=_MOMENTUM)
        yield Case(model="efficientnet_b0", size=224, batch=64, precision=precision, optimizer="rmsprop")
        yield Case(model="vit_base_patch16_224", size=224, batch=32, precision=precision, optimizer="lamb")
    yield Case(model="resnet50", size=224, batch=128, precision="fp16", more={**_MOMENTUM, "train.ema": 0.999})
    checkpointed = {"model.activation_checkpointing": "full"}
    yield Case(model="vit_base_patch16_224", size=224, batch=64, precision="bf16", optimizer="adamw", more=checkpointed)
    yield Case(model="resnet50", size=224, batch=128, precision="bf16", more=checkpointed)
    yield Case(model="torchvision:vgg16", size=224, batch=32, precision="bf16")
