"""A byte-level BPE tokenizer, as in GPT-2, trained on the text with the `tokenizers` library.

The tokenizer can encode any text, and decoding restores the original bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from farandole.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""The token at the end of every document; in tokenizers trained by `train_tokenizer`, its id is 0."""

MASK, PAD = "[MASK]", "[PAD]"
"""Optional special tokens for masked positions and for padding."""

SMALLEST_VOCABULARY = 257
"""The number of tokens that every vocabulary needs: one for each of the 256 byte values, and the end of text."""

CHUNK_CHARACTERS = 1 << 13


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer with `vocabulary` tokens (at least 257) on `texts`.

    The result is deterministic.  The vocabulary includes the `special_tokens`, as tokens 1, 2, and so on.
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
    """Raise `DataError` if special tokens are duplicated or could be learned from text.

    Training can learn any name that the pre-tokenizer does not split, so a name must consist of several
    pre-tokens.
    """
    for index, name in enumerate(special_tokens):
        if name == END_OF_TEXT or name in special_tokens[:index]:
            raise DataError(
                f"duplicate special token {name!r}: list each token once, and omit {END_OF_TEXT!r}, which is always "
                f"included"
            )
        if len(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(name)) < 2:
            raise DataError(
                f"special token {name!r} could be learned from text; use a name such as '[{name}]'"
            )


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a `tokenizer.json`; ignore any truncation and padding settings in the file."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # transformers saves the settings of the last call
    tokenizer.no_padding()
    return tokenizer


def split_document(document: str) -> Iterator[str]:
    """Yield chunks of at most `CHUNK_CHARACTERS` characters, split after line ends if possible."""
    start = 0
    while start < len(document):
        end = min(start + CHUNK_CHARACTERS, len(document))
        if end < len(document):
            line_end = document.rfind("\n", start, end)
            end = line_end + 1 if line_end > start else end
        yield document[start:end]
        start = end
