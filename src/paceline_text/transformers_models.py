"""Language models, text and token classifiers with architectures of Hugging Face Transformers.

Only the library's code is used: from a folder or a repository on the Hugging Face hub only config.json is read, and
with ``model.pretrained`` the safetensors weights; no code in it is run.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.classifier import classifier_layers
from paceline.errors import ModelError, did_you_mean
from paceline.models.adapters import PartlyNew
from paceline.models.factories import mix_in
from paceline.parsing.plain_text import load_json
from paceline.recipe.model import OPENING_OPTIONS, ModelSection
from paceline.storage.hub import model_files

PREFIX = "transformers:"
# Key of the model type among options that were kept from the start of a run: all of its configuration.
_KEPT = "_model_type"
Objective = Literal["causal", "masked", "classes", "tags"]
_LOG = logging.getLogger("paceline.weights")
WHAT = {"causal": "causal language model", "masked": "masked language model"}
WHAT |= {"classes": "text classifier", "tags": "token classifier"}

# Sizes of a tiny network, which reveals an architecture's behaviour in a few milliseconds.
_TINY = {
    **dict.fromkeys(("hidden_size", "embedding_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    "num_hidden_layers": 1,
}
# Keys of a folder's config that name code or belong to its files.
_NOT_TAKEN = frozenset({"architectures", "transformers_version", "torch_dtype", "dtype", "model_type"})
_NOT_TAKEN |= {"num_labels", "id2label", "label2id", "problem_type"}  # of the classes it was trained on
# Keys with which architectures limit the attention span of some layers.
_WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "attention_window", "window_size")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_transformers_model(model: ModelSection, *, vocabulary: int, context: int, objective: Objective) -> nn.Module:
    """Build ``transformers:NAME``, ``:FOLDER`` or ``:OWNER/NAME``, called as ``model(tokens, positions, documents)``.

    Its parameters have the library's names, so weights are compatible in both directions. Weights are initialised by
    the library's rules, from torch's generator.

    Args:
        model: The recipe's `model` section; its options are keys of the architecture's configuration.
        vocabulary: Number of tokens. A ``vocab_size`` in the options or the folder may be larger.
        context: Maximum row length in tokens.
        objective: Whether it predicts the next token or masked tokens.

    Raises:
        ModelError: If the objective has no such architecture, an option is unknown, or the library is missing.
    """
    _require()
    kind, keys = _described(model)
    config = _configured(kind, keys, objective, model)
    _fit_vocabulary(config, vocabulary, is_requested="vocab_size" in keys, model=model)
    _fit_context(config, context, requested=set(keys), name=model.name)
    # The recipe's settings may change which tokens are visible.
    switches = tuple(sorted((key, value) for key, value in keys.items() if isinstance(value, bool)))
    if objective == "causal" and _check_attention(kind, objective, switches)[0]:
        raise ModelError(
            f"model.name={model.name}: its outputs depend on later tokens, so it would see what it must predict; "
            "choose a decoder (gpt2, llama, …).",
            key="model.name",
            value=model.name,
        )
    return _as_language_model(_built(config, objective, model), objective, {_KEPT: kind, **keys})


def build_transformers_classifier(
    model: ModelSection, *, vocabulary: int, context: int, classes: int, pad: int, objective: Objective
) -> SequenceClassifier:
    """Build ``transformers:NAME``, ``:FOLDER`` or ``:OWNER/NAME`` as a classifier, called as ``model(tokens, mask)``.

    Args:
        model: The recipe's `model` section; its options are keys of the architecture's configuration.
        vocabulary: Number of tokens. A ``vocab_size`` in the options or the folder may be larger.
        context: Maximum number of tokens in a text.
        classes: Number of classes.
        pad: Token id of padding, which decoders need to find a text's end.
        objective: ``classes`` for texts, or ``tags`` for tokens.

    Raises:
        ModelError: If the architecture has no classifier, an option is unknown, or the library is missing.
    """
    _require()
    kind, keys = _described(model)
    config = _configured(kind, keys, objective, model)
    config.num_labels, config.pad_token_id = classes, pad
    _fit_vocabulary(config, vocabulary, is_requested="vocab_size" in keys, model=model)
    _fit_context(config, context, requested=set(keys), name=model.name)
    network: Any = _built(config, objective, model)
    arguments = frozenset(inspect.signature(type(network).forward).parameters)
    config_keys = {_KEPT: kind, **keys}
    mix_in([network], SequenceClassifier, arguments=arguments, objective=objective, config_keys=config_keys)
    return network  # type: ignore[no-any-return]  # its class has just been extended


def takes_documents(network: nn.Module, context: int) -> bool:
    """Whether documents in one row are isolated and get the same output as alone.

    Determined with a tiny network of the same architecture. False if attention is limited to a window shorter than the
    row, since the document mask replaces the window's. True for networks outside Transformers, whose ``model(tokens,
    positions, documents)`` promises it.
    """
    if not isinstance(network, LanguageModel):
        return True
    window = _context_length(network.config)
    return (window is None or window >= context) and _check_attention(network.config.model_type, network.objective)[1]


def _context_length(config: Any) -> int | None:
    """Return the attention span of some layers if it is shorter than the row."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    lengths = [getattr(config, key, None) for key in _WINDOWS]
    return min((each for each in lengths if isinstance(each, int) and each > 0), default=None)


