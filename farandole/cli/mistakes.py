"""Report unknown commands and options with the nearest name or an alternative."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup


class CommandGroup(TyperGroup):
    """A group of subcommands that suggests the nearest subcommand for an unknown one."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"suggest_commands": False})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand, and reject unknown subcommands with a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if type(error).__name__ == "UsageError" and (names := nearest(args[0], self.commands)):
                suggestion = " or ".join(map(repr, names))
                error.message = f"{error.message.rstrip('.')}. Did you mean {suggestion}?"  # type: ignore[attr-defined]
            raise


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the known name nearest to `name`, and the second nearest if it is almost as near."""
    found = difflib.get_close_matches(name, known, 2)
    ratios = [difflib.SequenceMatcher(None, each, name).ratio() for each in found]
    return [each for each, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]


class Command(TyperCommand):
    """A subcommand that suggests alternatives to unknown options."""

    elsewhere: Mapping[str, str] = {}
    """Options of other launchers that have no counterpart, and their alternatives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and reject unknown options with a suggestion."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None)
            if type(error).__name__ != "NoSuchOption" or name is None:
                raise
            error.message, error.possibilities = self._answer(name), None  # type: ignore[attr-defined]
            raise

    def _answer(self, name: str) -> str:
        name = name.replace("_", "-")
        if name in self.elsewhere:
            return f"{name} is not supported: {self.elsewhere[name]}"
        options = [option for param in self.params for option in (*param.opts, *param.secondary_opts)]
        names = nearest(name, [option for option in options if option.startswith("-")])
        return f"unknown option {name}" + (f"; did you mean {' or '.join(names)}?" if names else "")


def with_value(args: Sequence[str], option: str, known: Collection[str], default: str) -> list[str]:
    """Insert `default` after `option`, unless the next argument is a known value or nearly equal to one."""
    found: list[str] = []
    for number, argument in enumerate(args):
        found.append(argument)
        if argument == option and not nearest("".join(args[number + 1 : number + 2]), known):
            found.append(default)
    return found


class KeysCommand(Command):
    """A subcommand with configuration keys as arguments.  For an unknown option, it also suggests a key."""

    def _answer(self, name: str) -> str:
        from farandole.train.config import known_keys, unknown_key

        answer, key = super()._answer(name), name.lstrip("-").replace("-", "_")
        if key in known_keys():
            return f"unknown option {name}; {key} is a configuration key: use {key}=VALUE"
        if "; " in answer:
            return answer
        return f"{answer}; to set a configuration key, use KEY=VALUE: {unknown_key(key).partition('; ')[2]}"
