"""Packed documents and padding in models from Hugging Face folders, compared with `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farandole.models.hf import from_pretrained
from farandole.models.sequence import SequenceInfo
from tests.models.hf.compare import close, compare_loss, tokens_for
from tests.models.hf.families import DECODERS, ROPES, ROTARY, folder_of, reference, with_rope

LENGTHS = (5, 1, 9, 4)
PADDING = -1
"""The document number of padding."""

KINDS = [(family, kind) for family in ROTARY for kind in ROPES] + [("gpt2", ""), ("gptj", "")]
"""Decoders and their rotary positions."""


def documents_of(rows: Sequence[Sequence[int]], left: bool = False) -> Tensor:
    """Return the document numbers (rows, positions) of rows with documents of these lengths, and padding."""
    positions = max(map(sum, rows))
    found = torch.full((len(rows), positions), PADDING)
    for row, lengths in zip(found, rows, strict=True):
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        place = slice(positions - len(numbers), None) if left else slice(len(numbers))
        row[place] = numbers
    return found


def masked_targets(targets: Tensor, documents: Tensor) -> Tensor:
    """Ignore padding and some of the other targets."""
    ignored = (documents == PADDING) | (targets % 5 == 0)
    ignored[0, (documents[0] != PADDING).nonzero()[0]] = False  # one target remains
    return targets.masked_fill(ignored, -100)


def separate_logits(theirs: Any, tokens: Tensor, documents: Tensor) -> Tensor:
    """Return the logits of all documents, each computed as a separate sequence.  Padding has logits of 0."""
    rows = []
    for row, numbers in zip(tokens, documents, strict=True):
        parts = [(row[numbers == number], int(number)) for number in numbers.unique_consecutive()]
        logits = [
            torch.zeros(1, len(part), theirs.config.vocab_size)
            if number == PADDING
            else theirs(part[None]).logits
            for part, number in parts
        ]
        rows.append(torch.cat(logits, 1))
    return torch.cat(rows)


def compare_documents(ours: Any, theirs: Any, documents: Tensor, seed: int, folder: Path) -> None:
    """Compare logits, loss and gradients of packed documents with those of separate sequences."""
    tokens, targets = (tokens_for(theirs, *documents.shape, seed=seed + number) for number in range(2))
    logits = separate_logits(theirs, tokens, documents)
    real = documents != PADDING
    info = SequenceInfo(documents=documents)
    close(ours(tokens, info)[real], logits[real])
    compare_loss(ours, theirs, (tokens, info, masked_targets(targets, documents)), logits, folder)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_packed_documents_equal_separate_sequences(family: str, kind: str, tmp_path: Path) -> None:
    theirs = reference(family, 1, **(with_rope(family, kind) if kind else {}))
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    compare_documents(ours, theirs, documents_of([LENGTHS]), 0, tmp_path / "b")
    compare_documents(ours, theirs, documents_of([LENGTHS, (9, 1, 1, 1, 7)]), 1, tmp_path / "b")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_packed_documents_around_the_original_context(family: str, kind: str, tmp_path: Path) -> None:
    """transformers scales all packed documents by the longest, which here exceeds the original context."""
    theirs = reference(family, 1, **with_rope(family, kind))
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    info = SequenceInfo(documents=documents_of([(5, 70, 20)]))
    tokens, targets = (tokens_for(theirs, 1, 95, seed=seed) for seed in range(2))
    positions = info.positions_of(95, tokens.device)
    logits = theirs(tokens, position_ids=positions, use_cache=False).logits
    close(ours(tokens, info), logits)
    compare_loss(ours, theirs, (tokens, info, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "mixtral"])
def test_packed_documents_with_windows(family: str, tmp_path: Path) -> None:
    windows = {
        "sliding_window": 3,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "num_hidden_layers": 2,
    }
    if family in ("mistral", "mixtral"):
        windows = {"sliding_window": 3, "num_hidden_layers": 1}
    theirs = reference(family, 1, **windows)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    assert any(ours.config.windows)
    compare_documents(ours, theirs, documents_of([LENGTHS, (19,)]), 0, tmp_path / "b")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_padding_changes_nothing(family: str, left: bool, tmp_path: Path) -> None:
    """Compare with the attention mask of transformers, for one batch with padding."""
    theirs = reference(family, 1)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    documents = documents_of([(7,), (12,)], left)
    real = documents != PADDING
    tokens, targets = (tokens_for(theirs, 2, 12, seed=seed) for seed in range(2))
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    logits = theirs(tokens, attention_mask=real.long(), position_ids=positions, use_cache=False).logits
    info = SequenceInfo(documents=documents)
    close(ours(tokens, info)[real], logits[real])
    arguments = (tokens, info, targets.masked_fill(~real, -100))
    compare_loss(ours, theirs, arguments, logits, tmp_path / "b")


# ---- random documents and padding ----

ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3)
few = settings(max_examples=12, derandomize=True, deadline=None, database=None)


@cache
def _pair(family: str) -> tuple[Any, Any, Path]:
    """Return equal models of this package and of transformers, and a folder for gradients."""
    folder = Path(mkdtemp())
    theirs = reference(family, 3)
    return from_pretrained(folder_of(theirs, folder / "a")).eval(), theirs, folder / "b"


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
@few
@given(ROWS, st.booleans(), st.integers(0, 99))
def test_random_documents_and_padding(family: str, rows: list[list[int]], left: bool, seed: int) -> None:
    ours, theirs, folder = _pair(family)
    compare_documents(ours, theirs, documents_of(rows, left), seed, folder)


LENGTH_PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3)


@few
@given(st.lists(LENGTH_PAIRS, min_size=1, max_size=2), st.integers(0, 99))
def test_random_documents_of_t5(rows: list[list[tuple[int, int]]], seed: int) -> None:
    """Each document has a source and a target, which attends to the source of the same document."""
    ours, theirs, folder = _pair("t5")
    there, here = (documents_of([[pair[side] for pair in row] for row in rows]) for side in range(2))
    source, target, labels = (
        tokens_for(theirs, *documents.shape, seed=seed + number)
        for number, documents in enumerate((there, here, here))
    )
    logits = torch.zeros(*here.shape, theirs.config.vocab_size)
    for number, row in enumerate(rows):
        for document in range(len(row)):
            inputs, outputs = (each[number] == document for each in (there, here))
            found = theirs(
                input_ids=source[number : number + 1, inputs],
                decoder_input_ids=target[number : number + 1, outputs],
            )
            logits[number, outputs] = found.logits[0]
    info = SequenceInfo(documents=here, source=SequenceInfo(documents=there))
    real = here != PADDING
    close(ours((source, target), info)[real], logits[real])
    compare_loss(ours, theirs, ((source, target), info, masked_targets(labels, here)), logits, folder)