class LanguageModel(nn.Module):
    """Mixed into a network's class: parameters, names and copies stay unchanged; only the call signature differs.

    Attributes:
        config: The library's configuration of the network.
        objective: Which tokens it predicts.
        arguments: Arguments of the library's class.
        positions_from: First position number if positions must be passed; else None.
        config_keys: What its configuration was made from. As ``model.options`` they give the same network without its
            folder.
    """

    config: Any
    config_keys: dict[str, Any]
    objective: Objective
    arguments: frozenset[str]
    positions_from: int | None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits of every token of the vocabulary at every position.

        Args:
            tokens: int64 [N, T].
            positions: Positions of the tokens in their documents, int64 [N, T]; None for 0 … T-1.
            documents: Document index of each token, int64 [N, T], -1 for padding; tokens attend only within their
                document. None for one document per row, without a mask.

        Returns:
            [N, T, vocabulary].
        """
        options: dict[str, Any] = {}
        if positions is None and self.positions_from is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if positions is not None and "position_ids" in self.arguments:
            options["position_ids"] = positions + (self.positions_from or 0)
        if documents is not None:
            options["attention_mask"] = self._mask(documents)
        if "use_cache" in self.arguments:
            options["use_cache"] = False
        output: Any = super().forward(input_ids=tokens, return_dict=True, **options)
        logits: Tensor = output.logits
        return logits

    def _mask(self, documents: Tensor) -> Tensor:
        """Return the attention mask, [N, 1, T, T]. Padding attends to padding, since an empty row would give NaN."""
        visible = documents[:, :, None] == documents[:, None, :]
        if self.objective == "causal":
            length = documents.shape[1]
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        visible = visible[:, None]
        if self.config._attn_implementation == "sdpa":  # noqa: SLF001  # where the library keeps its choice
            return visible
        dtype = next(self.parameters()).dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )


class SequenceClassifier(PartlyNew):
    """Mixed into a network's class: parameters, names and copies stay unchanged; only the call signature differs.

    Attributes:
        config: The library's configuration of the network.
        arguments: Arguments of the library's class.
        objective: What it classifies: texts (``classes``) or tokens (``tags``).
        config_keys: As in :class:`LanguageModel`.
    """

    config: Any
    config_keys: dict[str, Any]
    arguments: frozenset[str]
    objective: Objective

    def new_layers(self) -> list[str]:
        """Return the names of the classifier's layers, and of the pooling layers, which language models lack."""
        poolers = [name for name, each in self.named_modules() if "pooler" in name and isinstance(each, nn.Linear)]
        return list(dict.fromkeys((*poolers, *classifier_layers(self))))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of each text, [N, classes], or of each token, [N, T, classes].

        Args:
            tokens: int64 [N, T].
            mask: 1 for tokens, 0 for padding, int64 [N, T].
        """
        options = {"use_cache": False} if "use_cache" in self.arguments else {}
        output: Any = super().forward(input_ids=tokens, attention_mask=mask, return_dict=True, **options)
        logits: Tensor = output.logits
        return logits


def _require() -> None:
    try:
        import transformers
        from transformers.initialization import no_init_weights  # noqa: F401  # there from version 5 on
    except ImportError as error:
        raise ModelError(
            f"model.name={PREFIX}… needs transformers 5 or later ({error}); install it with: "
            "pip install 'paceline[transformers]'."
        ) from error
    transformers.utils.logging.set_verbosity_error()  # its advice is covered by our messages
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # it warns of a library that Transformers imports


def _folder(model: ModelSection) -> Path | None:
    """Return the folder with the network's files, downloaded if necessary; None for the name of an architecture."""
    name = model.name.removeprefix(PREFIX)
    if not ("/" in name or Path(name).expanduser().is_dir()):
        return None
    key, files = f"model.name={model.name}", ["config.json", *["model.safetensors*"] * model.pretrained]
    folder = model_files(name, key=key, files=files)
    if model.pretrained and (index := folder / "model.safetensors.index.json").is_file():
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # loading tells what is wrong
            shards = {Path(each).name for each in load_json(index.read_bytes())["weight_map"].values()}
            model_files(name, key=key, files=[*files, *sorted(shards)])
    return folder


