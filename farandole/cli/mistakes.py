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
