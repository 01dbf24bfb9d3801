"""Labeled texts (texts with classes) as training samples: tokenized once and memory-mapped.

A record has a field for the text and a field for its class.  A class is a string or an integer.

    data = prepare_labeled("reviews.jsonl", tokenizer, context=256, vocabulary=30522)
    data.classes                                     # ["bad", "good"]
    tokens, labels = data.train.read(np.array([0, 5]))
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farandole.data.cache import Progress, cached_folder, content_key, default_cache
from farandole.data.errors import DataError
from farandole.data.sampler import permute
from farandole.data.sources import Source, find_source
from farandole.data.tokenizer import load_tokenizer

FILES = ("tokens.bin", "ends.bin", "labels.bin", "classes.json")
"""Token ids (int32), the ends of texts (int64), the class indices of texts (int64), and the names of the classes."""

_BATCH = 1024


@dataclass(frozen=True)
class LabeledTexts:
    """Tokenized texts and their class indices.

    Args:
        tokens: the tokens of all texts, concatenated.
        starts: for each text, the index of its first token.
        ends: for each text, the index after its last token.
        labels: for each text, the index of its class.
        padding: the token that pads shorter texts in `read`.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    padding: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], int]:
        return self.tokens[self.starts[index] : self.ends[index]].astype(np.int64), int(self.labels[index])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each text."""
        return self.ends - self.starts

    def read(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens (n, positions) and the class indices (n) of the n texts at the indices `numbers`.

        Shorter texts are padded to the length of the longest text.
        """
        tokens = np.full((len(numbers), int(self.lengths[numbers].max())), self.padding, np.int64)
        for row, number in zip(tokens, numbers, strict=True):
            values = self.tokens[self.starts[number] : self.ends[number]]
            row[: len(values)] = values
        return tokens, self.labels[numbers]


@dataclass(frozen=True)
class Labeled:
    """Texts for training and validation, and the names of their classes."""

    classes: list[str | int]
    train: LabeledTexts
    validation: LabeledTexts


def prepare_labeled(
    path: str,
    tokenizer: Path,
    *,
    context: int,
    vocabulary: int,
    field: str = "text",
    label: str = "label",
    padding: int = 0,
    validation_share: float = 0.02,
    cache: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> Labeled:
    """Tokenize the texts at `path` if they are not cached, and memory-map the tokens.

    Args:
        path: a JSON lines, Parquet or Arrow file, or a folder of such files (`find_source`).
        tokenizer: the path of a `tokenizer.json`.
        context: the maximum number of tokens in a text; longer texts are truncated.
        vocabulary: the number of tokens in the model's vocabulary.
        field, label: the names of the fields that contain the text and its class.
        padding: the token that pads shorter texts.
        validation_share: the fraction of the texts used for validation.
        cache: the cache folder; by default, the user's cache folder.
        progress: a function called with the current activity and its completed fraction.

    Raises:
        DataError: if the data or the tokenizer is missing or invalid.
    """
    try:
        encoder = load_tokenizer(tokenizer)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"cannot load the tokenizer {tokenizer}: {error}; check or restore the file"
        ) from None
    encoder.enable_truncation(context)
    source = find_source(path, field)
    settings: dict[str, object] = {
        "labeled": 1,
        "label": label,
        "context": context,
        "tokenizer": tokenizer.read_text(encoding="utf-8"),
    }
    key = content_key(source, settings, progress)

    def build(folder: Path) -> None:
        _build(source, folder, encoder, field, label, progress)

    folder = cached_folder((cache or default_cache()) / "labeled", key, build, FILES, path=path)
    classes: list[str | int] = json.loads((folder / "classes.json").read_text())
    if len(classes) < 2:
        raise DataError(
            f"data.path={path}: expected two or more classes, found {len(classes)}; set data.label=NAME to the "
            "field that contains the class"
        )
    tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
    if (largest := int(tokens.max())) >= vocabulary:
        raise DataError(
            f"{tokenizer} contains token {largest}, but the model's vocabulary has only {vocabulary} tokens; use the "
            "model's tokenizer"
        )
    ends = np.fromfile(folder / "ends.bin", np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    labels = np.fromfile(folder / "labels.bin", np.int64)
    order = permute(np.arange(len(ends)), len(ends), 0, 0)
    held_out = max(1, round(validation_share * len(ends)))
    validation, train = (
        LabeledTexts(tokens, starts[part], ends[part], labels[part], padding)
        for part in (order[:held_out], order[held_out:])
    )
    return Labeled(classes, train, validation)


def _build(
    source: Source, folder: Path, encoder: Tokenizer, field: str, label: str, progress: Progress
) -> None:
    """Tokenize the texts in `source`, and write the files of a cache entry to `folder`."""
    records = _records(source, field, label)
    ends: list[int] = []
    names: list[str | int] = []
    total = 0
    with (folder / "tokens.bin").open("wb") as file:
        while batch := list(islice(records, _BATCH)):
            for encoding in encoder.encode_batch([text for text, _ in batch]):
                file.write(np.array(encoding.ids, np.int32).tobytes())
                total += len(encoding.ids)
                ends.append(total)
            names += [name for _, name in batch]
            progress("encoding texts", 0.5)
    if not total:
        raise DataError(f"{source.root}: expected texts, found none; check data.path")
    classes = sorted(set(names), key=lambda name: (isinstance(name, str), name))
    numbers = {name: number for number, name in enumerate(classes)}
    np.array(ends, np.int64).tofile(folder / "ends.bin")
    np.array([numbers[name] for name in names], np.int64).tofile(folder / "labels.bin")
    (folder / "classes.json").write_text(json.dumps(classes))


def _records(source: Source, field: str, label: str) -> Iterator[tuple[str, str | int]]:
    for where, record in source.records((field, label)):
        text, name = record.get(field), record.get(label)
        if not isinstance(text, str) or not isinstance(name, str | int):
            raise DataError(
                f'{where}: expected text in "{field}" and a class in "{label}"; the record has these fields: '
                f"{', '.join(record)}; select fields with data.field=NAME and data.label=NAME"
            )
        yield text, name