def _described(model: ModelSection) -> tuple[str, dict[str, Any]]:
    """Return the model type and the config keys: the folder's, overridden by the recipe's."""
    options = dict(model.options)
    if _KEPT in options:
        return str(options.pop(_KEPT)), options
    if (folder := _folder(model)) is None:
        return model.name.removeprefix(PREFIX), options
    try:
        tree = load_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name={model.name}: {folder / 'config.json'} cannot be read ({error}); give a folder that "
            "save_pretrained wrote, OWNER/NAME on the Hugging Face hub, or the name of an architecture.",
            key="model.name",
            value=model.name,
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("model_type"), str):
        raise ModelError(
            f"model.name={model.name}: {folder / 'config.json'} names no model_type.",
            key="model.name",
            value=model.name,
        )
    left_out = _NOT_TAKEN | OPENING_OPTIONS
    config_tree = {key: value for key, value in tree.items() if key not in left_out and key.isidentifier()}
    commit = {"_commit_hash": folder.name} if folder.parent.name == "snapshots" else {}  # the library's own key
    return tree["model_type"], config_tree | commit | options


def _registry(objective: Objective) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    known: Mapping[Objective, Mapping[str, Any]] = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "classes": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "tags": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    return known[objective]


def _configured(kind: str, keys: Mapping[str, Any], objective: Objective, model: ModelSection) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known, name = _registry(objective), model.name
    if kind not in known:
        other: Objective = "masked" if objective == "causal" else "causal"
        if objective in ("causal", "masked") and kind in _registry(other):
            raise ModelError(
                f"model.name={name}: Transformers has {kind} for {other} language models only, and this task is "
                f"{objective}; choose another architecture (gpt2, llama, bert, …) or objective.",
                key="model.name",
                value=name,
            )
        hint = did_you_mean(kind, known)
        if kind.partition("-")[0] in CONFIG_MAPPING_NAMES and kind not in CONFIG_MAPPING_NAMES:
            hint = f" A checkpoint on the Hugging Face hub is {PREFIX}OWNER/{kind}."
        raise ModelError(
            f"model.name={name}: '{kind}' is not a {WHAT[objective]} in Transformers.{hint}",
            key="model.name",
            value=name,
        )
    default = AutoConfig.for_model(kind)
    names = {*default.to_dict(), *default.attribute_map, *inspect.signature(type(default).__init__).parameters}
    names -= {"model_type"}
    # A folder's config may have any keys, and so may one that was kept.
    unknown = [] if _KEPT in model.options else [key for key in model.options if key not in names]
    if unknown:
        raise ModelError(
            f"model.options: {unknown[0]} is not a key of {kind}'s configuration.{did_you_mean(unknown[0], names)}",
            key="model.options",
        )
    # Token ids for the library's default vocabulary are meaningless here.
    unset = {key: None for key in _SPECIAL if key not in keys and hasattr(default, key)}
    if objective == "causal" and hasattr(default, "is_decoder"):
        unset["is_decoder"] = True  # type: ignore[assignment]  # a switch among numbers
    try:
        return AutoConfig.for_model(kind, **{**unset, **keys})
    except Exception as error:  # its checks may raise anything
        raise ModelError(
            f"model.options do not fit {kind}: {' '.join(str(error).split())[:300]}", key="model.options"
        ) from error


