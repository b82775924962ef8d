"""Which language model does a name stand for?"""

from __future__ import annotations

import dataclasses
import inspect

from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.models.transformer import Shape, Transformer
from paceline.models.transformers_models import PREFIX, Objective, build_transformers_model
from paceline.recipe.model import Model
from paceline.references import is_reference, load_reference

OWN_LANGUAGE_MODELS = {"gpt": True, "bert": False}
"""Our own transformers, and whether each token sees only those before it."""
_GIVEN = ("vocabulary", "context", "causal")


def build_language_model(model: Model, *, vocabulary: int, context: int, is_masked: bool = False) -> nn.Module:
    """Build the network of a recipe for tokens: ``model(tokens, positions=None, documents=None)`` gives logits.

    Args:
        model: The recipe's `model` section.
        vocabulary: Token ids are in [0, vocabulary).
        context: Most tokens in a row.
        is_masked: Whether it is asked for tokens that were hidden, and not for the next one.

    Raises:
        ModelError: If the name is unknown, or the options are not the factory's.
    """
    if model.name.startswith(PREFIX):
        objective: Objective = "masked" if is_masked else "causal"
        return build_transformers_model(model, vocabulary=vocabulary, context=context, objective=objective)
    if model.pretrained:
        raise ModelError(
            f"model.pretrained=true has no effect with model.name={model.name}: it has no published weights; "
            "model.initialize_from takes a file of yours."
        )
    if model.name in OWN_LANGUAGE_MODELS:
        return _own_transformer(model, vocabulary=vocabulary, context=context)
    if is_reference(model.name):
        return _from_factory(model, {"vocabulary": vocabulary, "context": context})
    raise ModelError(
        f"unknown language model '{model.name}'.{did_you_mean(model.name, OWN_LANGUAGE_MODELS)} It is "
        f"{', '.join(OWN_LANGUAGE_MODELS)}, transformers:NAME or package.module:factory."
    )


def is_causal(model: Model) -> bool | None:
    """Whether a network sees only what comes before; None if its name does not say."""
    return OWN_LANGUAGE_MODELS.get(model.name)


def _own_transformer(model: Model, *, vocabulary: int, context: int) -> nn.Module:
    known = [field.name for field in dataclasses.fields(Shape) if field.name not in _GIVEN]
    wrong = [name for name in model.options if name not in known]
    if wrong:
        raise ModelError(
            f"model.options {wrong} are unknown to {model.name}.{did_you_mean(wrong[0], known)} "
            f"It has {', '.join(known)}."
        )
    causal = OWN_LANGUAGE_MODELS[model.name]
    return Transformer(Shape(vocabulary=vocabulary, context=context, causal=causal, **model.options))


def _from_factory(model: Model, sizes: dict[str, int]) -> nn.Module:
    factory = load_reference(model.name, ModelError)
    try:
        parameters = inspect.signature(factory).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        given = {name: size for name, size in sizes.items() if takes_all or name in parameters}
        network = factory(**given, **model.options)
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"model.name={model.name}: the factory returned a {type(network).__name__}, not a torch.nn.Module."
        )
    return network
