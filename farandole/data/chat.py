"""Conversations as training samples: tokenized once, memory-mapped, and packed into windows.

    chat = prepare_chat("chat.jsonl", folder, context=1024)
    tokens, documents, targets = chat.train.read(np.array([0, 5]))       # each int64, of shape (2, 1024)

A record contains `messages` (a list of {"role", "content"}) and optionally `tools`.  Alternatively, a record
contains the strings `prompt` and `completion`.  `messages` and `tools` may also be JSON strings.  Only tokens
written by the assistant are targets.  A window can contain several conversations.  For each token,
`documents` contains the index of its conversation within the window, so that attention does not cross conversation
boundaries.  Conversations are never split, but a conversation longer than a window is truncated.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farandole._troubleshooting import see
from farandole.data.cache import Progress, cached_folder, content_key, default_cache
from farandole.data.errors import DataError
from farandole.data.sources import Source, find_source
from farandole.data.template import Template, find_template, read_tokenizer_config, token_text
from farandole.data.text import uniform_hash
from farandole.data.tokenizer import load_tokenizer
from farandole.data.wording import counted

_log = logging.getLogger(__name__)

IGNORED = -100
"""The target for tokens that do not contribute to the loss."""

FILES = ("tokens.bin", "trained.bin", "ends.bin", "held_out.bin")
"""Token ids (int32), trained flags (uint8), ends of conversations (int64), validation flags (uint8)."""

_BATCH = 256


class Conversations:
    """Tokenized conversations, packed into windows of `context` tokens by best fit.

    Args:
        tokens: the tokens of all conversations, concatenated.
        trained: for each token, 1 if the token is a target, else 0.
        spans: for each conversation, the index of its first token and the index after its last token.
        context: the number of tokens in a window.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        trained: NDArray[np.uint8],
        spans: list[tuple[int, int]],
        context: int,
    ) -> None:
        self._tokens, self._trained, self.context = tokens, trained, context
        # The last token of a conversation is only a target, so a conversation of n tokens has n - 1 inputs.
        kept = [(start, min(end, start + context + 1)) for start, end in spans]
        self.windows = [
            [kept[number] for number in window]
            for window in pack([end - start - 1 for start, end in kept], context)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], ...]:
        return tuple(part[0] for part in self.read(np.array([index])))

    def read(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens, document numbers and targets of the windows at the indices `numbers`.

        Each array has the shape (len(numbers), context).  The target at a position is the next token of the
        conversation, or `IGNORED` if that token does not contribute to the loss.  Padding has token 0, document
        number -1 and target `IGNORED`.
        """
        shape = (len(numbers), self.context)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.full(shape, -1, np.int64)
        for row, number in enumerate(numbers):
            at = 0
            for document, (start, end) in enumerate(self.windows[int(number)]):
                length = end - start - 1
                place = slice(at, at + length)
                tokens[row, place] = self._tokens[start : end - 1]
                chosen = self._trained[start + 1 : end] == 1
                targets[row, place] = np.where(chosen, self._tokens[start + 1 : end], IGNORED)
                documents[row, place] = document
                at += length
        return tokens, documents, targets


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Pack items into bins of size `size` by best fit decreasing, and return the item indices in each bin.

    Items of length 0 are omitted.  The result is deterministic.  The number of bins is at most 11/9 times the
    optimum, plus 4 (Johnson et al., 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms").
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # by remaining space
    spaces: list[int] = []  # sorted
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        if length <= 0:
            continue
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            chosen, space = len(bins), size
            bins.append([])
        else:
            space = spaces[at]
            chosen = open_bins[space].pop()
            if not open_bins[space]:
                del open_bins[space], spaces[at]
        bins[chosen].append(number)
        left = space - length
        if left:
            if left not in open_bins:
                bisect.insort(spaces, left)
                open_bins[left] = []
            open_bins[left].append(chosen)
    return bins


@dataclass(frozen=True)
class Chat:
    """The training and validation conversations, the tokenizer and the template."""

    folder: Path
    tokenizer: Tokenizer
    template: Template | None
    train: Conversations
    validation: Conversations
    end: int | None
    """The token that ends the assistant's messages; None if the tokenizer has no end-of-sequence token."""


def prepare_chat(
    path: str,
    folder: Path,
    *,
    context: int,
    vocabulary: int,
    field: str = "messages",
    template: str = "",
    validation_share: float = 0.02,
    cache: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> Chat:
    """Tokenize the conversations at `path` if they are not cached, and memory-map the tokens.

    Args:
        path: a JSON lines, Parquet or Arrow file, or a folder of such files (`find_source`).
        folder: the model folder, with `tokenizer.json` and a chat template.
        context: the number of tokens in a window.
        vocabulary: the number of tokens in the model's vocabulary.
        field: the field that contains the messages.
        template: a chat template to use instead of the template in `folder` (`find_template`).
        validation_share: the fraction of the conversations used for validation.
        cache: the cache folder; by default, the user's cache folder.
        progress: a function called with the current activity and its completed fraction.

    Raises:
        DataError: if the data, the tokenizer or the template is missing or invalid.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json: save the model's tokenizer in this folder{see('has-no-tokenizerjson')}"
        )
    try:
        tokenizer = load_tokenizer(file)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"cannot load the tokenizer {file}: {error}; check or restore the file") from None
    source = find_source(path, field)
    found: Template | None = None
    missing = ""
    try:
        found = find_template(folder, template)
    except DataError as error:
        missing = str(error)
    end = token_text(read_tokenizer_config(folder), "eos_token")
    settings: dict[str, object] = {
        "chat": 2,
        "template": found.source if found else None,
        "tokens": found.tokens if found else None,
        "end": end,
        "share": validation_share,
        "tokenizer": file.read_text(encoding="utf-8"),
    }
    key = content_key(source, settings, progress)
    encoder = _Encoder(tokenizer, found, missing, field, end)

    def build(target: Path) -> None:
        _build(source, target, encoder, validation_share, progress)

    saved = cached_folder((cache or default_cache()) / "chats", key, build, FILES, path=path)
    tokens = np.memmap(saved / "tokens.bin", np.int32, "r")
    if int(tokens.max()) >= vocabulary:
        raise DataError(
            f"{file} contains token {int(tokens.max())}, but the model's vocabulary has only {vocabulary} tokens; "
            "use the model's tokenizer"
        )
    trained = np.memmap(saved / "trained.bin", np.uint8, "r")
    ends = np.fromfile(saved / "ends.bin", np.int64)
    held_out = np.fromfile(saved / "held_out.bin", np.uint8)
    spans = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    long = sum(b - a > context + 1 for a, b in spans)
    if long:
        _log.warning(
            "truncated %d of %s to model.context=%d tokens; increase model.context to keep the complete texts",
            long,
            counted(len(spans), "conversation"),
            context,
        )
    parts = []
    for wanted in (0, 1):
        chosen = [
            span
            for span, held in zip(spans, held_out, strict=True)
            if held == wanted and trained[span[0] + 1 : min(span[1], span[0] + context + 1)].any()
        ]
        if not chosen:
            raise DataError(
                f"data.path={path}: no {('training', 'validation')[wanted]} conversation has an answer within "
                f"model.context={context} tokens; expected at least two conversations with answers; add conversations, "
                "or increase model.context"
            )
        parts.append(Conversations(tokens, trained, chosen, context))
    number = tokenizer.token_to_id(end) if end is not None else None
    return Chat(saved, tokenizer, found, parts[0], parts[1], number)


class _Encoder:
    """Converts records to tokens, and marks the tokens that the model is trained to predict."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None, missing: str, field: str, end: str | None
    ) -> None:
        self._tokenizer, self._template, self._missing = tokenizer, template, missing
        self.field, self._end = field, end

    def texts(self, where: str, record: Mapping[str, Any]) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return a record's texts, each with the character ranges to train on; `where` is for error messages."""
        if self.field in record:
            messages = record[self.field]
            if isinstance(messages, str):  # JSON text in a column
                messages = _parsed(where, self.field, messages)
            self._check(where, messages)
            if self._template is None:
                raise DataError(self._missing)
            tools = record.get("tools")
            if isinstance(tools, str):
                tools = _parsed(where, "tools", tools)
            try:
                found = self._template.answers(messages, **({"tools": tools} if tools else {}))
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
            if not found:
                raise DataError(
                    f'{where}: expected a message with role "assistant", found none; remove the record'
                )
            return found
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion + (self._end or "")
            return [(text, [(len(prompt), len(text))])]
        raise DataError(
            f'{where}: expected a field "{self.field}" with messages, or the fields "prompt" and "completion", found: '
            f"{', '.join(record)}; choose a field with data.field=NAME"
        )

    def _check(self, where: str, messages: Any) -> None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(
                f'{where}: expected a list of messages in "{self.field}", found {type(messages).__name__}; choose a field '
                "with data.field=NAME"
            )
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
                has_text = isinstance(message.get("role", ""), str)
                fields = (", ".join(message) or "no fields") if has_text else f"role={message['role']!r}"
                raise DataError(
                    f'{where}: expected "role" and "content" in message {number}, found {fields}; correct the record'
                )

    def encode(self, texts: list[tuple[str, list[tuple[int, int]]]]) -> Iterator[tuple[NDArray, NDArray]]:
        """Yield each text's tokens, and one flag per token: 1 if the token overlaps a range to train on, else 0."""
        encodings = self._tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        for (_, spans), encoding in zip(texts, encodings, strict=True):
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            trained = np.zeros(len(starts), np.uint8)
            for start, end in spans:
                trained[(ends > start) & (starts < end)] = 1
            yield np.array(encoding.ids, np.int32), trained


def _parsed(where: str, field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where}: expected JSON in "{field}": {error}; correct the record') from None


def _build(source: Source, folder: Path, encoder: _Encoder, share: float, progress: Progress) -> None:
    """Tokenize the conversations in `source`, and write the files of a cache entry to `folder`."""
    ends: list[int] = []
    held_out: list[bool] = []
    total = 0
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as flags:
        for texts in _batches(source, encoder):
            for (text, _), (ids, trained) in zip(texts, encoder.encode(texts), strict=True):
                tokens.write(ids.tobytes())
                flags.write(trained.tobytes())
                total += len(ids)
                ends.append(total)
                held_out.append(uniform_hash(text) < share)
            progress("encoding conversations", 0.5)
    if not total:
        found = "only empty texts" if ends else "no records"
        raise DataError(f"{source.root}: expected conversations, found {found}; check data.path")
    if len(ends) > 1 and not 0 < sum(held_out) < len(
        ends
    ):  # too few conversations for a random split: use the last ones for validation
        count = max(1, round(share * len(ends)))
        held_out = [number >= len(ends) - count for number in range(len(ends))]
    np.array(ends, np.int64).tofile(folder / "ends.bin")
    np.array(held_out, np.uint8).tofile(folder / "held_out.bin")


def _batches(source: Source, encoder: _Encoder) -> Iterator[list[tuple[str, list[tuple[int, int]]]]]:
    batch: list[tuple[str, list[tuple[int, int]]]] = []
    for where, record in source.records():
        batch += encoder.texts(where, record)
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