def _fit_vocabulary(config: Any, vocabulary: int, *, is_requested: bool, model: ModelSection) -> None:
    if not hasattr(config, "vocab_size"):
        raise ModelError(
            f"model.name={model.name}: {config.model_type} has no vocab_size, so it is not a plain language model.",
            key="model.name",
            value=model.name,
        )
    # Published weights often have a few more rows than their tokenizer has tokens: Phi's 2 %, say.
    is_of_other = model.pretrained and vocabulary < 0.9 * config.vocab_size
    if is_requested and (config.vocab_size < vocabulary or is_of_other):
        fix = "set model.options.vocab_size to that or more"
        if model.pretrained:
            fix = f"use the one of these weights: data.text.tokenizer={model.name.removeprefix(PREFIX)}"
        elif "vocab_size" not in model.options:
            fix = f"use its own, data.text.tokenizer={model.name.removeprefix(PREFIX)}; without its weights, {fix}"
        raise ModelError(
            f"model.name={model.name}: it has a vocabulary of {config.vocab_size:,} tokens (vocab_size), and the "
            f"tokenizer has {vocabulary:,}; {fix}.",
            key="model.name",
            value=model.name,
        )
    if not is_requested:
        config.vocab_size = vocabulary


def _fit_context(config: Any, context: int, *, requested: set[str], name: str) -> None:
    if not hasattr(config, "max_position_embeddings"):
        return
    own = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if requested & {own, "max_position_embeddings"}:
        if config.max_position_embeddings < context:
            raise ModelError(
                f"model.name={name}: it has {config.max_position_embeddings} positions ({own}), and data.text.context "
                f"is {context}; set one of them.",
                key="model.name",
                value=name,
            )
        return
    # Some count positions from after their padding token's id.
    pad = getattr(config, "pad_token_id", None)
    with contextlib.suppress(NotImplementedError):  # for some it is not a choice: they have no limit
        config.max_position_embeddings = context + (0 if pad is None else pad + 1)


def _built(config: Any, objective: Objective, model: ModelSection) -> nn.Module:
    import transformers
    from transformers.initialization import no_init_weights

    factories = {"causal": "CausalLM", "masked": "MaskedLM"}
    factories |= {"classes": "SequenceClassification", "tags": "TokenClassification"}
    factory: Any = getattr(transformers, f"AutoModelFor{factories[objective]}")
    try:
        if model.pretrained:
            return _loaded(factory, config, model).train()
        with no_init_weights():
            try:
                network = factory.from_config(config, attn_implementation="sdpa")
            except ValueError:  # not in every architecture
                network = factory.from_config(config, attn_implementation="eager")
        # Once, at the end: on torch's meta device the library would skip it, and inside the constructor its order would
        # differ.
        network.initialize_weights()
        network.tie_weights()
    except ModelError:
        raise
    except Exception as error:  # incompatible sizes may raise anything
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(
            f"model.name={model.name} cannot be built with these model.options ({message}).",
            key="model.name",
            value=model.name,
        ) from error
    built: nn.Module = network.train()
    return built


