"""Recipes: frozen dataclasses <-> TOML tables. Strict, and every problem is reported at once.

A recipe has the tables `[data]`, `[model]`, `[dropout]`, `[posterior]`, `[prior]`, `[bayes]` and
`[train]`. Each is the table of one dataclass. In `[data]`, `kind` says which one (by default
"text"), which also decides what `[model]` is. In `[posterior]` and `[prior]`, `kind` says which one
too; instead, they may hold one such table for each name pattern (`[posterior."rnn.*"]`), in which
the first match counts.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from bayesrnn.bayes import (
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    Prior,
    ScaleMixture,
    Sharpened,
    Uniform,
)
from bayesrnn.bayes.bayesianize import each_of
from bayesrnn.bayes.kl import Estimator, check_estimator, check_pair
from bayesrnn.data import (
    CaptionData,
    ImageData,
    ReviewData,
    SeriesData,
    SpeechData,
    TextData,
)
from bayesrnn.errors import Invalid, UserError, require
from bayesrnn.files import expanded, read_bytes, write_atomic
from bayesrnn.models import (
    CaptionerSettings,
    DropoutSettings,
    LanguageSettings,
    MlpSettings,
    ReviewSettings,
    SeriesSettings,
    SpeechSettings,
)
from bayesrnn.storage import Damaged
from bayesrnn.train.settings import TrainSettings

T = TypeVar("T")
SEAL = b"# sha256 of what follows: "
LARGEST = {int: ("2^63", 2**63), float: ("3e38", 3e38)}
"""Numbers are below these, by type: of TOML's whole numbers (Python reads larger ones), and of
those that a weight can hold."""
Problems = list[tuple[str, str]]

POSTERIORS: dict[str, type[Posterior]] = {cls.kind: cls for cls in (Delta, Gaussian, Sharpened)}
PRIORS: dict[str, type[Prior]] = {cls.kind: cls for cls in (Uniform, Normal, Laplace, ScaleMixture)}
KINDS: Mapping[str, Mapping[str, type]] = {"posterior": POSTERIORS, "prior": PRIORS}

Data = TextData | ImageData | ReviewData | CaptionData | SpeechData | SeriesData
Model = (
    LanguageSettings
    | MlpSettings
    | ReviewSettings
    | CaptionerSettings
    | SpeechSettings
    | SeriesSettings
)
DATA: dict[str, type[Data]] = {cls.kind: cls for cls in get_args(Data)}
MODELS: dict[type[Data], type[Model]] = {
    TextData: LanguageSettings,
    ImageData: MlpSettings,
    ReviewData: ReviewSettings,
    CaptionData: CaptionerSettings,
    SpeechData: SpeechSettings,
    SeriesData: SeriesSettings,
}


@dataclass(frozen=True)
class BayesSettings:
    """Which weights are drawn, and how their KL is estimated; a recipe's `[bayes]` table.

    `where` holds name patterns. `kl` is "auto" (exact where there is a closed form), "exact" or
    "sample".
    """

    where: tuple[str, ...] = ("*",)
    kl: Estimator = "auto"

    def __post_init__(self) -> None:
        require((len(self.where) > 0, "where", "must hold at least one name pattern"))


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run: its data, its model, and how the model is trained.

    Each field is a table of the recipe's file; only `data` has no default. The kind of `data`
    decides that of `model`. `posterior` and `prior` are one object each, or a mapping from name
    pattern to object, in which the first match counts.
    """

    data: Data
    model: Model = field(default_factory=LanguageSettings)
    dropout: DropoutSettings = field(default_factory=DropoutSettings)
    posterior: Posterior | Mapping[str, Posterior] = field(default_factory=Gaussian)
    prior: Prior | Mapping[str, Prior] = field(default_factory=ScaleMixture)
    bayes: BayesSettings = field(default_factory=BayesSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        wanted, given = MODELS[type(self.data)].__name__, type(self.model).__name__
        message = f"must be {wanted} for data of kind {self.data.kind!r}, got {given}"
        require((wanted == given, "model", message))


TABLES: Mapping[str, Sequence[type]] = {
    "data": tuple(DATA.values()),
    "model": tuple(MODELS.values()),
    "dropout": (DropoutSettings,),
    "posterior": tuple(POSTERIORS.values()),
    "prior": tuple(PRIORS.values()),
    "bayes": (BayesSettings,),
    "train": (TrainSettings,),
}
"""A recipe's tables, and what each may hold."""


def settings_like(name: str) -> list[str]:
    """The keys of the settings that this name is meant for, whatever their table: those of that
    name (with its table, or without), or else of the one that is most like it.

    >>> settings_like("epochs"), settings_like("Epoch"), settings_like("train.lr")
    (['train.epochs'], ['train.epochs'], ['train.lr'])
    """
    names: dict[str, list[str]] = {}
    for table, kinds in TABLES.items():
        fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        for own in sorted(
            fields | ({"kind"} if any(hasattr(kind, "kind") for kind in kinds) else set())
        ):
            names.setdefault(own, []).append(f"{table}.{own}")
            names[f"{table}.{own}"] = [f"{table}.{own}"]
    name = name.lower().replace("-", "_")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return names.get(name) or (names[close[0]] if close else [])


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe in a TOML file, with `table.key=value` overrides applied.

    An override that sets another `kind` of posterior or prior takes out what the file sets and that
    kind does not have.
    """
    path = expanded(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        table = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"no recipe at {path}; give the path of a .toml file") from error
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; give the path of a .toml file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text, so it is no recipe; give the path of a .toml file"
        ) from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise UserError(
            f"{path} is not valid TOML: {error}; a recipe is a .toml file, data are given to it as "
            "data.path=..."
        ) from error
    changes = [_parse_override(override) for override in overrides]
    for keys, value in changes:
        _take_out(table, keys, value)
    for keys, value in changes:
        _set(table, keys, value)
    return from_table(table)


def read_run_recipe(path: Path) -> Recipe:
    """The recipe that a run keeps, `Damaged` where it is not as `write_run_recipe` wrote it (old
    runs have no checksum in it)."""
    seal, _, rest = read_bytes(path).partition(b"\n")
    if seal.startswith(SEAL) and seal != _seal(rest):
        raise Damaged(
            f"{path} is damaged, or was edited: its checksum is another one; restore it from a "
            "copy or by its train command, or delete its first line where the change is meant"
        )
    try:
        return read_recipe(path)
    except (Invalid, UserError) as error:
        raise Damaged(
            f"{path} is not the recipe of a run: {error}; restore it from a copy or by its train "
            "command"
        ) from error


def write_run_recipe(path: Path, recipe: Recipe) -> None:
    """Write a run's recipe below a line with its checksum: TOML cut short is still TOML."""
    text = to_toml(recipe).encode()
    write_atomic(path, _seal(text) + b"\n" + text)


def _seal(text: bytes) -> bytes:
    return SEAL + hashlib.sha256(text).hexdigest().encode()


def from_table(table: Mapping[str, Any]) -> Recipe:
    """The recipe of a parsed table; raises `Invalid` with all that is wrong in it.

    >>> from_table({"data": {"path": "x"}, "train": {"learning_speed": 3}})
    Traceback (most recent call last):
    ...
    bayesrnn.errors.Invalid: train.learning_speed is not a setting; allowed: epochs, ...
    """
    problems: Problems = []
    for key in table:
        if key not in TABLES:
            problems.append((key, _unknown("", key, list(TABLES), "is not a table")))
    parts: dict[str, Any] = {}
    readers: dict[str, Callable[[Any, str, Problems], Any]] = {
        "data": _read_data,
        "model": partial(_read, _model_of(table)),
        "dropout": partial(_read, DropoutSettings),
        "posterior": partial(_read_kinds, POSTERIORS),
        "prior": partial(_read_kinds, PRIORS),
        "bayes": partial(_read, BayesSettings),
        "train": partial(_read, TrainSettings),
    }
    for key, reader in readers.items():
        if key in table or key in ("data", "model"):
            parts[key] = reader(table.get(key, {}), key, problems)
    if problems:
        raise Invalid(problems)
    recipe = Recipe(**parts)
    _check_together(recipe)
    return recipe


def to_table(recipe: Recipe) -> dict[str, Any]:
    """The inverse of `from_table`: plain numbers, strings, lists and tables."""
    return {f.name: _plain(getattr(recipe, f.name)) for f in dataclasses.fields(recipe)}


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML text that `read_recipe` reads back to an equal one."""
    lines: list[str] = []
    for key, table in to_table(recipe).items():
        _write_table(lines, [key], table)
    return "\n".join(lines).strip() + "\n"


def object_to_table(value: Posterior | Prior) -> dict[str, Any]:
    """A posterior or prior as the table a recipe would hold.

    >>> object_to_table(Laplace(scale="fit"))
    {'kind': 'laplace', 'loc': 0.0, 'scale': 'fit'}
    """
    table: dict[str, Any] = _plain(value)
    return table


def object_from_table(kinds: Mapping[str, type[T]], table: Mapping[str, Any]) -> T:
    """The posterior or prior of such a table (`kinds` is POSTERIORS or PRIORS)."""
    problems: Problems = []
    value = _read_kind(kinds, table, "settings", problems)
    if value is None or problems:
        raise Invalid(problems)
    return value


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ, with both values."""
    tables = to_table(one), to_table(other)
    left, right = map(_flatten, tables)
    keys = [*left, *(key for key in right if key not in left)]
    found = {
        key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)
    }
    for key in ("posterior", "prior"):  # the first pattern that matches counts
        orders = list(tables[0][key]), list(tables[1][key])
        if orders[0] != orders[1] and set(orders[0]) == set(orders[1]):
            found[key] = orders
    return found


