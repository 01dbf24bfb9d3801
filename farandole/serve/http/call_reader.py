"""Parse a tool call in JSON while its text arrives."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_LITERALS = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

_Next = Generator[None, str, str]
"""A part of the parser.

The part receives one character at a time, and returns the first character after the text that it parses.
"""


@dataclass
class Call:
    """A tool call, or the next part of a call in a stream.

    Args:
        name: the name of the tool, or "" if `arguments` continues the previous call.
        arguments: the arguments exactly as the model wrote them, normally a JSON object.
    """

    name: str
    arguments: str = ""


class CallReader:
    """Parses one tool call: a JSON object with a name and arguments, in any order.

    The call begins when the name of a known tool and the first brace of the arguments have arrived.  From then on,
    `read` returns the arguments as they arrive.  The arguments end when their brackets are balanced, or before the
    first character that makes the JSON invalid.  Like OpenAI's API, the reader does not validate the arguments,
    because their beginning may have been sent before an error is found.

    Args:
        key: the JSON key of the arguments.
        names: the names of the tools.
        before: the delimiter that has already been read; the attribute `text` starts with this delimiter.
    """

    def __init__(self, key: str, names: Collection[str], before: str = "") -> None:
        self._key, self._names = key, names
        self._name = ""
        self._arguments: list[str] = []  # characters that have not been returned
        self._has_arguments = False
        self.text = before
        """All text so far, as long as the call has not begun."""
        self.has_begun = False
        self.has_ended = False
        """Whether the call is complete, or the text is not a call."""
        self._parser = self._object()
        next(self._parser)

    def read(self, text: str) -> tuple[int, list[Call]]:
        """Parse more text.

        Returns:
            The number of characters of `text` that belong to the call, and the new parts of the call.
        """
        count = len(text)
        for at, character in enumerate(text):
            try:
                self._parser.send(character)
            except StopIteration as end:
                count = at + end.value
                self.has_ended = True
                break
        if not self.has_begun:
            self.text += text[:count]
        parts = []
        if not self.has_begun and self._name and self._has_arguments:
            self.has_begun = True
            parts.append(Call(self._name))
        if self.has_begun and self._arguments:
            parts.append(Call("", "".join(self._arguments)))
            self._arguments.clear()
        return count, parts

    # ---- the parser ----

    def _object(self) -> Generator[None, str, int]:
        """Parse the call; return 1 if the last character received belongs to the call, else 0."""
        try:
            _expect("{", (yield from _after_space()))
            character = yield from _after_space()
            while character != "}":
                _expect('"', character)
                key: list[str] = []
                yield from _string(key.append)
                _expect(":", (yield from _after_space()))
                character = yield from self._member("".join(key)[:-1], (yield from _after_space()))
                if character == ",":
                    character = yield from _after_space()
                else:
                    _expect("}", character)
        except _UnexpectedError:
            return 0
        return 1

    def _member(self, key: str, first: str) -> _Next:
        """Parse the value of `key`, and return the first character after the value."""
        if key == self._key and not self._has_arguments:
            _expect("{", first)
            self._has_arguments = True
            return (yield from _value(first, self._arguments.append))
        if key == "name" and not self._name:
            _expect('"', first)
            value: list[str] = []
            character = yield from _value(first, value.append)
            try:
                name = json.loads("".join(value))
            except ValueError:
                raise _UnexpectedError from None
            if name not in self._names:
                raise _UnexpectedError
            self._name = name
            return character
        return (yield from _value(first, lambda _: None))


class _UnexpectedError(Exception):
    """Raised if the text is not valid JSON, or not a call to a known tool."""


def _expect(expected: str, character: str) -> None:
    if character != expected:
        raise _UnexpectedError


def _after_space() -> _Next:
    while (character := (yield)) in SPACE:
        pass
    return character


def _value(character: str, add: Callable[[str], object]) -> _Next:
    """Parse a JSON value, call `add` with each of its characters, and return the first character after the value."""
    open_brackets: list[str] = []
    while True:
        if character == '"':
            add(character)
            yield from _string(add)
        elif character in _CLOSING:
            add(character)
            open_brackets.append(_CLOSING[character])
        elif open_brackets and character == open_brackets[-1]:
            add(character)
            open_brackets.pop()
        elif character in _LITERALS or (open_brackets and (character in SPACE or character in ",:")):
            add(character)
            if not open_brackets:  # the value is a number, true, false or null
                if (character := (yield)) not in _LITERALS:
                    return character if character not in SPACE else (yield from _after_space())
                continue
        else:
            raise _UnexpectedError
        if not open_brackets:
            return (yield from _after_space())
        character = yield


def _string(add: Callable[[str], object]) -> Generator[None, str, None]:
    """Parse a string after its opening quotation mark, and call `add` with each character."""
    while True:
        character = yield
        if character < " ":
            raise _UnexpectedError
        add(character)
        if character == '"':
            return
        if character == "\\":
            add((yield))