def _loaded(factory: Any, config: Any, model: ModelSection) -> nn.Module:
    """Return a network with the weights of its folder; only a classifier may be new.

    Raises:
        ModelError: If there is no folder, or it lacks other weights.
    """
    folder = _folder(model)
    if folder is None:
        raise ModelError(
            f"model.pretrained=true has no effect with model.name={model.name}, an architecture without weights. Set "
            "model.name to transformers:FOLDER, a folder with config.json and model.safetensors, or "
            "transformers:OWNER/NAME, a repository with them on the Hugging Face hub.",
            key="model.pretrained",
            value=True,
        )
    if not any(folder.glob("model.safetensors*")):
        raise ModelError(
            f"model.pretrained=true: model.name={model.name} has no model.safetensors, and pickles are not read; "
            "choose another revision (@REVISION) or folder.",
            key="model.pretrained",
            value=True,
        )
    options = {"config": config, "dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        network, report = factory.from_pretrained(folder, attn_implementation="sdpa", **options)
    except ValueError:  # not in every architecture
        network, report = factory.from_pretrained(folder, attn_implementation="eager", **options)
    new = sorted({*report["missing_keys"], *(each[0] for each in report["mismatched_keys"])})
    # A pooling layer is missing in weights of a language model.
    lost = [name for name in new if name.startswith(f"{network.base_model_prefix}.") and "pooler" not in name]
    if lost or (new and not factory.__name__.endswith("Classification")):
        raise ModelError(
            f"model.pretrained=true: {folder} has no weights for {', '.join((lost or new)[:3])}, or of another size; "
            "choose another folder or model.options.",
            key="model.pretrained",
            value=True,
        )
    if new:
        _LOG.warning("note: model.pretrained: newly initialised: %s", ", ".join(new))
    loaded: nn.Module = network
    return loaded


def _as_language_model(network: nn.Module, objective: Objective, config_keys: dict[str, Any]) -> nn.Module:
    mix_in(
        [network],
        LanguageModel,
        objective=objective,
        arguments=frozenset(inspect.signature(type(network).forward).parameters),
        positions_from=_positions_from(network),
        config_keys=config_keys,
    )
    return network


def _positions_from(network: nn.Module) -> int | None:
    """RoBERTa-like models start after the padding token's id, and search for padding unless positions are passed."""
    for module in network.modules():
        pad: Any = getattr(module, "padding_idx", 0)
        if hasattr(module, "padding_idx") and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return 0 if pad is None else int(pad) + 1
    return None


@cache
@torch.no_grad()
def _check_attention(kind: str, objective: Objective, switches: tuple[tuple[str, bool], ...] = ()) -> tuple[bool, bool]:
    """Test a tiny network of an architecture, since its name tells neither its masking nor its ignored arguments.

    Returns:
        Whether its output depends on later tokens, and whether documents in one row get the same output as alone; False
        for both if the test failed.
    """
    from transformers import AutoConfig

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        usual = AutoConfig.for_model(kind)
        sizes = {key: value for key, value in _TINY.items() if hasattr(usual, key)}
        tokens = torch.randint(8, (1, 11))
        positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
        documents = torch.tensor([[0] * 5 + [1] * 6])
        try:
            config = _configured(kind, {**dict(switches), **sizes, "vocab_size": 8}, objective, ModelSection(name=kind))
            _fit_context(config, 16, requested=set(), name=kind)
            network = _as_language_model(_built(config, objective, ModelSection(name=kind)), objective, {}).eval()
            first, second = network(tokens[:, :5]), network(tokens[:, 5:])
            sees_ahead = not torch.allclose(network(tokens[:, :4]), first[:, :4], atol=1e-5)
        except Exception:  # noqa: BLE001  # what cannot be tried is not promised
            return False, False
        try:
            packed = network(tokens, positions, documents)
        except Exception:  # noqa: BLE001  # it knows no such masks
            return sees_ahead, False
        return sees_ahead, torch.allclose(packed, torch.cat([first, second], dim=1), atol=1e-5)
