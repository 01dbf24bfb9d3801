"""Lower bounds on a model's serving times on this machine, from the number of weights and two measured speeds.

A step reads all weights from memory once, and multiplies each token by them.  The KV cache and attention are not
counted, so real times are longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farandole.models.moe import MixtureOfExperts
from farandole.models.sequence import Transformer

MEASURED_S = 0.5
"""The time in seconds for which calls are repeated to measure a speed; the speed is that of the fastest call."""
_SIDE = 1024


@dataclass(frozen=True)
class Limit:
    """Computes lower bounds on serving times, in seconds.

    Args:
        body: the number of weights that each token uses, excluding the output projection.  In a mixture of experts,
            only the weights of the experts that process the token are counted.
        head: the number of weights in the output projection, which only tokens that need logits use.
        weight_bytes: the size of the weights in `body` and `head` in bytes.
        bandwidth: the speed of reading a buffer of `weight_bytes` bytes, in bytes per second.
        flops: the speed of a large matrix product, in floating-point operations per second.
    """

    body: int
    head: int
    weight_bytes: int
    bandwidth: float
    flops: float

    @property
    def step_s(self) -> float:
        """Return the time to read all weights once, a lower bound on the time per output token."""
        return self.weight_bytes / self.bandwidth

    def first_token_s(self, prompt_tokens: int) -> float:
        """Return the lower bound on the time to first token, for a prompt of `prompt_tokens` tokens."""
        return max(self.step_s, self.products_s([(prompt_tokens, 1)]))

    def products_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Return the time of all matrix products for requests with these lengths.

        Args:
            lengths: the number of prompt tokens and the number of output tokens of each request.
        """
        tokens = sum(prompt + output - 1 for prompt, output in lengths)
        return 2 * (self.body * tokens + self.head * sum(output for _, output in lengths)) / self.flops

    def latency_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the lower bound on the latency of a request that the server processes alone."""
        return self.first_token_s(prompt_tokens) + (output_tokens - 1) * self.step_s

    def total_s(self, lengths: Sequence[tuple[int, int]], batch: int) -> float:
        """Return the lower bound on the time to complete all requests.

        Args:
            lengths: the number of prompt tokens and the number of output tokens of each request.
            batch: the maximum number of sequences that the server processes in one step.
        """
        outputs = [output for _, output in lengths]
        steps = max(*outputs, -(-sum(outputs) // batch))
        return max(steps * self.step_s, self.products_s(lengths))


def measure_limit(model: Transformer) -> Limit:
    """Return the lower bounds for serving `model` in this process.

    This call measures the speed of memory reads, and the speed of a matrix product in the dtype of `model`, with the
    current number of threads.
    """
    kind = next(model.parameters()).dtype
    body, head = _weights(model[1:-1]), _weights(model[-1])  # the embedding is a table
    size = (body + head) * kind.itemsize
    buffer = torch.ones(max(1, size // 8), dtype=torch.int64)
    a, b = torch.randn(2, _SIDE, _SIDE).to(kind)
    return Limit(
        body, head, size, buffer.nbytes / _seconds(buffer.sum), 2 * _SIDE**3 / _seconds(lambda: a @ b)
    )


def _weights(blocks: nn.Module) -> int:
    total = sum(parameter.numel() for parameter in blocks.parameters())
    for module in blocks.modules():
        if isinstance(module, MixtureOfExperts):
            experts = sum(parameter.numel() for parameter in module.experts.parameters())
            total -= experts - experts * module.router.top // module.experts.count
    return total


def _seconds(call: Callable[[], object]) -> float:
    call()
    found: list[float] = []
    while not found or sum(found) < MEASURED_S:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)
