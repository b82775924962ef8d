"""Image networks by their recipe names, their memory format, and timm's preprocessing settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args, get_type_hints
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import nn

from paceline.errors import ModelError, StorageError, did_you_mean
from paceline.models.factories import (
    BACKBONE_WEIGHTS,
    TORCHVISION,
    call_factory,
    named_factory,
    no_weights,
    unknown_model,
)
from paceline.models.lecture_net import lecture_net
from paceline.models.small_resnet import small_resnet
from paceline.models.speed_net import speed_net
from paceline.models.transfer import zero_classifier
from paceline.parsing.plain_text import load_json
from paceline.plugins.loading import without_compiler
from paceline.plugins.registry import installed, load
from paceline.recipe.model import OPENING_OPTIONS, ModelSection
from paceline.storage.hub import limited_waits, repository_copy

OWN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_resnet": small_resnet,
    "speed_net": speed_net,
    "lecture_net": lecture_net,
}
HUB = "hf-hub:"
# From this side on, in pixels, images are large enough for the strides of published networks.
_LARGE_SIDE = 96
_HUB_CONFIG = "config.json"
_HUB_SECONDS = 3.0  # a slower answer from the hub is treated as none
# File names of weights on the hub, most common first.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_BLOCK = 16  # maximum number of channels that oneDNN computes at once


@without_compiler()
def build_model(model: ModelSection, *, num_classes: int, in_channels: int) -> nn.Module:
    """Build the recipe's network for the given data.

    Args:
        model: The recipe's `model` section.
        num_classes: Width of the output.
        in_channels: Channels of the input images.

    Raises:
        ModelError: If the name is unknown (the nearest ones are named), the factory does not accept the options, or
            requested pretrained weights are not available.
    """
    if factory := named_factory(model, OWN_MODELS):
        return call_factory(model, factory, num_classes=num_classes, in_channels=in_channels)
    make = _torchvision if model.name.startswith(TORCHVISION) else _timm
    try:
        return make(model, num_classes=num_classes, in_channels=in_channels)
    except (AssertionError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.name={model.name}: model.options {model.options} do not fit: {str(error) or type(error).__name__}."
        ) from error


def takes_usual_size(network: nn.Module, side: int) -> bool:
    """Whether a published network surely takes square images of this size: large ones, or those it was made for."""
    config = getattr(network, "pretrained_cfg", None) or {}
    fixed = config["input_size"][-1] if config.get("fixed_input_size") else getattr(network, "image_size", side)
    return side >= _LARGE_SIDE and side == fixed


@torch.no_grad()
def check_accepts(network: nn.Module, size: int | tuple[int, int], *, channels: int, name: str) -> Any:
    """Check that a network accepts images of a size, or of a height and width; return its output for a blank one.

    Raises:
        ModelError: If it does not; the message says what to change.
    """
    height, width = (size, size) if isinstance(size, int) else size
    try:
        # A custom network may write to its buffers even in evaluation mode, or draw random numbers.
        copied = copy.deepcopy(network, {id(each): each for each in network.parameters()})
        with torch.random.fork_rng(devices=[]):
            return copied.eval()(torch.zeros(1, channels, height, width))
    except Exception as error:  # a custom network may raise anything
        if torch.are_deterministic_algorithms_enabled() and "deterministic implementation" in str(error):
            raise ModelError(f"train.deterministic=true: {' '.join(str(error).split())[:300]}") from error
        size_text = f"{height}" if height == width else f"{height}x{width}"
        raise ModelError(
            f"the network {type(network).__name__} (model.name={name}) does not take images of {size_text} pixels "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
            f"{_how_to_take_any_size(network)}, or see data.image_size, data.evaluation_size, data.evaluation_shape "
            "and data.progressive."
        ) from error


def _how_to_take_any_size(network: nn.Module) -> str:
    """Suggest how a network could accept other image sizes."""
    if hasattr(getattr(network, "patch_embed", None), "dynamic_img_pad"):  # timm's transformers
        if hasattr(network, "pos_embed"):
            return "timm's vision transformers do with model.options={dynamic_img_size: true}"
        return "some of timm's transformers do with model.options={strict_img_size: false}"
    if any(isinstance(module, nn.MultiheadAttention) for module in network.modules()):
        return (
            "transformers that interpolate their positions do, such as timm's with "
            "model.options={dynamic_img_size: true}"
        )
    return "convolutional networks do with global average pooling (nn.AdaptiveAvgPool2d(1)) before the classifier"


def model_names(pattern: str = "*") -> list[str]:
    """Return all known names that match a shell pattern; imports timm and torchvision."""
    import fnmatch

    import timm
    import torchvision.models

    names = [
        *OWN_MODELS,
        *chain.from_iterable(load("models", family, ModelError)() for family in installed("models")),
        *timm.list_models(),
        *(f"{TORCHVISION}{name}" for name in torchvision.models.list_models(module=torchvision.models)),
    ]
    glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatch(name, glob)]


def why_no_weights(name: str) -> str:
    """Explain why the pretrained weights of a timm network are not available; empty if they are, or may be.

    Looks in the local cache, then once, for a few seconds, on the hub. The hub's client would retry a dozen times.
    """
    import timm
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

    known = timm.get_pretrained_cfg(name)
    if known is None or not known.has_weights:
        return f"timm has no published weights of {name}"
    hub = known.hf_hub_id
    names = filter(None, (known.hf_hub_filename, *_WEIGHTS))
    if hub is None or any(isinstance(try_to_load_from_cache(hub, name), str) for name in names):
        return ""
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            urlopen(Request(hf_hub_url(hub, _WEIGHTS[0]), method="HEAD"), timeout=_HUB_SECONDS).close()
        except HTTPError:
            return ""  # the hub is reachable; a file missing under this name may exist under another
        except OSError as error:
            why = f"the hub does not answer: {getattr(error, 'reason', error)}"
        else:
            return ""
    return f"the published weights of {name} are not on this machine ({why})"


def check_published(model: ModelSection) -> bool:
    """Check, without a download, that published weights can be loaded; False if only loading them can tell.

    Raises:
        ModelError: If they are neither on this machine nor within reach, or cannot be used.
    """
    import timm

    if model.pretrained and model.name.startswith(TORCHVISION):
        return _is_downloadable(model)
    is_known = timm.is_model(model.name)
    if model.pretrained and is_known and (why := why_no_weights(model.name)):
        raise no_weights(model, why)
    return is_known


def _is_downloadable(model: ModelSection) -> bool:
    """Whether the published weights of a torchvision network, or of its backbone, are not here, but within reach."""
    from torchvision.models import get_model_builder, get_model_weights

    name = model.name.removeprefix(TORCHVISION)
    if backbone := get_args(get_type_hints(get_model_builder(name)).get("weights_backbone")):
        address = backbone[0][BACKBONE_WEIGHTS.get(name, "DEFAULT")].url
    else:
        with torch.device("meta"):
            _replace_head(get_model_builder(name)(**model.options), 1000, model.name)
        address = get_model_weights(name)["DEFAULT"].url
    if (Path(torch.hub.get_dir()) / "checkpoints" / Path(address).name).exists():
        return False
    try:
        urlopen(Request(address, method="HEAD"), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True


def parameter_count(network: nn.Module) -> int:
    """Count trainable parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def _timm(model: ModelSection, *, num_classes: int, in_channels: int) -> nn.Module:
    import timm

    name = model.name
    if name.startswith(HUB):
        name = f"local-dir:{hub_network(model)[0]}"
    elif not timm.is_model(name):
        names = "small_resnet, a timm name, hf-hub:OWNER/NAME, torchvision:NAME or package.module:factory"
        hint = f"It is {names}; `paceline models PATTERN` lists them."
        raise unknown_model(model, "model", [*OWN_MODELS, *timm.list_models()], hint)
    if unset := [name for name, value in model.options.items() if value is None]:
        raise ModelError(
            f"model.options.{unset[0]}=null has no effect: timm leaves out options without a value; give one, or "
            "leave it out."
        )
    check_published(model)
    try:
        with limited_waits() if model.pretrained else nullcontext():
            network: nn.Module = timm.create_model(
                name, pretrained=model.pretrained, num_classes=num_classes, in_chans=in_channels, **model.options
            )
    except Exception as error:
        if model.pretrained and isinstance(error, OSError | RuntimeError | StorageError):
            raise no_weights(model, error) from error
        if not model.options:
            raise
        # A network may raise anything for invalid values, and a foreign folder may contain some.
        raise ModelError(
            f"model.name={model.name}: model.options {model.options} do not fit: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}."
        ) from error
    if model.pretrained and num_classes != getattr(network, "pretrained_cfg", {}).get("num_classes"):
        zero_classifier(network)
    return network


