"""Tokenize text once, map the tokens into memory, and read them in windows.

    text = prepare_text("stdlib", vocabulary=4096, context=256)
    text.train.samples                            # the number of windows
    text.train.read(np.array([0, 5]))             # (2, 257) tokens: inputs, and targets shifted by one

All ranks call `prepare_text`.  One rank per host tokenizes the text while the other ranks wait (see `cache`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farandole.data.cache import Progress, cached_folder, content_digest, default_cache, entry_key
from farandole.data.errors import DataError
from farandole.data.sources import STANDARD_LIBRARY, Source, find_source
from farandole.data.tokenizer import (
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    check_special_tokens,
    load_tokenizer,
    split_document,
    train_tokenizer,
)
from farandole.data.wording import counted

_BATCH_CHUNKS = 512
_TOKENIZER_BYTES = 100 << 20
"""The approximate maximum size in bytes of the text on which a tokenizer is trained.

A larger text is sampled evenly, because more text has little effect.
"""


@dataclass(frozen=True)
class Windows:
    """A stream of tokens, read in windows of C + 1 tokens, where C is `context`.

    Window i starts at token i * C, so the last token of a window is also the first token of the next window.
    """

    tokens: NDArray[np.unsignedinteger]
    context: int

    @property
    def samples(self) -> int:
        """Return the number of complete windows."""
        return max(0, (len(self.tokens) - 1) // self.context)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.read(np.array([index]))[0]

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows at `indices`, of shape (len(indices), context + 1)."""
        positions = indices[:, None] * self.context + np.arange(self.context + 1)
        return self.tokens[positions].astype(np.int64)


@dataclass(frozen=True)
class Text:
    """Tokenized text: disjoint streams for training and validation, and the tokenizer."""

    folder: Path
    tokenizer: Tokenizer
    train: Windows
    validation: Windows


