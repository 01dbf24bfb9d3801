"""Propose the next tokens of a sequence from its own tokens.

The proposer searches for an earlier occurrence of the last tokens of a sequence, and proposes the tokens that followed
this occurrence.  In this way, text that a model repeats or copies from its prompt is predicted without a second model.

A. Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTHS = (4, 3, 2)
"""The lengths of a sequence's last n-grams, in the order in which they are searched for."""


@dataclass(eq=False)
class History:
    """An index of the n-grams in a sequence.

    Args:
        tokens: the sequence's tokens; the caller appends tokens.
        following: for each n-gram, the position of the token that follows its last occurrence.  An occurrence at the
            end of the sequence does not count.
        indexed: the number of tokens whose n-grams are in `following`.
    """

    tokens: Sequence[int]
    following: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class NgramProposer:
    """Proposes the tokens that followed the last occurrence of a sequence's last tokens."""

    def add(self, tokens: Sequence[int], most: int) -> History:
        """Add a sequence; see `Proposer.add`."""
        return History(tokens)

    def remove(self, state: History) -> None:
        """Do nothing: a sequence has no memory outside its state."""

    def backlog(self, state: History) -> int | None:
        """Return 0 if the last tokens occurred before, and None otherwise."""
        return None if self._find(state) is None else 0

    def seconds(self) -> tuple[float, float, float]:
        """Return zeros: the time of a proposal is negligible."""
        return 0.0, 0.0, 0.0

    def propose(self, states: Sequence[History], counts: Sequence[int]) -> list[list[int]]:
        """Return proposals; see `Proposer.propose`."""
        return [self._continue(state, count) for state, count in zip(states, counts, strict=True)]

    def _find(self, state: History) -> int | None:
        """Return the position after the last earlier occurrence of the longest repeated n-gram suffix, or None."""
        tokens, end = state.tokens, len(state.tokens)
        for last in range(state.indexed, end):  # all n-grams that a token follows
            for length in LENGTHS:
                if last >= length:
                    state.following[tuple(tokens[last - length : last])] = last
        state.indexed = end
        for length in LENGTHS:
            found = state.following.get(tuple(tokens[-length:])) if end >= length else None
            if found is not None:
                return found
        return None

    def _continue(self, state: History, count: int) -> list[int]:
        at, end = self._find(state), len(state.tokens)
        if at is None:
            return []
        # if the copied tokens reach the end of the sequence, the proposal repeats them
        return [state.tokens[at + number % (end - at)] for number in range(count)]
