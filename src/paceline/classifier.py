"""Find the classifier of a network: the last layers, which are newly initialised for other classes."""

from __future__ import annotations

from torch import nn

# Known classifiers of torchvision's detectors, which do not have a single last layer.
_DETECTOR_HEADS = ("roi_heads.box_predictor", "roi_heads.mask_predictor", "head.classification_head.cls_logits")


def classifier_layers(network: nn.Module) -> list[str]:
    """Return the names of the classifier's modules, in the network's order; empty if there is none.

    The classifier is given by the network's ``get_classifier``, as in timm; the layers that Transformers adds to its
    base model; a detector's predictors; or else the last linear layer, as in torchvision's networks.
    """
    classifier: object = getattr(network, "get_classifier", lambda: None)()
    heads = classifier if isinstance(classifier, tuple | list) else (classifier,)
    modules = {name: module for name, module in network.named_modules() if name}
    names = [
        name
        for name, module in modules.items()
        if any(module is each for each in heads) and next(module.parameters(), None) is not None
    ]
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return (
        names
        or _outside_base_model(network, linear)
        or [name for name in _DETECTOR_HEADS if name in modules]
        or linear[-1:]
    )


def _outside_base_model(network: nn.Module, linear: list[str]) -> list[str]:
    """Return the linear layers of a Transformers network outside of its base model, wherever it is nested."""
    for name, module in network.named_modules():
        base = getattr(module, "base_model_prefix", "")
        if isinstance(base, str) and base and isinstance(getattr(module, base, None), nn.Module):
            prefix = f"{name}." if name else ""
            return [each for each in linear if each.startswith(prefix) and not each.startswith(f"{prefix}{base}.")]
    return []
