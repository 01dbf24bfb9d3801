"""Convert tokens to text as the tokens arrive, and find stop strings.

A stop string is never part of the text.  Text that could be the beginning of a stop string is held back until more
tokens have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Converts the tokens of one sequence to text, and ends the text at a stop string.

    Args:
        stop: strings that end the sequence.
        prompt: the tokens before the sequence; empty if the sequence starts a text.  Tokenizers such as SentencePiece
            remove the space at the start of a text, but not at the start of a continuation.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._context = _last_complete(tokenizer, prompt)
        self._stream = self._new_stream()
        self._tokens: list[int] = []
        self._decoded = ""  # all text from the stream
        self._sent = 0  # characters that the caller has received
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token, and return the new text that can be shown.

        Incomplete characters and possible beginnings of stop strings are held back.  After a stop string, `stopped` is
        True.
        """
        self._tokens.append(token)
        try:
            new = self._stream.step(self._tokenizer, token)
        except Exception:  # with byte fallback, an invalid byte changes the characters before it
            self._stream = self._new_stream()
            new = self._stream.step(self._tokenizer, token)
        return self._advance(new) if new else ""

    @property
    def length(self) -> int:
        """Return the number of complete characters so far, including text that is held back."""
        return len(self._decoded)

    def finish(self) -> str:
        """After the last token, return the text that is still held back."""
        return "" if self.stopped else self._rest()

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=True)

    def _rest(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special_tokens=True) + self._decoded
        complete = self._tokenizer.decode([*self._context, *self._tokens], skip_special_tokens=True)
        rest = complete[len(known) :] if complete.startswith(known) else ""
        text = self._advance(rest) if rest else ""
        if self.stopped:
            return text
        start, self._sent = self._sent, len(self._decoded)
        return text + self._decoded[start:]

    def _advance(self, new: str) -> str:
        searched = self._sent
        self._decoded += new
        found = [at for stop in self._stop if (at := self._decoded.find(stop, searched)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        else:  # no stop string begins in the text that the caller has received
            left = self._decoded[searched:]
            end = len(self._decoded) - max((overlap(left, stop) for stop in self._stop), default=0)
        start, self._sent = self._sent, max(self._sent, end)
        return self._decoded[start : self._sent]


def _last_complete(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return a list with the last token of `prompt` that decodes to complete text, or an empty list."""
    for token in reversed(prompt):
        text = tokenizer.decode([token], skip_special_tokens=True)
        if text and "\ufffd" not in text:
            return [token]
    return []


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
