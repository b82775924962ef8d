"""Load a recipe by its shipped name or path, with one level of `base` and dotted overrides."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.files import refuse_archive, special_kind
from paceline.parsing.plain_yaml import MAX_DEPTH, PlainDumper, load_plain, load_whole, yaml_line
from paceline.plugins.dataset_registry import Place, dataset_at, entries
from paceline.plugins.registry import Kind, name_problem
from paceline.recipe import layers
from paceline.recipe.fields import plain
from paceline.recipe.layers import with_new_names
from paceline.recipe.schema import CODE_KEYS, TRAINING_CODE_KEYS, Recipe, is_stored, refuse_foreign_code
from paceline.recipe.training import CLASSIFIER
from paceline.storage.addresses import is_address, parse_address

_MIRROR = "checkpoint.mirror"
_MAX_SHOWN = 60
_FOUND = "a shipped recipe, a file or a run directory"
_LONG = 5  # letters
_ENDINGS = (".yaml", ".yml")
SHIPPED = Path(__file__).parent.parent / "recipes"
_RECIPE: TypeAdapter[Recipe] = TypeAdapter(Recipe)
Overrides = Mapping[str, Any] | Sequence[str]

OWN_LOOP = "own_loop"
"""The task of a run whose loop is a program's own (``paceline.Loop``)."""
_OF_A_LOOP = {
    "data": ("workers",),
    "batch": ("global_size",),
    "train": ("duration",),
    "parallel": ("device", "backend", "timeout"),
}


@dataclasses.dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, where it came from, and what was removed during loading.

    Attributes:
        recipe: The recipe.
        name: Short name for run directories: the file's stem, or the shipped name.
        notices: One sentence for each key without effect, and for a folder with the recipe's name.
        origins: Whether a dotted key was set by a file or by an override; unset keys are not in it.
    """

    recipe: Recipe
    name: str
    notices: tuple[str, ...] = ()
    origins: Mapping[str, layers.Origin] = dataclasses.field(default_factory=dict)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides in command-line form, with absolute paths; without mappings, which one line may change."""
        values = {key: attrgetter(key)(self.recipe) for key, origin in self.origins.items() if origin == "override"}
        return tuple(f"{key}={yaml_line(plain(each))}" for key, each in values.items() if not isinstance(each, dict))

    def checked(self, unused: Mapping[str, str]) -> LoadedRecipe:
        """Return the same with a notice for every key that a plan does not use, with the reason (``Plan.unused``).

        Raises:
            RecipeError: If an override has no effect.
        """
        messages = layers.check_used(self.recipe, self.origins, unused)
        return dataclasses.replace(self, notices=(*self.notices, *messages))


def shipped_recipes() -> dict[str, Path]:
    """Return names and files of the shipped recipes, sorted by name."""
    return {path.stem: path for path in sorted(SHIPPED.rglob("*.yaml"))}


def is_data(source: str | Path) -> bool:
    """Whether a RECIPE argument is training data: a folder that is not a run, or a file of images."""
    path = os.path.expanduser(source)
    if str(source) in shipped_recipes() or path.endswith(_ENDINGS):
        return False
    return _is_data_folder(path) or (os.path.isfile(path) and dataset_at(path) is not None)


def _is_data_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.isfile(os.path.join(path, "recipe.yaml"))


PATH_KEYS = ("data.path", "data.annotations", "data.saved_split", "model.initialize_from", "distillation.teacher")


