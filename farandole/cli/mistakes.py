"""Errors for unknown options, with the nearest option or the alternative."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A subcommand whose errors name the nearest option."""

    elsewhere: Mapping[str, str] = {}
    """Options of other launchers without a counterpart here, and their alternatives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; refuse an unknown option with the nearest option or the alternative."""
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
        return f"there is no option {name}" + (f"; nearest: {nearest[0]}" if nearest else "")
