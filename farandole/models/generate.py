"""Generate text with a causal language model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.sequence import KeyValueCache, SequenceInfo, Transformer


@torch.no_grad()
def generate(
    model: nn.Sequential,
    prompt: list[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` tokens that continue `prompt`.

    A `Transformer` uses a key-value cache if the prompt and the continuation fit in the context.

    If ranks gather weights block by block (`zero=3`) or run different pipeline stages, all ranks must call this
    function with the same arguments, and all ranks get the same tokens.

    Args:
        prompt: at least one token.
        context: the maximum number of tokens that the model receives.  Older tokens are dropped.
        temperature: the sampling temperature.  0 selects the most likely token.
        top_k: the number of most likely tokens to sample from.  0 samples from all tokens.

    Raises:
        ValueError: if `prompt` is empty.
    """
    if not prompt:
        raise ValueError("expected a prompt of at least one token, got none")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    last_position = model[-1].register_forward_pre_hook(_last_position)
    cached = isinstance(model, Transformer) and len(prompt) + count <= context
    info = None
    try:
        for number in range(count):
            window = tokens[-1:] if cached and number else tokens[-context:]
            if isinstance(model, Transformer) and (info is None or not cached):
                # pass a cache even if it is not used again: with a cache, each rank computes all positions
                info = SequenceInfo(cache=KeyValueCache())
            inputs = torch.tensor([window], device=device)
            logits = model(inputs) if info is None else model(inputs, info)
            if info is not None and info.cache is not None:
                info.cache.length = len(tokens)  # a rank with only some pipeline stages does not advance it
            tokens.append(_draw(logits[0, -1].float().cpu(), temperature, top_k, generator))
            yield tokens[-1]
    finally:
        last_position.remove()
        model.train(was_training)


def _last_position(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Reduce the head's input (batch, positions, width) to the last position; a forward pre-hook."""
    # An input (tokens, width) is not changed: its tokens are split over processes, and another process may have the
    # last token.
    return (inputs[0][:, -1:], *inputs[1:]) if inputs[0].dim() == 3 else inputs


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        best, indices = logits.topk(top_k)
    else:
        best, indices = logits, torch.arange(logits.numel())
    probabilities = (best / temperature).softmax(-1)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])