def hub_network(model: ModelSection) -> tuple[Path, str, dict[str, Any]]:
    """Return the local copy of ``model.name=hf-hub:OWNER/NAME``, and its network's name in timm and options.

    The library's cache is used before the hub. Only config.json is fetched, and model.safetensors for
    ``model.pretrained``.

    Raises:
        StorageError: If it is in neither.
        ModelError: If it is not a network of timm, or has no such weights.
    """
    import timm

    files = [_HUB_CONFIG, _WEIGHTS[0]] if model.pretrained else [_HUB_CONFIG]
    folder = repository_copy(model.name.removeprefix(HUB), key="model.name", files=files)
    if missing := [each for each in files if not (folder / each).is_file()]:
        raise ModelError(
            f"model.name={model.name} has no {missing[0]}; only networks in timm's layout can be read, with their "
            "weights as safetensors."
        )
    try:
        config = load_json((folder / _HUB_CONFIG).read_bytes())
        name, options = str(config["architecture"]), dict(config.get("model_args") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model.name={model.name}: its {_HUB_CONFIG} is not in timm's format ({type(error).__name__}: {error})."
        ) from error
    if not timm.is_model(name):
        raise ModelError(f"model.name={model.name}: its network '{name}' is not in this timm ({timm.__version__}).")
    if opening := sorted(OPENING_OPTIONS & options.keys()):
        raise ModelError(
            f"model.name={model.name}: model_args of its {_HUB_CONFIG} has {opening[0]}, which opens files."
        )
    return folder, name, options


