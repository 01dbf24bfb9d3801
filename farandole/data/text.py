"""Text to samples of tokens: read, tokenize once, map into memory, cut into windows.

    text = prepare_text("stdlib", vocabulary=4096, context=256)
    text.train.samples                            # how many windows
    text.train.read(np.array([0, 5]))             # (2, 257) tokens: inputs and, one further, targets

Every rank calls `prepare_text`; one per host does the work and the others wait (see `cache`).
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

from farandole.data.cache import Progress, content_key, default_cache, entry
from farandole.data.errors import DataError
from farandole.data.sources import STANDARD_LIBRARY, Source, find_source
from farandole.data.tokenizer import (
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    check_special_tokens,
    cut,
    load_tokenizer,
    train_tokenizer,
)
from farandole.data.wording import counted

_PIECES_AT_ONCE = 512
_TOKENIZER_BYTES = 100 << 20
"""A tokenizer learns from at most about this much text, taken evenly: more changes it very little."""


@dataclass(frozen=True)
class Windows:
    """A stream of tokens as samples: window i is tokens i C to (i + 1) C, and one more as last target."""

    tokens: NDArray[np.unsignedinteger]
    context: int

    @property
    def samples(self) -> int:
        """How many whole windows there are."""
        return max(0, (len(self.tokens) - 1) // self.context)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.read(np.array([index]))[0]

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows at `indices`, (len(indices), context + 1)."""
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        return self.tokens[places].astype(np.int64)


@dataclass(frozen=True)
class Text:
    """Tokenized text: two streams that share no piece of text, and the tokenizer they were made with."""

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
    cache: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> Text:
    """Tokenize the text at `path`, or find it tokenized in the cache, and map it into memory.

    The vocabulary has `special_tokens` besides the end of text, such as `tokenizer.MASK`; where the text has their
    names they are text.  Raises `DataError` when there is no readable text, too little of it, or no place for the
    cache, and for special tokens that cannot be.
    """
    check_special_tokens(special_tokens)
    smallest = SMALLEST_VOCABULARY + len(special_tokens)
    if not smallest <= vocabulary <= 1 << 24:
        more = f" with {counted(len(special_tokens), 'special token')} more" if special_tokens else ""
        raise DataError(f"a byte-level vocabulary{more} has {smallest} to 2^24 tokens, not {vocabulary}")
    source = find_source(path, text_field)
    settings: dict[str, object] = {"vocabulary": vocabulary, "validation_share": validation_share}
    if special_tokens:  # otherwise entries of the cache keep the names that they have
        settings["special_tokens"] = list(special_tokens)
    key = content_key(source, settings, progress)

    def build(folder: Path) -> None:
        _build(source, folder, vocabulary, validation_share, special_tokens, progress)

    folder = entry((cache or default_cache()) / "tokens", key, build)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dtype = _dtype(vocabulary)
    parts = {}
    for name in ("train", "validation"):
        count = (folder / f"{name}.bin").stat().st_size // dtype.itemsize
        if count <= context:
            raise DataError(
                f"data.path={path}: {counted(count, 'token')} for {name}, fewer than one window of "
                f"model.context={context} and its target; name more text, or lower model.context"
            )
        parts[name] = Windows(np.memmap(folder / f"{name}.bin", dtype, "r"), context)
    return Text(folder, tokenizer, parts["train"], parts["validation"])


def _build(
    source: Source,
    folder: Path,
    vocabulary: int,
    share: float,
    special_tokens: Sequence[str],
    progress: Progress,
) -> None:
    """Write a cache entry's files to `folder`."""
    total = max(1, source.size)
    stride = 1 + total // _TOKENIZER_BYTES
    sample = islice(_pieces(source, "learning tokens", progress), 0, None, stride)
    tokenizer = train_tokenizer((piece.text for piece in sample), vocabulary, special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = bool(special_tokens)  # a text that says [MASK] masks nothing

    dtype = _dtype(vocabulary)
    end = tokenizer.token_to_id(END_OF_TEXT)
    counts = {"train": 0, "validation": 0}
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        for pieces in _batches(_pieces(source, "encoding text", progress)):
            encodings = tokenizer.encode_batch([piece.text for piece in pieces])
            for piece, encoding in zip(pieces, encodings, strict=True):
                held_out = _draw(piece.text) < share
                tokens = np.array([*encoding.ids, end] if piece.last else encoding.ids, dtype)
                (validation if held_out else train).write(tokens.tobytes())
                counts["validation" if held_out else "train"] += len(tokens)
    if sum(counts.values()) == 0:
        raise DataError(f"{source.root}: no text found, only white space")
    if counts["validation"] < share * sum(counts.values()) / 4:  # too few pieces for chance to be fair
        _hold_out_the_end(folder, dtype, share)


class _Piece(NamedTuple):
    """A part of a document, small enough that chance gives validation its share of the text."""

    text: str
    last: bool
    """Whether the document ends with it."""


def _pieces(source: Source, what: str, progress: Progress) -> Iterator[_Piece]:
    total, done = max(1, source.size), 0
    for document in source.documents():
        left = len(document)
        for text in cut(document):
            left -= len(text)
            yield _Piece(text, last=left == 0)
        done += len(document)
        progress(what, min(1.0, done / total))


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    remaining = iter(pieces)
    while batch := list(islice(remaining, _PIECES_AT_ONCE)):
        yield batch


def _draw(piece: str) -> float:
    """A number in [0, 1) that depends on the piece alone: equal pieces fall on the same side."""
    digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _hold_out_the_end(folder: Path, dtype: np.dtype[np.unsignedinteger], share: float) -> None:
    """For small texts: put the two streams together again and hold out the last `share` of the tokens."""
    tokens = np.concatenate([np.fromfile(folder / f"{name}.bin", dtype) for name in ("train", "validation")])
    border = len(tokens) - max(1, round(share * len(tokens)))
    tokens[:border].tofile(folder / "train.bin")
    tokens[border:].tofile(folder / "validation.bin")


def _dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
