"""Select the next tokens of many sequences at once.

Random numbers are computed from a hash of the seed, the choice and the index of the token, so a request gets the same
tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from farandole.serve.constraint import Grammars, Matcher
from farandole.serve.request import Logprob, Sampling


@dataclass(eq=False)
class Draw:
    """A sequence for which the next token is drawn.

    Args:
        sampling: the request's parameters.
        choice: the index of the sequence in its request.
        generated: the number of generated tokens.
        table_row: the sequence's row in the sampler's tables, from `Sampler.add`.
        ends: the tokens that must not be selected before the minimum number of tokens has been generated.
        matcher: the constraint on the text, if any.
    """

    sampling: Sampling
    choice: int
    table_row: int
    ends: Sequence[int] = ()
    matcher: Matcher | None = None
    generated: int = 0


@dataclass(eq=False)
class _Batch:
    """The sampling parameters of a batch, as tensors (sequences, 1)."""

    draws: list[Draw]
    temperature: Tensor = field(init=False)
    top_k: Tensor = field(init=False)
    top_p: Tensor = field(init=False)
    min_p: Tensor = field(init=False)

    def __post_init__(self) -> None:
        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([[getattr(draw.sampling, name)] for draw in self.draws], dtype=dtype)

        self.temperature = column("temperature")
        self.top_k, self.top_p, self.min_p = column("top_k", torch.int64), column("top_p"), column("min_p")
        self.top_p.clamp_(min=torch.finfo(torch.float32).tiny)  # keep the first token
        self.repetition = column("repetition_penalty")
        self.presence, self.frequency = column("presence_penalty"), column("frequency_penalty")
        samplings = [draw.sampling for draw in self.draws]
        self.is_greedy = all(each.temperature == 0 for each in samplings)
        self.any_greedy = any(each.temperature == 0 for each in samplings)
        self.any_penalty = any(each.has_penalties for each in samplings)
        self.any_bias = any(each.logit_bias for each in samplings)
        self.most_k = max(each.top_k for each in samplings)
        self.any_p = any(each.top_p < 1 for each in samplings)
        self.any_min_p = any(each.min_p > 0 for each in samplings)
        self.table_rows = torch.tensor([draw.table_row for draw in self.draws])
        self.unfinished = any(each.min_tokens for each in samplings)
        self.any_constraint = any(draw.matcher is not None for draw in self.draws)


class Sampler:
    """Draws tokens, and keeps the sequences' penalties and biases in tables.

    Args:
        vocabulary: the number of tokens.
        table_rows: the maximum number of sequences.
        grammars: the grammars that compute the masks of constrained sequences.
    """

    def __init__(self, vocabulary: int, table_rows: int, grammars: Grammars | None = None) -> None:
        self._vocabulary, self._table_rows, self._grammars = vocabulary, table_rows, grammars
        self._free = list(range(table_rows - 1, -1, -1))
        self._counts: Tensor | None = None  # int32 (table_rows, vocabulary), generated tokens
        self._prompted: Tensor | None = None  # bool (table_rows, vocabulary), tokens of the prompt
        self._bias: Tensor | None = None  # fp32 (table_rows, vocabulary)
        self._batch: _Batch | None = None

    def add(self, sampling: Sampling, choice: int, prompt: Sequence[int], ends: Sequence[int]) -> Draw:
        """Add a sequence."""
        table_row = self._free.pop()
        if sampling.has_penalties:
            if self._counts is None or self._prompted is None:
                self._counts = torch.zeros(self._table_rows, self._vocabulary, dtype=torch.int32)
                self._prompted = torch.zeros(self._table_rows, self._vocabulary, dtype=torch.bool)
            self._counts[table_row] = 0
            self._prompted[table_row] = False
            self._prompted[table_row, torch.tensor(prompt)] = True
        if sampling.logit_bias:
            if self._bias is None:
                self._bias = torch.zeros(self._table_rows, self._vocabulary)
            self._bias[table_row] = 0
            for token, bias in sampling.logit_bias.items():
                self._bias[table_row, token] = bias
        matcher = None
        if sampling.is_constrained:
            assert self._grammars is not None
            matcher = self._grammars.matcher(sampling)
        return Draw(sampling, choice, table_row, ends, matcher)

    def remove(self, draw: Draw) -> None:
        """Remove a sequence."""
        self._free.append(draw.table_row)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """Return a token for each row of `logits`, and update the sequences' penalties.  `logits` is overwritten."""
        batch = self._batch
        if batch is None or batch.draws != list(draws):
            batch = self._batch = _Batch(list(draws))
        self._process(logits, batch)
        tokens = _argmax(logits) if batch.is_greedy else self._random(logits, batch)
        for draw in draws:
            draw.generated += 1
        if batch.any_penalty:
            assert self._counts is not None
            rows = [row for row, draw in enumerate(draws) if draw.sampling.has_penalties]
            self._counts[batch.table_rows[rows], tokens[rows]] += 1
        found: list[int] = tokens.tolist()
        return found

    def _process(self, logits: Tensor, batch: _Batch) -> None:
        if batch.any_bias:
            assert self._bias is not None
            rows = [row for row, draw in enumerate(batch.draws) if draw.sampling.logit_bias]
            logits[rows] += self._bias[batch.table_rows[rows]]
        if batch.any_penalty:
            assert self._counts is not None and self._prompted is not None
            rows = [row for row, draw in enumerate(batch.draws) if draw.sampling.has_penalties]
            table_rows, chosen = batch.table_rows[rows], logits[rows]
            counts = self._counts[table_rows]
            seen, repetition = (counts > 0) | self._prompted[table_rows], batch.repetition[rows]
            penalized = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
            chosen = torch.where(seen, penalized, chosen)
            chosen -= batch.presence[rows] * (counts > 0) + batch.frequency[rows] * counts
            logits[rows] = chosen
        if batch.unfinished:
            pairs = [
                (row, token)
                for row, draw in enumerate(batch.draws)
                if draw.generated < draw.sampling.min_tokens
                for token in draw.ends
            ]
            if pairs:
                rows_, tokens = zip(*pairs, strict=True)
                logits[list(rows_), list(tokens)] = -torch.inf
        if batch.any_constraint:
            assert self._grammars is not None
            constrained = [(row, draw.matcher) for row, draw in enumerate(batch.draws) if draw.matcher]
            self._grammars.mask(logits, [row for row, _ in constrained], [each for _, each in constrained])

    def _random(self, logits: Tensor, batch: _Batch) -> Tensor:
        greedy = _argmax(logits) if batch.any_greedy else None
        scores = logits / batch.temperature.clamp(min=1e-6)
        if batch.most_k:
            kept = scores.topk(min(batch.most_k, self._vocabulary), -1).values
            last = kept.gather(1, batch.top_k.clamp(1, kept.shape[1]) - 1)
            scores = scores.masked_fill((scores < last) & (batch.top_k > 0), -torch.inf)
        if batch.any_p:
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            probabilities = best.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            dropped = torch.empty_like(order, dtype=torch.bool)
            dropped.scatter_(1, order, before >= batch.top_p)
            scores = scores.masked_fill(dropped & (batch.top_p < 1), -torch.inf)
        if batch.any_min_p:
            least = scores.amax(-1, keepdim=True) + batch.min_p.log()
            scores = scores.masked_fill((scores < least) & (batch.min_p > 0), -torch.inf)
        sums = scores.softmax(-1).double().cumsum(-1)
        uniform = torch.from_numpy(_uniform(batch.draws))[:, None]
        total = sums[:, -1:]
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(sums, target, right=True)[:, 0]
        drawn.clamp_(max=self._vocabulary - 1)  # logits that are NaN must not affect other sequences
        if greedy is not None:
            drawn = torch.where(batch.temperature[:, 0] == 0, greedy, drawn)
        return drawn


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest value of each row, computed by numpy, which uses vector instructions."""
    return torch.from_numpy(logits.numpy().argmax(-1))


def _uniform(draws: Sequence[Draw]) -> np.ndarray:
    """Return a number in [0, 1) for each sequence: a splitmix64 hash of its seed, choice and token count."""
    with np.errstate(over="ignore"):
        state = np.array([draw.sampling.seed & (2**64 - 1) for draw in draws], np.uint64)
        for part in ([draw.choice for draw in draws], [draw.generated for draw in draws]):
            state = _mix(state + np.array(part, np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return, for each row, the log-probabilities of its token and of the `top` most likely tokens.

    Args:
        tokens: the token of each row.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    if not top:
        return [Logprob(token, value) for token, value in zip(tokens, own, strict=True)]
    values, indices = logprobs.topk(min(top, logits.shape[1]), -1)
    best = [tuple(zip(*pair, strict=True)) for pair in zip(indices.tolist(), values.tolist(), strict=True)]
    return [Logprob(*each) for each in zip(tokens, own, best, strict=True)]
