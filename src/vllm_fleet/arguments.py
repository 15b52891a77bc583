"""The arguments of `vllm serve`, judged by a record that its own parser made for each pinned version.

docs/images.md says how a record is made. vLLM reads its arguments from a file (`--config`): `config_file`
says what has to stand there, `check_argument` what vLLM would refuse or drop.
Sources: vllm/utils/argparse_utils.py and vllm/engine/arg_utils.py, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

RECORDS = files("vllm_fleet") / "vllm_arguments"

TAKES = {
    "flag": "true or false",
    "switch": "true or false",
    "int": "a whole number",
    "human_int": "a whole number, or one with a unit such as 32k",
    "int_or_auto": "a whole number, one with a unit such as 32k, -1 or auto",
    "float": "a number",
    "text": "text or a number",
    "json": "a mapping, or JSON as text",
    "json_or_text": "a mapping, or text",
    "config": "a mapping",
    "lora": "name=path, or JSON as text",
    "any": "text or a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "null": "null",
}
"""The kinds of arguments and of keys inside their values, as a sentence names them."""
KEY_TYPES: dict[str, TypeAdapter[Any]] = {
    "int": TypeAdapter(int),
    "float": TypeAdapter(float),
    "bool": TypeAdapter(bool),
    "str": TypeAdapter(str),
    "list": TypeAdapter(list),
    "dict": TypeAdapter(dict),
    "null": TypeAdapter(None),
}
"""vLLM's configurations are pydantic's, which takes "1" and 1.0 for an int but no number for a text."""
UNIT = re.compile(r"(\d{1,30}(?:\.\d+)?)([kmgtKMGT])")
"""Small letters are powers of 1000 and may follow a fraction, capitals are powers of 1024."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. Names have underscores and no leading dashes.

    Attributes:
        kind: how vLLM reads a word, see TAKES. A "flag" has a form that switches it off, a "switch" has none.
        default_text: the default where JSON cannot say it; then `default` is None.
        nargs: "+" for one value or several, "?" where the value may be left out, else None.
        optional: the text None is taken for no value.
        normalized: case and dashes do not matter.
        deprecated: vLLM's words.
        off: spellings that switch a flag off.
        aliases: other long spellings.
        short: spellings with one dash, which a file cannot use.
        keys: of a configuration: each key and its alternatives, see _fits. None where they are not known.

    """

    name: str
    kind: str
    default: Any
    default_text: str | None = None
    nargs: str | None = None
    optional: bool = False
    normalized: bool = False
    choices: list[Any] | None = None
    deprecated: str | None = None
    off: list[str] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    keys: dict[str, list[Any]] | None = None

    @property
    def is_flag(self) -> bool:
        """Whether it is there or not, and has no value."""
        return self.kind in ("flag", "switch")


@dataclass(frozen=True, slots=True)
class Record:
    """The arguments of one version.

    Attributes:
        made: with what: package, device, python, torch, and which torch the package requires.
        spellings: each long spelling, its argument, and whether `true` there switches it on.

    """

    version: str
    made: dict[str, Any]
    arguments: dict[str, Argument]
    spellings: dict[str, tuple[Argument, bool]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with an argument. Its value is not quoted, because it may be a secret.

    With "unknown" and "value" vLLM would not start, or would drop what is written, or take it for the model's
    name. What is "abbreviated" or "deprecated" it takes.
    """

    kind: Literal["unknown", "value", "abbreviated", "deprecated"]
    what: str
    remedy: str | None = None


def records() -> tuple[str, ...]:
    """The versions on record, oldest first."""
    names = [entry.name.removesuffix(".json") for entry in RECORDS.iterdir() if entry.name.endswith(".json")]
    return tuple(sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]))


@cache
def record(version: str) -> Record | None:
    """The record of a version, as in 0.32.0 or 0.32.0+cpu, or None."""
    version = version.partition("+")[0]
    if version not in records():
        return None
    data = json.loads((RECORDS / f"{version}.json").read_text(encoding="utf-8"))
    arguments = {name: Argument(name, **entry) for name, entry in data["arguments"].items()}
    spellings = {
        spelling: (argument, on)
        for argument in arguments.values()
        for on, names in ((True, [argument.name, *argument.aliases]), (False, argument.off))
        for spelling in names
    }
    return Record(data["version"], data["made"], arguments, spellings)


def canonical_name(record: Record | None, name: str) -> str:
    """The argument that is set: enable_lora for `no-enable-lora`, eplb_config for `eplb_config.policy`."""
    head = _head(name)
    argument, _ = _find(record, head)
    return argument.name if argument else head


