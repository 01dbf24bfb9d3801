"""Descriptions of a command's parameters, for help texts and error messages.

The descriptions come from the annotations of the function that implements the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Parameter:
    """The type and the limits of one parameter, or of the elements of a list parameter."""

    name: str
    kind: type
    least: float | None = None
    most: float | None = None

    @property
    def placeholder(self) -> str | None:
        """Return the placeholder for the value in help texts, or None for a flag."""
        if self.kind is bool:
            return None
        return "N" if self.kind in (int, float) else self.name.upper()

    @property
    def expected(self) -> str:
        """Return a description of the valid values, such as "an integer of at least 1"."""
        noun = "an integer" if self.kind is int else "a number"
        least, most = (
            limit if limit is None else str(int(limit)) if self.kind is int else f"{limit:g}"
            for limit in (self.least, self.most)
        )
        if least is not None and most is not None:
            return f"{noun} between {least} and {most}"
        if least is not None:
            return f"{noun} of at least {least}"
        return noun if most is None else f"{noun} of at most {most}"

    def is_valid_number(self, text: str) -> bool:
        """Return whether `text` is a number within the limits."""
        try:
            number = self.kind(text)
        except ValueError:
            return False
        return not (self.least is not None and number < self.least) and not (
            self.most is not None and number > self.most
        )


def parameters_of(callback: Callable[..., Any]) -> dict[str, Parameter]:
    """Return a dict that maps the names of a command's parameters to their descriptions.

    Parameters with a custom parser are omitted.
    """
    found = {}
    for name, annotation in get_type_hints(inspect.unwrap(callback), include_extras=True).items():
        if get_origin(annotation) is not Annotated:
            continue
        annotation, info = get_args(annotation)[:2]
        if info.parser is None:
            found[name] = Parameter(name, _element(annotation), info.min, info.max)
    return found


def _element(annotation: Any) -> type:
    """Return the type T of an annotation such as `T | None` or `list[T]`."""
    types = [each for each in get_args(annotation) if each is not NoneType]
    return _element(types[0]) if types else annotation
