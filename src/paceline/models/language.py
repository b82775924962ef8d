"""Language models by their names in recipes."""

from __future__ import annotations

from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.models.factories import call_factory, named_factory
from paceline.models.transformer import transformer
from paceline.models.transformers_models import PREFIX, Objective, build_transformers_model
from paceline.recipe.model import Model

OWN_LANGUAGE_MODELS = {"gpt": True, "bert": False}
"""Our own transformers, and whether each token sees only those before it."""


def build_language_model(model: Model, *, vocabulary: int, context: int, is_masked: bool = False) -> nn.Module:
    """Build the network of a recipe for tokens: ``model(tokens, positions=None, documents=None)`` gives logits.

    Args:
        model: The recipe's `model` section.
        vocabulary: Token ids are in [0, vocabulary).
        context: Most tokens in a row.
        is_masked: Whether it predicts hidden tokens, and not the next one.

    Raises:
        ModelError: If the name is unknown, or the options are not the factory's.
    """
    if model.name.startswith(PREFIX):
        objective: Objective = "masked" if is_masked else "causal"
        return build_transformers_model(model, vocabulary=vocabulary, context=context, objective=objective)
    sizes = {"vocabulary": vocabulary, "context": context}
    if model.name in OWN_LANGUAGE_MODELS:
        sizes["causal"] = OWN_LANGUAGE_MODELS[model.name]
    factory = named_factory(model, dict.fromkeys(OWN_LANGUAGE_MODELS, transformer))
    if factory is None:
        raise ModelError(
            f"unknown language model '{model.name}'.{did_you_mean(model.name, OWN_LANGUAGE_MODELS)} It is "
            f"{', '.join(OWN_LANGUAGE_MODELS)}, transformers:NAME or package.module:factory."
        )
    return call_factory(model, factory, **sizes)


def is_causal(model: Model) -> bool | None:
    """Whether a network sees only what comes before; None if its name does not say."""
    return OWN_LANGUAGE_MODELS.get(model.name)