def config_file(record: Record | None, args: Mapping[str, Any]) -> dict[str, Any]:
    """What has to stand in vLLM's --config file so that it does what `args` say. Names have underscores.

    `vllm serve` drops each `false` of that file, because it looks for the --no- form in the parser above the
    one that has it. So a flag that is off becomes `true` for its --no- form; without a record every `false`
    does. A bare `config.key: true` takes the next argument for its value, and `config.key` makes vLLM forget
    a mapping `config` beside it. So keys behind a dot join the mapping.
    """
    found: dict[str, Any] = {}
    for name, value in sorted(args.items(), key=lambda item: "." in item[0]):  # those with a dot come last
        head, key = _head(name), name.partition(".")[2]
        argument, on = _find(record, head)
        if key:
            found[head] = _merged(found.get(head, {}), _nested(key, value))
        elif record is None and value is False:
            found[f"no_{head}"] = True
        elif argument is None or not argument.is_flag or not isinstance(value, bool):
            found[head] = value
        elif value is on:
            found[argument.name] = True
        elif argument.off:
            found[argument.off[0]] = True
    return found


def check_argument(record: Record, name: str, value: Any) -> Finding | None:
    """What is wrong with one of a pool's `args`, or None.

    Args:
        record: of the version that the engines run.
        name: with dashes or underscores; what stands behind a dot is a key inside the value.
        value: plain data, as YAML gives it.

    """
    head, key = _head(name), name.partition(".")[2]
    argument, _ = _find(record, head)
    if argument is None:
        return _unknown(record, head)
    if wrong := _wrong(argument, _nested(key, value) if key else value):
        return replace(wrong, what=f"in vLLM {record.version} {wrong.what}")
    if argument.deprecated:
        says, _, then = argument.deprecated.partition(". ")
        remedy = then if then.startswith("Use ") else None
        return Finding("deprecated", f"vLLM {record.version} says: {says.removesuffix('.')}", remedy)
    return None


# --- names ----------------------------------------------------------------------------------------


def _head(name: str) -> str:
    """The argument's name alone. Behind the dot, dashes and underscores are not alike."""
    return name.partition(".")[0].replace("-", "_")


def _find(record: Record | None, head: str) -> tuple[Argument | None, bool]:
    return (record.spellings.get(head) if record else None) or (None, True)


def _unknown(record: Record, head: str) -> Finding:
    longer = [spelling for spelling in record.spellings if spelling.startswith(head)]
    if len(longer) == 1:  # argparse completes what only one argument begins with
        return Finding("abbreviated", f"{head} is only the beginning of {longer[0]}", f"Write {longer[0]}.")
    for argument in record.arguments.values():
        if head in argument.short:
            what = f"-{head} is for a command line, and vLLM reads these arguments from a file"
            return Finding("unknown", what, f"Write {argument.name}.")
    names = [spelling for spelling, (_, on) in record.spellings.items() if on]
    return Finding("unknown", f"vLLM {record.version} has no argument {head}", _write_nearest(head, names))


def _write_nearest(word: str, names: Iterable[str]) -> str | None:
    near = get_close_matches(word, names, n=1, cutoff=0.7)
    return f"Write {near[0]}." if near else None


# --- values ---------------------------------------------------------------------------------------


