"""Report unknown options with the nearest option or an alternative."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand


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
        nearest = difflib.get_close_matches(name, [o for o in options if o.startswith("-")], 1)
        return f"unknown option {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")


class KeysCommand(Command):
    """A subcommand with configuration keys as arguments, which are also suggested for unknown options."""

    def _answer(self, name: str) -> str:
        from farandole.train.config import known_keys, unknown_key

        answer, key = super()._answer(name), name.lstrip("-").replace("-", "_")
        if key in known_keys():
            return f"unknown option {name}; {key} is a configuration key: use {key}=VALUE"
        if "; " in answer:
            return answer
        return f"{answer}; to set a configuration key, use KEY=VALUE: {unknown_key(key).partition('; ')[2]}"