def _torchvision(model: ModelSection, *, num_classes: int, in_channels: int) -> nn.Module:
    import torchvision.models

    name = model.name.removeprefix(TORCHVISION)
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise ModelError(f"unknown torchvision model '{name}'.{did_you_mean(name, known)}")
    network: nn.Module
    if not model.pretrained:
        network = torchvision.models.get_model(name, num_classes=num_classes, **model.options)
    else:
        try:
            with limited_waits():
                network = torchvision.models.get_model(name, weights="DEFAULT", **model.options)
        except (EOFError, OSError, RuntimeError, UnpicklingError, StorageError) as error:
            raise no_weights(model, error) from error
        _replace_head(network, num_classes, model.name)
    if getattr(network, "aux_logits", False):  # of GoogLeNet and Inception, which in training would return a tuple
        if "aux_logits" in model.options:
            raise ModelError(f"model.options.aux_logits=true has no effect on {model.name}; leave it out.")
        for path in ("aux_logits", "aux1", "aux2", "AuxLogits"):
            setattr(network, path, None)
    if in_channels != 3:
        _replace_stem(network, in_channels, model.name)
    return network


def _replace_head(network: nn.Module, num_classes: int, name: str) -> None:
    heads = [(path, m) for path, m in network.named_modules() if isinstance(m, nn.Linear) and m.out_features == 1000]
    if not heads:
        raise ModelError(f"model.name={name} has no linear classifier to replace; use the timm version of it.")
    path, head = heads[-1]
    if head.out_features != num_classes:
        network.set_submodule(path, nn.Linear(head.in_features, num_classes, bias=head.bias is not None))


def _replace_stem(network: nn.Module, in_channels: int, name: str) -> None:
    stems = [(path, m) for path, m in network.named_modules() if isinstance(m, nn.Conv2d)]
    if not stems or stems[0][1].in_channels != 3:
        raise ModelError(f"model.name={name} cannot take {in_channels} channels; set data.channels=3.")
    path, stem = stems[0]
    if in_channels % stem.groups:
        raise ModelError(
            f"model.name={name} takes its channels in {stem.groups} groups, which {in_channels} cannot form; set "
            "data.channels=3."
        )
    same = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    options: dict[str, Any] = {each: getattr(stem, each) for each in same}
    network.set_submodule(path, nn.Conv2d(in_channels, stem.out_channels, **options, bias=stem.bias is not None))


def to_memory_format(network: nn.Module, *, channels_last: bool) -> nn.Module:
    """Convert the filters of images to the batches' memory format, in place.

    torch supports channels-last for four-dimensional tensors; others, such as those of Conv3d, stay unchanged. So do
    those of :func:`overrunning`.
    """
    if not channels_last:
        return network.to(memory_format=torch.contiguous_format)
    unsafe = overrunning(network)
    kept = {id(each.weight) for each in unsafe}
    for each in unsafe:
        each.register_forward_pre_hook(_contiguous)
    for tensor in chain(network.parameters(), network.buffers()):
        if tensor.ndim == 4 and id(tensor) not in kept:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return network


def _contiguous(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    # `contiguous` returns images of one channel unchanged: torch takes their strides for those of both formats.
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)


def overrunning(network: nn.Module) -> list[nn.Conv2d]:
    """Return the convolutions on a CPU that must not be channels last.

    In their backward pass oneDNN would write past its workspace (uxlfoundation/oneDNN#6035).
    """
    strided = (each for each in network.modules() if isinstance(each, nn.Conv2d) and max(each.stride) > 1)
    narrow = (each for each in strided if each.in_channels // each.groups < _BLOCK and each.kernel_size == (1, 1))
    return [each for each in narrow if each.weight.device.type == "cpu"]