def load_recipe(source: str | Path | None, overrides: Overrides = ()) -> LoadedRecipe:
    """Read a shipped recipe by name, or a recipe file by path, and apply overrides.

    Args:
        source: A name from :func:`shipped_recipes` or the path of a YAML file; None for every key's default.
        overrides: ``["optimizer.lr=0.1", ...]`` or ``{"optimizer.lr": 0.1, ...}``; None (``null``) removes a key.

    Raises:
        RecipeError: If anything in it is unknown, ill-typed, or without effect; or if it is in a run directory and
            names code to import, outside of :func:`paceline.plugins.references.trusting_code`.
    """
    notices: list[str] = []
    stored: dict[Path, layers.Tree] = {}
    path = Path("task") if source is None else _locate(source)
    tree = {} if source is None else _with_base(path, source, notices, stored)
    override_tree = _override_layer(overrides, notices)
    tree = layers.merge(tree, override_tree, notices)
    if tree.get("task") == "image_multilabel" and isinstance(train := tree.get("train", {}), Mapping):
        tree["train"] = {"loss": "bce", **train}
    recipe = _validate(tree, "the defaults" if source is None else str(source))
    for where, foreign in stored.items():
        refuse_foreign_code(foreign, recipe, str(where), trusted=False, keys=(*CODE_KEYS, *TRAINING_CODE_KEYS))
    kinds: tuple[Kind, ...] = ("optimizers", "schedules", "losses", "augmentations")
    for kind, key in zip(kinds, TRAINING_CODE_KEYS, strict=True):
        if reason := name_problem(kind, name := attrgetter(key)(recipe)):
            place = "" if source is None else f"{source}: "
            raise RecipeError(f"{place}{key}: {reason}.", key=key, value=name, rule="a known name")
    origins: dict[str, layers.Origin] = dict.fromkeys(layers.set_keys(tree), "file")
    origins |= dict.fromkeys(layers.set_keys(override_tree), "override")
    # Stored with the run, paths must mean the same in every working directory.
    for section, key in (each.split(".") for each in PATH_KEYS):
        part = getattr(recipe, section)
        if (value := getattr(part, key)) is not None:
            absolute = value if is_address(value) else str(Path(value).absolute())
            recipe = dataclasses.replace(recipe, **{section: dataclasses.replace(part, **{key: absolute})})
    if str(source) in shipped_recipes() and _is_data_folder(str(source)):
        folder, data = Path(str(source)).absolute(), recipe.data.path
        if data is None or not Path(data).is_relative_to(folder):
            notices.append(f"{source} is the shipped recipe; to mean the folder of that name here, write ./{source}")
    name = path.parent.name if path.name == "recipe.yaml" else path.stem
    if source is None and recipe.task == "fit":
        name = recipe.task
    return LoadedRecipe(recipe, name, tuple(notices), origins)


def stored_recipe(tree: Mapping[str, Any], where: str, overrides: Overrides = ()) -> Recipe:
    """Return a resolved recipe that was stored with weights, with overrides applied."""
    notices: list[str] = []
    tree = with_new_names(tree)
    layers.check_known(tree, where)
    return _validate(layers.merge(tree, _override_layer(overrides), notices), where)


# Keys that only training reads; a custom task may read all others when it scores.
_FOR_TRAINING = (
    *("optimizer.", "schedule.", "checkpoint.", "telemetry.", "distillation."),
    *("train.duration", "train.until", "train.grad_scaler.", "train.ema", "train.deterministic"),
    *("train.loss", "train.class_weights", "data.sampling"),
    *("evaluate.every", "evaluate.metric", "evaluate.patience"),
    *("parallel.strategy", "parallel.exact", "parallel.logical_ranks", "parallel.bucket_cap_mb"),
    *("batch.micro_size", "batch.growth", "data.holdout_fraction", "data.subset"),
    *("parallel.gradient_compression", "parallel.static_graph", "parallel.unused_parameters"),
    *("parallel.shard_", "parallel.reshard_after_forward", "parallel.gather_dtype", "parallel.affinity"),
    *("model.pretrained", "model.initialize_", "model.activation_checkpointing", "model.compile"),
    *("model.frozen", "model.unfreeze", "model.freeze_after", "model.adapters.", "model.ghost_batch_norm"),
)


