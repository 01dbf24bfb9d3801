"""Convert the engine's outputs to responses in the format of OpenAI's API."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from farandole.serve.request import Logprob, Output


class TokenTexts:
    """Converts tokens to bytes and texts for responses with log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in str(tokenizer.decoder)

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes."""
        text: str = self._tokenizer.id_to_token(token) or ""
        if token in self._tokenizer.get_added_tokens_decoder() or not text:
            return text.encode()
        if self._is_byte_level:
            table = _byte_of_character()
            if all(character in table for character in text):
                return bytes(table[character] for character in text)
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
            return bytes.fromhex(match[1])
        return text.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """Return a token's text; an incomplete character is shown as bytes, as in OpenAI's API."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table, which maps characters to bytes."""
    # printable bytes are represented by their own characters, other bytes by characters from code point 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


@dataclass
class Choice:
    """Collects one sequence's text and log-probabilities.

    Log-probabilities are held back until the text of their tokens is returned, so that they do not reveal a stop
    string.  Tokens without text are reported with the next token that has text.
    """

    index: int
    offset: int = 0
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[tuple[Logprob, int]] = field(default_factory=list)
    _pending: list[tuple[Logprob, int]] = field(default_factory=list)

    def add(self, output: Output) -> tuple[str, list[tuple[Logprob, int]]]:
        """Add an output, and return the new text and the new log-probabilities with their offsets in the text."""
        self.text += output.text
        self.tokens += len(output.tokens)
        self.finish_reason = output.finish_reason
        if output.logprobs:
            self._pending += zip(output.logprobs, output.offsets, strict=True)
        sent = len(self.text)
        everything = output.finish_reason == "length"
        ready = [each for each in self._pending if everything or each[1] < sent]
        self._pending = self._pending[len(ready) :]
        ready = [(logprob, at + self.offset) for logprob, at in ready]
        self.logprobs += ready
        return output.text, ready


def completion_logprobs(
    texts: TokenTexts, entries: Sequence[tuple[Logprob, int]], first: int | None = None
) -> dict[str, Any]:
    """Return log-probabilities in the format of OpenAI's completions.

    Args:
        first: the first token of the prompt, which has no log-probability; None if the prompt is not included.
    """
    start = [] if first is None else [texts.text_of(first)]
    blank: list[Any] = [] if first is None else [None]
    return {
        "tokens": [*start, *(texts.text_of(each.token) for each, _ in entries)],
        "token_logprobs": [*blank, *(each.logprob for each, _ in entries)],
        "top_logprobs": [
            *blank,
            *({texts.text_of(token): value for token, value in each.top} for each, _ in entries),
        ],
        "text_offset": [*(0 for _ in start), *(at for _, at in entries)],
    }


def chat_logprobs(texts: TokenTexts, entries: Sequence[tuple[Logprob, int]]) -> dict[str, Any]:
    """Return log-probabilities in the format of OpenAI's chat completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text_of(token),
            "logprob": logprob,
            "bytes": list(texts.bytes_of(token)),
        }

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]}
        for each, _ in entries
    ]
    return {"content": content, "refusal": None}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Return the token counts in the format of OpenAI's `usage` field."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
