"""The keys of a training configuration: their types, defaults and descriptions.

The descriptions are the comments of `presets/default.toml`; the types and limits come from `TrainConfig`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import Any

from farandole.train.config import ConfigError, TrainConfig, load_config, presets, unknown_key

_KEY = re.compile(r"(?P<name>\w+) = (?P<value>.*?)(?:\s+# (?P<comment>.*))?")
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "pattern": "matching {}",
}


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Args:
        name: The full name, such as `model.width`.
        default: The value in the preset `default`.
        description: One sentence fragment without a full stop.
        type: The type and the limits in words, such as "integer, at least 1".
    """

    name: str
    default: Any
    description: str
    type: str

    @property
    def assignment(self) -> str:
        """The key with its default, as TOML without a section."""
        return f"{self.name} = {json.dumps(self.default)}"


def all_keys() -> dict[str, Key]:
    """Return every key by its full name, in the order of `presets/default.toml`."""
    schema = TrainConfig.model_json_schema()
    keys: dict[str, Key] = {}
    section, comments = "", []
    for line in presets()["default"].splitlines():
        if line.startswith("# "):
            comments.append(line[2:])
        elif line.startswith("["):
            section, comments = line[1 : line.index("]")] + ".", []
        elif match := _KEY.fullmatch(line):
            name = section + match["name"]
            description = match["comment"] or " ".join(comments)
            default = tomllib.loads(f"value = {match['value']}")["value"]
            keys[name] = Key(name, default, description, _type(schema, name))
            comments = []
        else:
            comments = []
    return keys


def find_key(name: str) -> Key:
    """Return a key by its full name, or by its last part if no other key has the same.

    Raises:
        ConfigError: if there is no such key, with the nearest one.
    """
    keys = all_keys()
    if name in keys:
        return keys[name]
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return keys[same[0]]
    if same:
        raise ConfigError(f"{name} is ambiguous: {', '.join(same)}")
    raise ConfigError(unknown_key(name))


def preset_values(name: str) -> dict[str, Any]:
    """Return the value of a key in every preset that changes its default."""
    default = load_config().flat()[name]
    values = {preset: load_config(preset).flat()[name] for preset in presets()}
    return {preset: value for preset, value in values.items() if value != default}


def _type(schema: dict[str, Any], name: str) -> str:
    """Return the type and the limits of a key in words."""
    section, _, last = name.rpartition(".")
    properties = schema["properties"]
    if section:
        properties = schema["$defs"][properties[section]["$ref"].rpartition("/")[2]]["properties"]
    found = properties[last]
    if "enum" in found:
        return "one of " + ", ".join(found["enum"])
    types = " or ".join(option["type"] for option in found.get("anyOf", [found]))
    limits = [words.format(found[limit]) for limit, words in _LIMITS.items() if limit in found]
    return ", ".join([types, *limits])