def refuse_training_overrides(overrides: Overrides) -> None:
    """Refuse overrides that have no effect when saved weights are only scored.

    Raises:
        RecipeError: Naming the first.
    """
    for key in set_by(overrides):
        # `evaluate.metrics` adds figures to a score; `evaluate.metric` selects the best checkpoint.
        if key.startswith(_FOR_TRAINING) and not key.startswith("evaluate.metrics"):
            message = f"override '{key}' has no effect: saved weights are scored, not trained. Remove it."
            raise RecipeError(message, key=key, rule="with effect")


def override_lines(overrides: Overrides) -> tuple[str, ...]:
    """Return overrides in command-line form."""
    if not isinstance(overrides, Mapping):
        return (overrides,) if isinstance(overrides, str) else tuple(overrides)
    values = {key: os.fspath(each) if isinstance(each, os.PathLike) else each for key, each in overrides.items()}
    return tuple(f"{key}={yaml_line(each)}" for key, each in values.items())


def set_by(overrides: Overrides) -> tuple[str, ...]:
    """Return the dotted keys that overrides set."""
    return tuple(layers.set_keys(_override_layer(overrides)))


def refuse_unused_overrides(overrides: Overrides, unused: Mapping[str, str], recipe: Recipe) -> None:
    """Refuse overrides that have no effect on the current data.

    Args:
        overrides: The user's overrides.
        unused: Dotted keys without effect, with the reason.
        recipe: The recipe with the overrides.

    Raises:
        RecipeError: Naming the first.
    """
    origins: dict[str, layers.Origin] = dict.fromkeys(set_by(overrides), "override")
    layers.check_used(recipe, origins, unused)


def to_tree(recipe: Any) -> dict[str, Any]:
    """Return the resolved recipe as plain YAML/JSON values: every key that has an effect, including defaults."""
    return {
        key: to_tree(value)
        if dataclasses.is_dataclass(value) and layers.subsection(type(recipe), key)
        else plain(value)
        for key, value in layers.effective_items(recipe)
    }


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that :func:`load_recipe` reads back to an equal recipe."""
    tree = to_tree(recipe)
    if recipe.task == OWN_LOOP:  # the rest is in the program
        whole = ("task", "seed", "checkpoint", "telemetry")
        parts = {section: {key: tree[section][key] for key in keys} for section, keys in _OF_A_LOOP.items()}
        tree = {key: tree[key] for key in whole} | parts
    text: str = yaml.dump(tree, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def recipe_digest(recipe: Recipe) -> str:
    """Return the SHA-256 of the resolved recipe."""
    return hashlib.sha256(json.dumps(to_tree(recipe), sort_keys=True).encode()).hexdigest()


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return dotted keys whose values differ, with (old, new); a key absent on one side shows as None."""
    old_values, new_values = _comparable(old), _comparable(new)
    return {
        key: (old_values.get(key), new_values.get(key))
        for key in dict.fromkeys([*old_values, *new_values])
        if old_values.get(key) != new_values.get(key)
    }


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """Return every key by its dotted name; an optimizer's value for `auto` counts as if it had been set."""
    optimizer, tree = recipe.optimizer, to_tree(recipe)
    groups = tree["optimizer"]["groups"]
    if CLASSIFIER not in groups:  # fine_tune's recipe used the name that ResNet has for it
        groups = tree["optimizer"]["groups"] = {CLASSIFIER if name == "fc.*" else name: groups[name] for name in groups}
    flat = _flatten(tree)
    # Only for keys that are present: not every optimizer has them.
    resolved = {"optimizer.betas": list(optimizer.moment_decay), "optimizer.eps": optimizer.denominator_eps}
    flat |= {key: value for key, value in resolved.items() if key in flat}
    if groups:
        flat["optimizer.groups"] = list(groups)  # the first matching pattern wins, so their order matters
    return flat


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def _locate(source: str | Path, base_dir: Path = Path()) -> Path:
    """Find a recipe by name or path; ``base_dir`` is a folder whose files are suggested for a misspelt name."""
    shipped = shipped_recipes()
    if str(source) in shipped:
        return shipped[str(source)]
    path = Path(os.path.expanduser(source))
    try:
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        if path.is_file():
            refuse_archive(path)
            return path
        is_folder = path.is_dir()
    except OSError as error:
        message = f"no recipe '{source}': {error.strerror}. Correct the path."
        raise RecipeError(message, path=path, rule=_FOUND) from error
    if is_folder:
        message = (
            f"'{source}' is a folder, but a recipe is a name or a YAML file; to train on a folder of images: "
            f"paceline train image_folder data.path={source}"
        )
    elif kind := special_kind(path):
        message = f"'{source}' is {kind}, but a recipe is a name or a YAML file. Correct the path."
    elif path.suffix in _ENDINGS or (os.sep in str(source) and "=" not in str(source)):
        message = _no_file(str(source), base_dir)
    elif hint := did_you_mean(str(source), [*shipped, *(entry.name for entry in base_dir.glob("*.y*ml"))]):
        message = f"no recipe '{source}'.{hint} `paceline recipes` lists all."
    else:
        message = (
            f"no recipe '{source}': it is neither a shipped recipe nor an existing file or run directory; "
            "`paceline recipes` lists the shipped ones."
        )
    raise RecipeError(message, path=path, rule=_FOUND)