def prepare_text(
    path: str = STANDARD_LIBRARY,
    *,
    vocabulary: int,
    context: int,
    text_field: str = "text",
    validation_share: float = 0.02,
    special_tokens: Sequence[str] = (),
    tokenizer: Path | None = None,
    end: str = END_OF_TEXT,
    cache: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> Text:
    """Tokenize the text at `path` if it is not cached, and memory-map the tokens.

    Args:
        path: "stdlib", a file or a folder (`find_source`).
        vocabulary: the number of tokens in the vocabulary; with `tokenizer`, the maximum number.
        context: the number of input tokens in a window.
        text_field: the JSON field, or the Parquet or Arrow column, that contains the text.
        validation_share: the fraction of the text used for validation, above 0 and below 1.
        special_tokens: tokens to add to the vocabulary, such as `tokenizer.MASK`.  If a token's name occurs in the
            text, the name is encoded as ordinary text.
        tokenizer: the `tokenizer.json` to use; by default, a tokenizer is trained on the text.
        end: the token that ends a document.
        cache: the cache folder; by default, the user's cache folder.
        progress: a function called with the current activity and its completed fraction.

    Raises:
        DataError: if the text is missing, unreadable or too short, the cache cannot be written, or the tokenizer or an argument
            is invalid.
    """
    if not 0 < validation_share < 1:
        raise DataError(f"expected validation_share above 0 and below 1, got {validation_share}")
    check_special_tokens(special_tokens)
    smallest = SMALLEST_VOCABULARY + len(special_tokens)
    if not smallest <= vocabulary <= 1 << 24:
        more = f" + {counted(len(special_tokens), 'special token')}" if special_tokens else ""
        raise DataError(
            f"expected a vocabulary size from {smallest} ({SMALLEST_VOCABULARY} byte-level tokens{more}) to 2^24, got "
            f"{vocabulary}"
        )
    source = find_source(path, text_field)
    settings: dict[str, object] = {"vocabulary": vocabulary, "validation_share": validation_share}
    if special_tokens:  # does not change the keys of entries without special tokens
        settings["special_tokens"] = list(special_tokens)
    content, root = content_digest(source, progress), (cache or default_cache()) / "tokens"
    key = entry_key(content, settings)
    if tokenizer is not None:
        given = _check_tokenizer(tokenizer, vocabulary, (end, *special_tokens))
        if end != END_OF_TEXT or not _is_file_with(root / key / "tokenizer.json", given):
            settings["tokenizer"] = given
            if end != END_OF_TEXT:
                settings["end"] = end
            key = entry_key(content, settings)

    def build(folder: Path) -> None:
        _build(source, folder, vocabulary, validation_share, special_tokens, tokenizer, end, progress)

    folder = cached_folder(root, key, build, path=path)
    dtype = _dtype(vocabulary)
    parts = {}
    for name in ("train", "validation"):
        count = (folder / f"{name}.bin").stat().st_size // dtype.itemsize
        if count <= context:
            raise DataError(
                f"data.path={path}: expected at least {context + 1} tokens in the {name} split (one window of "
                f"model.context={context}), found {counted(count, 'token')}; use more text, or reduce model.context"
            )
        parts[name] = Windows(np.memmap(folder / f"{name}.bin", dtype, "r"), context)
    return Text(folder, load_tokenizer(folder / "tokenizer.json"), parts["train"], parts["validation"])


def _is_file_with(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _check_tokenizer(path: Path, vocabulary: int, special_tokens: Sequence[str]) -> str:
    """Validate a `tokenizer.json`, and return its content."""
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"cannot load the tokenizer {path}: {error}; check or restore the file") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocabulary:
        raise DataError(
            f"tokenizer {path} contains token {largest}, but model.vocabulary={vocabulary}; use "
            f"model.vocabulary={largest + 1}"
        )
    for token in special_tokens:
        if tokenizer.token_to_id(token) is None:
            raise DataError(
                f"tokenizer {path} has no token {token}, which this task requires; use another tokenizer"
            )
    return path.read_text(encoding="utf-8")


def _build(
    source: Source,
    folder: Path,
    vocabulary: int,
    share: float,
    special_tokens: Sequence[str],
    tokenizer_file: Path | None,
    end_of_text: str,
    progress: Progress,
) -> None:
    """Train or load a tokenizer, tokenize `source`, and write the files of a cache entry to `folder`."""
    if tokenizer_file is not None:
        tokenizer = load_tokenizer(tokenizer_file)
    else:
        stride = 1 + source.size // _TOKENIZER_BYTES
        sample = islice(_chunks(source, "learning tokens", progress), 0, None, stride)
        tokenizer = train_tokenizer((chunk.text for chunk in sample), vocabulary, special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = bool(special_tokens)  # encode "[MASK]" in the text as ordinary text

    dtype = _dtype(vocabulary)
    end = tokenizer.token_to_id(end_of_text)
    counts = {"train": 0, "validation": 0}
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        for chunks in _batches(_chunks(source, "encoding text", progress)):
            encodings = tokenizer.encode_batch([chunk.text for chunk in chunks], add_special_tokens=False)
            for chunk, encoding in zip(chunks, encodings, strict=True):
                held_out = uniform_hash(chunk.text) < share
                tokens = np.array([*encoding.ids, end] if chunk.last else encoding.ids, dtype)
                (validation if held_out else train).write(tokens.tobytes())
                counts["validation" if held_out else "train"] += len(tokens)
    if sum(counts.values()) == 0:
        raise DataError(f"{source.root}: expected text, found only whitespace; check data.path")
    if counts["validation"] < share * sum(counts.values()) / 4:  # too few chunks for a random split
        _hold_out_end(folder, dtype, share)


class _Chunk(NamedTuple):
    """A part of a document."""

    text: str
    last: bool
    """Whether this part is the last part of the document."""


def _chunks(source: Source, what: str, progress: Progress) -> Iterator[_Chunk]:
    total, done = max(1, source.size), 0
    for document in source.documents():
        left = len(document)
        for text in split_document(document):
            left -= len(text)
            yield _Chunk(text, last=left == 0)
        done += len(document)
        progress(what, min(1.0, done / total))


def _batches(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    remaining = iter(chunks)
    while batch := list(islice(remaining, _BATCH_CHUNKS)):
        yield batch


def uniform_hash(text: str) -> float:
    """Return a hash of `text` as a number in [0, 1).

    Equal chunks get the same number, so no chunk is in both training and validation.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _hold_out_end(folder: Path, dtype: np.dtype[np.unsignedinteger], share: float) -> None:
    """Concatenate the training and validation tokens, and use the last fraction `share` for validation."""
    tokens = np.concatenate([np.fromfile(folder / f"{name}.bin", dtype) for name in ("train", "validation")])
    end = len(tokens) - max(1, round(share * len(tokens)))
    tokens[:end].tofile(folder / "train.bin")
    tokens[end:].tofile(folder / "validation.bin")


def _dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
