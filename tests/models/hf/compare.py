"""Compare losses and gradients with `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from farandole.models.hf import describe
from farandole.models.hf.pretrained import tensors_of, tensors_to_write


def close(ours: Tensor, theirs: Tensor) -> None:
    """Check that fp32 values are equal up to rounding."""
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def tokens_for(model: Any, *shape: int, seed: int = 0) -> Tensor:
    """Return random tokens, without token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, shape, generator=generator)


def compare_loss(ours: Any, theirs: Any, arguments: tuple[Any, ...], logits: Tensor, folder: Path) -> None:
    """Compare the loss and the gradients of `ours(*arguments)` with those of the logits of `theirs`."""
    targets = arguments[2]
    ours.zero_grad()
    theirs.zero_grad()
    total, count = ours(*arguments)
    expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    assert count == int((targets >= 0).sum())
    torch.testing.assert_close(total, expected)
    expected.backward()
    total.backward()
    compare_gradients(ours, theirs, folder)


def compare_gradients(ours: Any, theirs: Any, folder: Path) -> None:
    """Compare all gradients, under the names that tensors have in a folder."""
    expected = _gradients_by_stored_name(theirs, folder)
    own = tensors_of(ours)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    compared = 0
    for written in tensors_to_write(describe(ours), shapes):
        gradient = own[written.ours].grad
        if gradient is None:
            continue
        box = gradient[tuple(slice(a, b) for a, b in written.box)]
        close(written.of_box(box), expected[written.name])
        compared += 1
    assert compared >= len(list(ours.parameters()))


@torch.no_grad()
def _gradients_by_stored_name(theirs: Any, folder: Path) -> dict[str, Tensor]:
    """Write the gradients of a model of transformers to a folder, as if they were weights, and read them."""
    parameters = list(theirs.parameters())
    weights = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return load_file(folder / "model.safetensors")
