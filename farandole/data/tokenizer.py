"""A byte-level BPE tokenizer, trained on the text itself with the `tokenizers` library.

Byte-level (as in GPT-2): every text has tokens, and decoding gives the same bytes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from farandole.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""Stands after every document; token 0."""

MASK, PAD = "[MASK]", "[PAD]"
"""Special tokens of models that restore masked tokens and that fill windows up, if they are asked for."""

SMALLEST_VOCABULARY = 257
"""256 bytes and the end of text."""

PIECE_CHARACTERS = 1 << 13


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Learn `vocabulary` tokens (at least 257) from `texts`; the result depends on nothing else.

    `special_tokens`, which count among them, become tokens 1, 2 and so on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """`DataError` for names that are there twice, or that text could turn into (one word, or one mark)."""
    for index, name in enumerate(special_tokens):
        if name == END_OF_TEXT or name in special_tokens[:index]:
            raise DataError(f"special token {name!r} is there twice; {END_OF_TEXT!r} always is")
        if len(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(name)) < 2:
            raise DataError(
                f"special token {name!r} could be learned from text; put it into brackets: '[{name}]'"
            )


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`."""
    return Tokenizer.from_file(str(path))


def cut(document: str) -> Iterator[str]:
    """Pieces of at most 8 Ki characters, cut after line ends where there are any.

    Pieces are what is encoded in parallel and what is assigned to training or validation.
    """
    start = 0
    while start < len(document):
        end = min(start + PIECE_CHARACTERS, len(document))
        if end < len(document):
            line_end = document.rfind("\n", start, end)
            end = line_end + 1 if line_end > start else end
        yield document[start:end]
        start = end