# --- reading ---------------------------------------------------------------------------------


def _read(cls: type[T], table: Any, key: str, problems: Problems) -> T | None:
    """One dataclass from its table: unknown keys, wrong types, then impossible values."""
    if not isinstance(table, Mapping):
        problems.append((key, f"must be a table, got {table!r}"))
        return None
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for name, value in table.items():
        if name not in fields:
            said = _unknown(key.split(".")[0], name, list(fields), "is not a setting")
            problems.append((f"{key}.{name}", said))
            continue
        ok, converted = _convert(hints[name], value)
        if ok:
            given[name] = converted
        else:
            bound = _exceeded(value)
            wanted = f"below {bound}" if bound else _describe(hints[name])
            remedy = _remedy(hints[name], f"{key}.{name}", value)
            problems.append((f"{key}.{name}", f"must be {wanted}, got {value!r}{remedy}"))
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    problems += [
        (f"{key}.{name}", f"is missing; give {key}.{name}=...")
        for name in required
        if name not in table
    ]
    if not set(given) >= set(required):
        return None
    try:
        return cls(**given)
    except Invalid as error:
        problems += [(f"{key}.{name}", message) for name, message in error.problems]
        return None


def _read_data(table: Any, key: str, problems: Problems) -> Any:
    """By its `kind`, which is text unless said otherwise."""
    named = {"kind": TextData.kind, **table} if isinstance(table, Mapping) else table
    return _read_kind(DATA, named, key, problems)


