"""Speculative decoding: verify several proposed tokens of a sequence in one step.

A proposer predicts the next tokens of a sequence.  In one step, the model processes the last token and the proposed
tokens, and the sampler selects a token after each of these tokens.  The sequence keeps the selected tokens up to and
including the first token that differs from the proposed token.  The sampler does not use the proposals, so greedy and
sampled tokens are the same as without speculation.

In a small batch, additional tokens barely lengthen a step, because the step reads all weights anyway.  In a large
batch, rejected tokens delay other sequences.  The number of proposed tokens is therefore chosen to maximize the
expected tokens per second, given the measured step times and the measured acceptance rate.

Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
X. Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from farandole.serve.admission import Rate

MAX_PROPOSED = 16
"""The maximum number of proposed tokens per sequence and step."""
PROBE_STEPS = 64
"""The number of steps without a proposal after which one token is proposed, to measure the acceptance rate again."""
LEAST_GAIN = 1.1
"""The minimum expected speed-up from proposals; smaller speed-ups are within the error of the prediction."""
BACKLOG_STEPS = 16
"""The time to compute a backlog is divided among this number of steps, because all of them use the result."""


class Proposer(Protocol):
    """Predicts the next tokens of sequences."""

    def add(self, tokens: Sequence[int], most: int) -> Any:
        """Add a sequence, and return the proposer's state for this sequence.

        Args:
            tokens: the sequence's tokens; the caller appends new tokens.
            most: the maximum number of KV-cache positions for the sequence.
        """
        ...

    def remove(self, state: Any) -> None:
        """Remove a sequence."""
        ...

    def backlog(self, state: Any) -> int | None:
        """Return the number of tokens to process before the next proposal, or None if no proposal is possible."""
        ...

    def seconds(self) -> tuple[float, float, float]:
        """Return the measured costs of proposals in seconds.

        Returns:
            The base time of a pass, which proposes one token for every sequence; the additional time per sequence in
            a pass; and the time per token of the backlog.
        """
        ...

    def propose(self, states: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """Return at most `counts[i]` proposed tokens for each sequence i."""
        ...


@dataclass(eq=False)
class Speculation:
    """The state of speculative decoding for one sequence.

    Args:
        state: the proposer's state for the sequence.
        accepted: the acceptance rate: the fraction of the tried tokens that were accepted.  A proposed token is tried
            if all preceding proposed tokens of the step were accepted.
        probed: the last step in which a token was proposed only to measure the acceptance rate.
    """

    state: Any
    accepted: Rate
    probed: int = field(default=0)


@dataclass(frozen=True)
class _Candidate:
    """A sequence for which tokens can be proposed; `number` is its index in argument `decoding` of `propose`."""

    number: int
    speculation: Speculation
    limit: int
    backlog: int


class Speculator:
    """Proposes tokens if verifying them increases the expected tokens per second."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._accepted = Rate(1.4, 2.0, 0.99)  # of all sequences
        self._steps = self._last_proposal = 0

    def add(self, tokens: Sequence[int], most: int) -> Speculation:
        """Add a sequence; see `Proposer.add`."""
        prior = 2.0
        return Speculation(self._proposer.add(tokens, most), Rate(prior * self._accepted.value, prior, 0.9))

    def remove(self, speculation: Speculation) -> None:
        """Remove a sequence."""
        self._proposer.remove(speculation.state)

    def propose(
        self,
        decoding: Sequence[Speculation],
        limits: Sequence[int],
        step: tuple[float, float],
        budget: int,
    ) -> list[list[int]]:
        """Return the proposed tokens for each sequence in `decoding`.

        Args:
            limits: the maximum number of proposed tokens for each sequence.
            step: the base duration of a step and the additional duration per token, both measured in seconds.
            budget: the maximum number of proposed tokens for all sequences together.
        """
        self._steps += 1
        found: list[list[int]] = [[] for _ in decoding]
        candidates = []
        for number, (speculation, limit) in enumerate(zip(decoding, limits, strict=True)):
            backlog = self._proposer.backlog(speculation.state) if limit > 0 else None
            if backlog is not None:
                candidates.append(_Candidate(number, speculation, min(limit, MAX_PROPOSED), backlog))
        if not candidates or budget < 1:
            return found
        counts = self._counts(candidates, len(decoding), step, budget)
        if not any(counts):
            if self._steps - self._last_proposal < PROBE_STEPS:
                return found
            probed = min(candidates, key=lambda each: (each.backlog, each.speculation.probed))
            probed.speculation.probed = self._steps
            counts[candidates.index(probed)] = 1
        self._last_proposal = self._steps
        chosen = [(each, count) for each, count in zip(candidates, counts, strict=True) if count]
        proposals = self._proposer.propose(
            [each.speculation.state for each, _ in chosen], [count for _, count in chosen]
        )
        for (each, _), proposal in zip(chosen, proposals, strict=True):
            found[each.number] = proposal
        return found

    def observe(self, speculation: Speculation, proposed: int, accepted: int) -> None:
        """Update the acceptance rates after a step that accepted `accepted` of a sequence's `proposed` tokens."""
        if proposed:
            trials = min(accepted + 1, proposed)  # tokens after the first rejected one were not tried
            speculation.accepted.add(accepted, trials)
            self._accepted.add(accepted, trials)

    def _counts(
        self, candidates: Sequence[_Candidate], decoding: int, step: tuple[float, float], budget: int
    ) -> list[int]:
        """Return the numbers of tokens, one per candidate, that maximize the expected tokens per second."""
        counts = [0] * len(candidates)
        base, each = step
        tokens, seconds = float(decoding), base + each * decoding
        if seconds <= 0:  # no step has been measured yet
            return counts
        pass_base, pass_each, per_backlog = self._proposer.seconds()
        cost = each + pass_each
        # a token whose chance of acceptance is lower than this would reduce the tokens per second
        least = cost * tokens / seconds
        options = []
        for at, candidate in enumerate(candidates):
            rate = candidate.speculation.accepted.value
            chance = rate
            for depth in range(1, candidate.limit + 1):
                if chance <= least:
                    break
                options.append((-chance, depth, at))
                chance *= rate
        options.sort()
        best, used, passes = LEAST_GAIN * tokens / seconds, 0, 0
        for number, (chance, depth, at) in enumerate(options[:budget], 1):
            tokens -= chance
            seconds += cost + pass_base * max(depth - passes, 0)
            if depth == 1:
                seconds += per_backlog * candidates[at].backlog / BACKLOG_STEPS
            passes = max(passes, depth)
            if tokens / seconds > best:
                best, used = tokens / seconds, number
        for _, depth, at in options[:used]:
            counts[at] = max(counts[at], depth)
        return counts