def _nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value become {a: {b: value}}. As in vLLM, text may be JSON or a number with a unit."""
    if isinstance(value, str):
        value = _json(value, _number_or_text(value))
    *outer, last = key.split(".")
    nested = {last: value}
    for step in reversed(outer):
        nested = {step: nested}
    return nested


def _number_or_text(text: str) -> int | str:
    try:
        return _with_unit(text)
    except ValueError:
        return text


def _merged(base: Any, more: dict[str, Any]) -> Any:
    """Both mappings as one, where `more` wins. A base that is no mapping is replaced."""
    base = _json(base, base) if isinstance(base, str) else base
    if not isinstance(base, dict):
        return more
    return base | {
        key: _merged(base.get(key), value) if isinstance(value, dict) else value
        for key, value in more.items()
    }


def _json(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _with_unit(word: str) -> int:
    """32k, 1.5M or 4096."""
    match = UNIT.fullmatch(word.strip())
    if not match:
        return int(word)
    number, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    return int(float(number) * 1000**power) if unit.islower() else int(number) * 1024**power


def _unit_or_auto(word: str) -> int:
    return -1 if word.strip().lower() == "auto" else _with_unit(word)


def _mapping_or_text(word: str) -> Any:
    return json.loads(word) if re.fullmatch(r"\s*{.*}\s*", word, re.DOTALL) else word


def _mapping(word: str) -> Any:
    """A configuration. In JSON that is written as text vLLM expands 80g, which is left to it."""
    expands = word.lstrip().startswith("{") and re.search(r"\d[kmgtKMGT]\b", word)
    content = word if expands else json.loads(word)
    if not expands and not isinstance(content, dict):
        raise ValueError("no mapping")
    return content


def _adapter(word: str) -> Any:
    named = not word or ("=" in word and "," not in word)
    return word if named else _mapping(word)


READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "human_int": _with_unit,
    "int_or_auto": _unit_or_auto,
    "json": json.loads,
    "json_or_text": _mapping_or_text,
    "config": _mapping,
    "lora": _adapter,
}
"""Kind -> what reads a word, or raises ValueError. Every other kind takes any word."""


def _wrong(argument: Argument, value: Any) -> Finding | None:
    """What vLLM would refuse of a value, or drop."""
    bare = argument.is_flag or (argument.nargs == "?" and value is True)
    if isinstance(value, bool) or argument.is_flag:
        return None if bare and isinstance(value, bool) else _takes(argument)
    if isinstance(value, list) and argument.nargs != "+" and len(value) != 1:
        return _takes(argument, "Write the list as JSON, in quotes." if argument.kind == "json" else None)
    for word in _words(value):
        if _looks_like_an_argument(word):
            what = f"{argument.name} takes no text that begins with a dash"
            return Finding("value", what)
        if not _reads(argument, word):
            choices = [choice for choice in argument.choices or () if isinstance(choice, str)]
            return _takes(argument, _write_nearest(word, choices))
        if argument.keys is not None and (
            wrong := _wrong_key(argument.name, argument.keys, _json(word, None))
        ):
            return wrong
    return None


def _takes(argument: Argument, remedy: str | None = None) -> Finding:
    takes = TAKES[argument.kind]
    if argument.choices:
        takes = f"one of {', '.join(str(choice) for choice in argument.choices if choice is not None)}"
    several = ", or a list of them" if argument.nargs == "+" else ""
    return Finding("value", f"{argument.name} takes {takes}{several}", remedy)


def _words(value: Any) -> list[str]:
    """The words of a command line that vLLM makes of a value in its file."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _looks_like_an_argument(word: str) -> bool:
    """Whether vLLM takes a value for the next argument: `-x`, and `-0.5`, whose dot would lead to a key."""
    if not word.startswith("-") or word == "-":
        return False
    return "." in word.partition("=")[0] or not (" " in word or re.fullmatch(r"-\d+", word))


def _reads(argument: Argument, word: str) -> bool:
    """Whether vLLM can read a word, and it is among the choices."""
    try:
        empty = argument.optional and word in ("", "None")
        content = None if empty else READERS.get(argument.kind, str)(word)
    except ValueError:
        return False
    if argument.normalized:
        content = word.lower().replace("-", "_")
    return argument.choices is None or content in argument.choices


def _wrong_key(path: str, keys: Mapping[str, list[Any]], content: Any) -> Finding | None:
    """The first key of a configuration that vLLM would refuse. What is no mapping has none."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if key not in keys:
            return Finding("unknown", f"{path} has no key {key}", _write_nearest(key, keys))
        alternatives = keys[key]
        inner = [one["keys"] for one in alternatives if isinstance(one, dict) and "keys" in one]
        if inner and (wrong := _wrong_key(f"{path}.{key}", inner[0], value)):
            return wrong
        if alternatives and not any(_fits(one, value) for one in alternatives):
            return Finding("value", f"{path}.{key} takes {' or '.join(map(_named, alternatives))}")
    return None


def _fits(alternative: Any, value: Any) -> bool:
    """Whether a key takes a value. An alternative is a type's name, {"choices": [...]} or {"keys": {...}}."""
    if isinstance(alternative, str):
        try:
            KEY_TYPES[alternative].validate_json(json.dumps(value))
        except ValidationError:
            return False
        return True
    if "keys" in alternative:
        return isinstance(value, dict)
    return any(choice == value and not isinstance(value, bool) for choice in alternative["choices"])


def _named(alternative: Any) -> str:
    if isinstance(alternative, str):
        return TAKES[alternative]
    return TAKES["dict"] if "keys" in alternative else f"one of {', '.join(map(str, alternative['choices']))}"