def _model_of(table: Mapping[str, Any]) -> type[Model]:
    """The dataclass of `[model]`; that of a text where the kind of data is not known."""
    data = table.get("data", {})
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return MODELS[DATA.get(kind, TextData) if isinstance(kind, str) else TextData]


def _read_kinds(kinds: Mapping[str, type[T]], table: Any, key: str, problems: Problems) -> Any:
    """One object by its `kind`, or one for each name pattern."""
    patterns = isinstance(table, Mapping) and "kind" not in table and len(table) > 0
    if patterns and all(isinstance(inner, Mapping) for inner in table.values()):
        return {
            pattern: _read_kind(kinds, inner, f"{key}.{_quote_key(pattern)}", problems)
            for pattern, inner in table.items()
        }
    return _read_kind(kinds, table, key, problems)


def _read_kind(kinds: Mapping[str, type[T]], table: Any, key: str, problems: Problems) -> T | None:
    """One object by its `kind`."""
    if not isinstance(table, Mapping):
        problems.append((key, f"must be a table, got {table!r}"))
        return None
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        said = "is missing" if kind is None else f"is {kind!r}"
        problems.append((f"{key}.kind", f"{said}; allowed: {', '.join(kinds)}"))
        return None
    rest = {name: value for name, value in table.items() if name != "kind"}
    return _read(kinds[kind], rest, key, problems)


