"""Find the classifier of a network: the last layers, newly initialised for other classes."""

from __future__ import annotations

from torch import nn

# The known places of torchvision's detectors, of which no single layer is the last.
_OF_DETECTORS = ("roi_heads.box_predictor", "roi_heads.mask_predictor", "head.classification_head.cls_logits")


def classifier_layers(network: nn.Module) -> list[str]:
    """Return the names of the modules that are the classifier, in the network's order; empty if there is none.

    It is the network's own answer (``get_classifier``, as in timm), what Transformers adds to its base model, a
    detector's predictors, or else the last linear layer, as in torchvision's networks.
    """
    said: object = getattr(network, "get_classifier", lambda: None)()
    heads = said if isinstance(said, tuple | list) else (said,)
    modules = {name: module for name, module in network.named_modules() if name}
    found = [
        name
        for name, module in modules.items()
        if any(module is each for each in heads) and next(module.parameters(), None) is not None
    ]
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return found or _beside_base(network, linear) or [name for name in _OF_DETECTORS if name in modules] or linear[-1:]


def _beside_base(network: nn.Module, linear: list[str]) -> list[str]:
    """The linear layers of a network of Transformers that are not in its base model, wherever it is in another one."""
    for name, module in network.named_modules():
        base = getattr(module, "base_model_prefix", "")
        if isinstance(base, str) and base and isinstance(getattr(module, base, None), nn.Module):
            prefix = f"{name}." if name else ""
            return [each for each in linear if each.startswith(prefix) and not each.startswith(f"{prefix}{base}.")]
    return []
