"""The requests of the serving benchmark and their arrival times, reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A prompt and the number of tokens to generate."""

    prompt: list[int]
    output_tokens: int


def ragged_requests(
    count: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], vocabulary: int, seed: int
) -> list[Request]:
    """Return `count` requests with random tokens and uniformly distributed lengths.

    Args:
        prompt_tokens, output_tokens: the smallest and the largest number of tokens.
        vocabulary: the size of the vocabulary; tokens are drawn from 1 to `vocabulary` - 1.
    """
    choose = random.Random(seed)
    return [
        Request(
            [choose.randrange(1, vocabulary) for _ in range(choose.randint(*prompt_tokens))],
            choose.randint(*output_tokens),
        )
        for _ in range(count)
    ]


def with_fresh_prompts(requests: Sequence[Request], vocabulary: int, seed: int) -> list[Request]:
    """Return requests with the lengths of `requests`, but with different random tokens.

    The new tokens prevent a server from reusing the keys and values of the original prompts.
    """
    choose = random.Random(seed)
    return [
        Request([choose.randrange(1, vocabulary) for _ in request.prompt], request.output_tokens)
        for request in requests
    ]


def poisson_arrivals(count: int, rate: float, burst: int, seed: int) -> list[float]:
    """Return the arrival times of `count` requests, in seconds.

    Bursts of `burst` requests arrive as a Poisson process, with an average of `rate` requests per second.
    """
    choose, now = random.Random(seed), 0.0
    found: list[float] = []
    while len(found) < count:
        found += [now] * min(burst, count - len(found))
        now += choose.expovariate(rate / burst)
    return found
