"""List the keys of a training configuration with their types, defaults and descriptions.

The descriptions are the comments in `presets/default.toml`.  The types and limits come from `TrainConfig`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import Any

from farandole.train.config import ConfigError, key_type, load_config, presets, unknown_key

_KEY = re.compile(r"(?P<name>\w+) = (?P<value>.*?)(?:\s+# (?P<comment>.*))?")


@dataclass(frozen=True)
class Key:
    """A configuration key.

    Args:
        name: the full name, such as `model.width`.
        default: the value in preset `default`.
        description: a short description, without a period at the end.
        type: a description of the type and the limits, such as "integer, at least 1".
    """

    name: str
    default: Any
    description: str
    type: str

    @property
    def assignment(self) -> str:
        """Return the full name and the default as a TOML assignment, such as `model.width = 192`."""
        return f"{self.name} = {json.dumps(self.default)}"


def all_keys() -> dict[str, Key]:
    """Return a dict that maps full names to keys, in the order of `presets/default.toml`."""
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
            keys[name] = Key(name, default, description, key_type(name))
            comments = []
        else:
            comments = []
    return keys


def find_key(name: str) -> Key:
    """Find a key by its full name, or by the name after the last dot if this name is unique.

    Raises:
        ConfigError: if the key does not exist or is ambiguous.  The message suggests similar keys.
    """
    keys = all_keys()
    if name in keys:
        return keys[name]
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return keys[same[0]]
    if same:
        raise ConfigError(f"{name} is ambiguous; use one of {', '.join(same)}")
    raise ConfigError(unknown_key(name))


def preset_values(name: str) -> dict[str, Any]:
    """Return the values of key `name` in the presets that change this key, keyed by preset."""
    default = load_config().flat()[name]
    values = {preset: load_config(preset).flat()[name] for preset in presets()}
    return {preset: value for preset, value in values.items() if value != default}