def _convert(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether a TOML value fits a type, and the value as that type."""
    if _exceeded(value):
        return False, None
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            ok, converted = _convert(option, value)
            if ok:
                return True, converted
        return False, None
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in get_args(hint)), value
    if origin is tuple:
        inner = get_args(hint)
        if not isinstance(value, (list, tuple)):
            return False, None
        if len(inner) == 2 and inner[1] is Ellipsis:
            inner = (inner[0],) * len(value)
        if len(inner) != len(value):
            return False, None
        pairs = [_convert(t, v) for t, v in zip(inner, value, strict=True)]
        return all(ok for ok, _ in pairs), tuple(converted for _, converted in pairs)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False, None
        pairs = [_convert(get_args(hint)[1], v) for v in value.values()]
        converted = dict(zip(value, (c for _, c in pairs), strict=True))
        return all(ok for ok, _ in pairs), converted
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number, float(value) if number else None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, hint), value


def _exceeded(value: Any) -> str | None:
    """The bound that a finite number is not below, in words."""
    if type(value) not in LARGEST:
        return None
    words, bound = LARGEST[type(value)]
    return words if bound <= abs(value) < math.inf else None


def _remedy(hint: Any, key: str, value: Any) -> str:
    """What is right where quotes were left out, or a shell took them away.

    >>> print(_remedy(tuple[str, ...], "bayes.where", "[rnn.*, decoder.*]"))
    ; quote it: 'bayes.where=["rnn.*", "decoder.*"]'
    """
    if hint is str and not isinstance(value, (list, dict)):
        right = json.dumps(str(value).lower(), ensure_ascii=False)
    elif hint == tuple[str, ...] and isinstance(value, str) and not set(value) & set("\"'"):
        items = value.removeprefix("[").removesuffix("]").split(",")
        right = json.dumps([item.strip() for item in items], ensure_ascii=False)
    else:
        return ""
    return f"; quote it: '{key}={right}'"


def _describe(hint: Any) -> str:
    """A type in words.

    >>> _describe(float | Literal["fit", "learn"])
    'a number, "fit" or "learn"'
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Literal):
        options = get_args(hint)
        words = [
            w
            for option in options
            for w in (
                [json.dumps(option)] if origin is Literal else _describe(option).split(" or ")
            )
        ]
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
    if origin is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return f"a list, each {_describe(inner[0])}"
        return f"a list of {len(inner)} items, each {_describe(inner[0])}"
    if origin is not None:
        return "a table"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}.get(
        hint, str(hint)
    )


def _unknown(table: str, key: str, known: Sequence[str], said: str) -> str:
    """What to say of a key that a table (or the recipe itself) does not have."""
    elsewhere = [name for name in settings_like(key) if name.endswith(f".{key}")]
    if any(name.startswith(f"{table}.") for name in elsewhere):  # another kind has it
        elsewhere = []
    close = difflib.get_close_matches(key, known, n=1) or elsewhere
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{said}; {guess}allowed: {', '.join(known) or 'none at all, so take it out'}"


