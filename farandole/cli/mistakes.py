"""What the command line says to an option that it does not have: the nearest one, or what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A subcommand that answers mistakes."""

    elsewhere: Mapping[str, str] = {}
    """Options that people know from other launchers, and what to use instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; an unknown option is refused with the nearest one, or with what serves its purpose here."""
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
            return f"{name} is not served: {self.elsewhere[name]}"
        options = [option for param in self.params for option in (*param.opts, *param.secondary_opts)]
        nearest = difflib.get_close_matches(name, [o for o in options if o.startswith("-")], 1)
        return f"there is no option {name}" + (f"; nearest: {nearest[0]}" if nearest else "")
