"""Propose the next tokens of a sequence from its own tokens.

The proposer searches for an earlier occurrence of a sequence's last tokens, and proposes the tokens that followed this
occurrence.

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
        tokens: the sequence's tokens; the caller appends new tokens.
        following: maps each n-gram to the position of the token after its last occurrence.  An occurrence at the end
            of the sequence does not count.
        indexed: the length of the indexed prefix of `tokens`.
    """

    tokens: Sequence[int]
    following: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class NgramProposer:
    """Proposes the tokens that followed the previous occurrence of a sequence's last tokens."""

    def add(self, tokens: Sequence[int], most: int) -> History:
        """Return an n-gram index for a new sequence; see `Proposer.add`."""
        return History(tokens)

    def remove(self, state: History) -> None:
        """Do nothing, because `state` contains all data about the sequence."""

    def backlog(self, state: History) -> int | None:
        """Return 0 if the last tokens also occur earlier in the sequence, and None otherwise."""
        return None if self._find(state) is None else 0

    def seconds(self) -> tuple[float, float, float]:
        """Return zeros, because a proposal takes negligible time."""
        return 0.0, 0.0, 0.0

    def propose(self, states: Sequence[History], counts: Sequence[int]) -> list[list[int]]:
        """Return the proposed tokens for each sequence; see `Proposer.propose`."""
        return [self._continue(state, count) for state, count in zip(states, counts, strict=True)]

    def _find(self, state: History) -> int | None:
        """Return the position of the first token to propose, or None."""
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