def _check_together(recipe: Recipe) -> None:
    """What one table's settings mean for another's (with patterns: when the model is built)."""
    if isinstance(recipe.model, MlpSettings):
        recipe.dropout.check_feed_forward()
    elif isinstance(recipe.model, SpeechSettings):
        none = recipe.dropout == DropoutSettings()
        require((none, "dropout", "does not go with speech; leave it out"))
    else:
        recipe.dropout.check_cell(recipe.model.cell)
        _check_repeatable(recipe)
        if isinstance(recipe.model, SeriesSettings):
            recipe.dropout.check_without_words()
    posterior, prior = recipe.posterior, recipe.prior
    if isinstance(posterior, Mapping) or isinstance(prior, Mapping):
        return
    problems: Problems = []
    for table, check in (
        ("prior", lambda: check_pair(posterior, prior)),
        ("bayes", lambda: check_estimator(recipe.bayes.kl, posterior, prior)),
    ):
        try:
            check()
        except Invalid as error:
            problems += [(f"{table}.{key}", message) for key, message in error.problems]
    if problems:
        raise Invalid(problems)


def _check_repeatable(recipe: Recipe) -> None:
    """The second order of sharpening compares two forward passes."""
    fresh = recipe.dropout.kind == "naive" and recipe.dropout.on_layers
    fits = not (fresh and any(posterior.second_order for posterior in each_of(recipe.posterior)))
    said = 'must be "variational" with the second order of sharpening, which compares two passes'
    require((fits, "dropout.kind", said))


def _parse_override(text: str) -> tuple[list[str], Any]:
    """The keys of `train.lr=0.5` and its value; a bare word on the right is a string.

    >>> _parse_override("data.path=my/text")
    (['data', 'path'], 'my/text')
    """
    key, equals, value = text.partition("=")
    for right in (value, _quote(value)) if equals else ():
        try:
            found: Any = tomllib.loads(f"{key} = {right}")
            place: Any = tomllib.loads(f"{key} = 0")
        except (ValueError, RecursionError):
            continue
        keys = []
        while isinstance(place, dict):
            [(name, place)] = place.items()
            keys.append(name)
            found = found[name]
        return keys, found
    raise Invalid([(repr(text), "is no setting; write it as table.key=value")])


def _take_out(table: dict[str, Any], keys: Sequence[str], kind: Any) -> None:
    """Where this sets another kind of posterior or prior: take out of its table what that kind does
    not have."""
    kinds = KINDS.get(keys[0], {})
    *place, last = keys
    inner: Any = table
    for key in place:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if last != "kind" or not isinstance(inner, dict) or inner.get("kind") == kind:
        return
    if isinstance(kind, str) and kind in kinds:
        known = {f.name for f in dataclasses.fields(kinds[kind])}
        for name in inner.keys() - known:
            del inner[name]


def _set(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """A value at this place, whatever was there; a table that is given is all of it."""
    *place, last = keys
    for key in place:
        if not isinstance(table.get(key), dict):
            table[key] = {}
        table = table[key]
    table[last] = value


# --- writing ---------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):  # a float64 is a float, and yet is not written as one
        return value.item()
    return [_plain(inner) for inner in value] if isinstance(value, (tuple, list)) else value


def _write_table(lines: list[str], path: list[str], table: Mapping[str, Any]) -> None:
    scalars = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if scalars or not table:
        lines.append(f"\n[{'.'.join(_quote_key(part) for part in path)}]")
        lines += [f"{_quote_key(key)} = {_write_value(value)}" for key, value in scalars.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _write_table(lines, [*path, key], value)


def _quote_key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _quote(key)


def _quote(text: str) -> str:
    """As JSON does, but TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_write_value(inner) for inner in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quote(value) if isinstance(value, str) else repr(value)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}.{_quote_key(key)}".lstrip(".")
        flat |= _flatten(value, path) if isinstance(value, Mapping) and value else {path: value}
    return flat
