"""Propose the next tokens of sequences with a small draft model.

The draft model has a separate KV cache.  To propose tokens, the draft model first computes the tokens that were
added to a sequence since the last proposal, and then generates the most likely tokens.  Each pass generates one token
per sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farandole.serve.admission import StepTimes
from farandole.serve.folder import ModelFolder, read_model
from farandole.serve.request import RequestError
from farandole.serve.runner import Runner, Span
from farandole.serve.store import Blocks, Store

PASS = 256
"""The maximum number of tokens per pass; with more sequences than this, each sequence has one token per pass."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model and its context length.

    Args:
        runner: the runner of the draft model.
        context: the maximum number of tokens in a sequence.
    """

    runner: Runner
    context: int


@dataclass(eq=False)
class Drafted:
    """A sequence for which the draft model proposes tokens.

    Args:
        tokens: the sequence's tokens; the caller appends new tokens.
        most: the maximum number of positions.
        blocks: the sequence's blocks in the draft model's store, allocated at the first proposal.
        computed: the number of the sequence's tokens in the draft model's KV cache.
    """

    tokens: Sequence[int]
    most: int
    blocks: Blocks | None = None
    computed: int = 0


class DraftProposer:
    """Proposes the tokens that a draft model considers most likely.

    Args:
        model: the draft model.
        store: the draft model's KV cache.
        vocabulary: the number of tokens in the served model's vocabulary.
    """

    def __init__(self, model: DraftModel, store: Store, vocabulary: int) -> None:
        self._runner, self._context = model.runner, model.context
        self._store, self._vocabulary = store, vocabulary
        self._times = StepTimes()
        self._states: list[Drafted] = []

    def add(self, tokens: Sequence[int], most: int) -> Drafted:
        """Add a sequence; see `Proposer.add`."""
        self._states.append(Drafted(tokens, most))
        return self._states[-1]

    def remove(self, state: Drafted) -> None:
        """Remove a sequence, and free its memory."""
        self._states.remove(state)
        if state.blocks is not None:
            self._store.release(state.blocks)
        if not self._states:
            self._store.compact()

    def backlog(self, state: Drafted) -> int | None:
        """Return the number of uncomputed tokens before the sequence's last token, or None if the context is full."""
        if len(state.tokens) > self._context:
            return None
        return max(len(state.tokens) - 1 - state.computed, 0)

    def seconds(self) -> tuple[float, float, float]:
        """Return the coefficients of a linear model of the time of a pass, in seconds.

        Returns:
            A constant, the time per sequence, and the time per token of the backlog.
        """
        return self._times.coefficients

    def propose(self, states: Sequence[Drafted], counts: Sequence[int]) -> list[list[int]]:
        """Return proposals; see `Proposer.propose`."""
        self._keep_accepted()
        budget = max(PASS - len(states), 0)
        proposals: list[list[int]] = [[] for _ in states]
        active = [number for number, state in enumerate(states) if self._has_memory(state)]
        while active:
            spans = []
            for number in active:
                spans.append(self._span(states[number], proposals[number], 1 + budget))
                budget -= len(spans[-1].tokens) - 1
            logits = self._pass(spans)
            best = iter(logits[:, : self._vocabulary].argmax(-1).tolist())
            following = []
            for number, span in zip(active, spans, strict=True):
                state, proposal = states[number], proposals[number]
                state.computed += len(span.tokens)
                if span.logits:
                    proposal.append(next(best))
                    if len(proposal) < min(counts[number], self._context + 1 - len(state.tokens)):
                        following.append(number)
            active = following
        return proposals

    def _keep_accepted(self) -> None:
        """Discard the keys and values of rejected tokens, and compact the store."""
        for state in self._states:
            if state.blocks is not None:
                state.computed = min(state.computed, len(state.tokens) - 1)
                self._store.commit(state.blocks, state.tokens, state.computed)
        self._store.compact()

    def _has_memory(self, state: Drafted) -> bool:
        if state.blocks is None:
            state.blocks = self._store.add(state.tokens, state.most)
            state.computed = 0 if state.blocks is None else state.blocks.stored
        return state.blocks is not None

    def _span(self, state: Drafted, proposal: Sequence[int], most: int) -> Span:
        """Return the next span to compute: at most `most` tokens of the sequence followed by its proposal."""
        assert state.blocks is not None
        start, length = state.computed, len(state.tokens)
        end = min(start + most, length + len(proposal))
        self._store.reserve(state.blocks, end)
        known = [*state.tokens[start:end], *proposal[max(start - length, 0) : max(end - length, 0)]]
        last = self._runner.vocabulary - 1  # the draft model may have no logits for unused tokens
        tokens = [min(token, last) for token in known]
        return Span(tokens, start, state.blocks.numbers, int(end == length + len(proposal)))

    def _pass(self, spans: Sequence[Span]) -> Tensor:
        before = time.perf_counter()
        logits = self._runner.run(self._store.memory, spans)
        prompt_tokens = sum(len(span.tokens) - 1 for span in spans)
        self._times.add(len(spans), prompt_tokens, time.perf_counter() - before)
        return logits


def read_draft(folder: str | Path, served: ModelFolder, precision: str) -> DraftModel:
    """Read a draft model from a folder; see `read_model`.

    Raises:
        FolderError, CheckpointError, DataError: if a file is missing or damaged, or the model is not supported.
        RequestError: if the draft model's tokenizer differs from the served model's tokenizer.
    """
    found = read_model(folder, precision=precision)
    own, expected = found.tokenizer.get_vocab(), served.tokenizer.get_vocab()
    if own != expected:
        text = min(own.items() ^ expected.items())[0]
        raise RequestError(
            "draft",
            f"expected the vocabulary of the served model, but token {text!r} has the ID {own.get(text)} in the draft "
            f"model and the ID {expected.get(text)} in the served model (None: not in the vocabulary); choose a draft "
            "model with the same tokenizer",
        )
    return DraftModel(Runner(found.model), found.context)