def _no_file(source: str, base_dir: Path) -> str:
    """Describe a path that does not exist, and suggest another recipe or run in that folder, or a shipped recipe."""
    folder, name = os.path.split(source.rstrip(os.sep))
    stem, ending = os.path.splitext(name)
    is_file = ending in _ENDINGS
    # Compared without the extension, which makes any two names similar.
    candidates = {each.parent.name: each.parent.name for each in (base_dir / folder).glob("*/recipe.yaml")}
    candidates |= {each.stem: each.name for each in (base_dir / folder).glob("*.y*ml")}
    hint = did_you_mean(
        stem if is_file else name, candidates, shown=lambda each: os.path.join(folder, candidates[each])
    )
    hint = hint or did_you_mean(stem if is_file else name, shipped_recipes())
    noun = "file" if is_file else "file or run directory"
    return (
        f"there is no {noun} '{source}'.{hint} Correct the path, or give the name of a shipped recipe: "
        "`paceline recipes` lists them."
    )


def _with_base(path: Path, source: str | Path, notices: list[str], stored: dict[Path, layers.Tree]) -> layers.Tree:
    """Return the layers of a file and its base; those that are part of a run are also added unchanged to ``stored``."""
    tree = _read(path, notices, source)
    if is_stored(path, source):
        stored[path] = dict(tree)
    base = tree.pop("base", None)
    layers.check_known(tree, str(path))
    if base is None:
        return layers.merge({}, tree, notices)
    sibling = path.parent / os.path.expanduser(str(base))
    try:
        base_path = sibling if sibling.is_file() else _locate(str(base), path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: base: {error}", key="base", value=base, path=path, rule=error.rule) from None
    base_tree = _read(base_path, notices, str(base))
    if is_stored(base_path, str(base)) or path in stored:
        stored[base_path] = dict(base_tree)
    if "base" in base_tree:
        raise RecipeError(
            f"{path}: its base '{base}' has a base itself, but one level is the limit; copy the keys you need.",
            key="base",
            value=base,
            path=path,
            rule="one level",
        )
    layers.check_known(base_tree, str(base_path))
    return layers.merge(base_tree, tree, notices)


# What other files are, and which commands take them.
_OTHER_FILES = {
    ".onnx": "an ONNX model, not a recipe: `paceline predict` takes it.",
    ".pt": "a file of torch.save, not a recipe, and no command reads it, since that may run code: save its weights as "
    "safetensors, which model.initialize_from takes.",
    ".safetensors": "weights, not a recipe: `paceline predict`, `evaluate` and `export` take them, and "
    "model.initialize_from trains on from them.",
    ".txt": "text, not a recipe: train on its folder with a recipe that names task and data.path "
    "(docs/guide/language-models.md); `paceline predict` takes it for weights of texts.",
}


def _read(path: Path, notices: list[str], source: str | Path) -> layers.Tree:
    """Return the layer of a file. Old key names are reported, except in recipes stored by a run, which nobody edits."""
    what = f"{path} is {_OTHER_FILES[path.suffix]}" if path.suffix in _OTHER_FILES else ""
    try:
        tree = load_plain(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        is_data = any(each.reads(Place(path)) for each in entries())
        hint = " If it is data, name it in a recipe with task and data.path (docs/guide/language-models.md)." * is_data
        message = what or f"{path}: not readable as YAML{_cause(error)}{hint}"
        raise RecipeError(message, path=path, rule="YAML") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        message = what or f"{path}: a recipe is a mapping of sections, found a {type(tree).__name__}."
        raise RecipeError(message, value=tree, path=path, rule="a mapping of sections")
    return layers.normalize_case(with_new_names(tree, None if is_stored(path, source) else notices))


def _cause(error: yaml.YAMLError | UnicodeDecodeError | OSError) -> str:
    """Describe where and why a text is not YAML, as the end of a sentence."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {' '.join(str(error).split())}"
    mark = error.problem_mark
    where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: {error.problem}."


def _override_layer(overrides: Overrides, notices: list[str] | None = None) -> layers.Tree:
    """Return overrides as one layer."""
    merged: layers.Tree = {}
    for dotted, value in override_pairs(overrides):
        nested = reduce(lambda inner, key: layers.Entries({key: inner}), reversed(dotted.split(".")), value)
        layer = with_new_names(nested, notices)
        layers.check_known(layer, f"override '{dotted}'")
        layers.update(merged, layers.normalize_case(layer))
    return merged


def override_pairs(overrides: Overrides) -> Iterable[tuple[str, Any]]:
    """Yield the dotted keys of overrides, with their values.

    Raises:
        RecipeError: If one is not KEY=VALUE.
    """
    if isinstance(overrides, Mapping):
        if wrong := [each for each in overrides if not isinstance(each, str)]:
            message = f"overrides has the key {wrong[0]!r}; keys are texts such as 'optimizer.lr'."
            raise RecipeError(message, key="overrides", value=wrong[0], rule="a dict of texts")
        yield from copy.deepcopy(dict(overrides)).items()  # layers are merged in place
        return
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        message = f"overrides is {overrides!r}; give a dict, or a list of texts KEY=VALUE."
        raise RecipeError(message, key="overrides", value=overrides, rule="a dict or a list")
    for text in overrides:
        dotted, equals, value = str(text).partition("=")
        if not equals or not dotted:
            folder = f"data.path={text}" if text and Path(str(text)).is_dir() else "optimizer.lr=0.1"
            message = f"found '{text}', but an override is KEY=VALUE, for example {folder}."
            raise RecipeError(message, key="overrides", value=text, rule="KEY=VALUE")
        if dotted.count(".") >= MAX_DEPTH:
            message = f"override '{dotted[:40]}…': a key has at most {MAX_DEPTH} levels."
            raise RecipeError(message, key=dotted, value=value, rule=f"at most {MAX_DEPTH} levels")
        try:
            yield dotted.strip(), load_whole(value) if value.strip(" \t\r\n") else ""
        except yaml.YAMLError as error:
            shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
            message = f"override '{shown}': the value is not readable as YAML{_cause(error)}"
            raise RecipeError(message, key=dotted.strip(), value=value, rule="YAML") from None


def _validate(tree: layers.Tree, where: str) -> Recipe:
    try:
        recipe = _RECIPE.validate_python(tree)
    except ValidationError as error:
        raise _refusal(error, where) from None
    layers.check_effective(tree, recipe, where)
    _check_addresses(recipe)
    return recipe


def _check_addresses(recipe: Recipe) -> None:
    """Refuse addresses that cannot be read from or copied to, and those that contain credentials.

    Raises:
        StorageError: Naming the key.
    """
    for key in ("data.path", "model.initialize_from", "distillation.teacher"):
        if (path := attrgetter(key)(recipe)) is not None and is_address(path):
            parse_address(path, key=key)
    if recipe.checkpoint.mirror is not None and not parse_address(recipe.checkpoint.mirror, key=_MIRROR).can_write:
        message = f"{_MIRROR}={recipe.checkpoint.mirror}: it is not writable; give s3://, gs:// or az://."
        raise RecipeError(message, key=_MIRROR, value=recipe.checkpoint.mirror, rule="writable")


def _refusal(error: ValidationError, where: str) -> RecipeError:
    """Return the error with one sentence per wrong key; a union's complaints are joined by 'or'.

    Its fields are those of the first key.
    """
    sentences: dict[str, str] = {}
    found: dict[str, tuple[Any, str]] = {}
    rules: dict[str, list[str]] = {}
    choices: dict[str, list[str]] = {}
    hints: dict[str, str] = {}
    for item in error.errors():
        known = [
            str(part)
            for part in item["loc"]
            if isinstance(part, str) and part.isidentifier() and not part.startswith("constrained")
        ]
        key = _field_path(known)
        if item["type"] == "value_error":  # a message of Paceline's own, which is a complete sentence
            sentences[key] = item["msg"].removeprefix("Value error, ")
            found[key] = (item["input"], sentences[key].partition(", but ")[2])
            continue
        if item["type"] == "unexpected_keyword_argument":
            *_, parent, unknown = item["loc"]
            sentences[key] = f"found the key {unknown!r} in {parent!r}, which is not allowed there"
            found[key] = (item["input"], "a known key")
            continue
        if item["type"] == "literal_error":
            choices.setdefault(key, []).extend(re.findall("'([^']*)'", item["ctx"]["expected"]))
            # Short words are similar to any other, and the choices are listed.
            close = choices[key] if len(str(item["input"])) >= _LONG else ()
            hints[key] = did_you_mean(str(item["input"]), close, count=1)
        rule = _RULES.get(item["type"], item["msg"]).removeprefix("Input should be ")
        rules.setdefault(key, []).append(f"it must be {rule}")
        value = repr(item["input"])
        value = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…"
        rule_text = " or ".join(dict.fromkeys(rules[key])).replace(" or it must be ", " or ")
        rule_text = rule_text.replace("a valid tuple", "a list")
        sentences[key] = f"found {value}, but {rule_text}"
        found[key] = (item["input"], rule_text.removeprefix("it must be "))
    lines = [f"{where}: {key}: {sentence}.{hints.get(key, '')}" for key, sentence in sentences.items()]
    key, (value, rule) = next(iter(found.items()))
    return RecipeError(*lines, key=key, value=value, rule=rule)


# Replacements for pydantic's own messages where those would not help.
_RULES = {
    "float_parsing": "Input should be a number",
    "int_parsing": "Input should be a whole number",
    "int_type": "Input should be a whole number",
    "bool_type": "Input should be true or false",
    "dict_type": "Input should be a mapping, as {name: value}",
    "too_short": "Input should be a list of one or more",
    "missing": "Input should be a list with two numbers",
}


def _field_path(parts: Sequence[str]) -> str:
    """Keep the leading parts that are keys of the schema; pydantic appends the names of union branches."""
    section: type[Any] | None = Recipe
    path: list[str] = []
    for part in parts:
        if section is None or part not in layers.field_types(section):
            break
        path.append(part)
        section = layers.subsection(section, part)
    return ".".join(path) or "recipe"
