"""Small models, and a training step that returns all values that tests can compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.resnet import ResNetConfig, build_resnet

Case = tuple[nn.Module, Any]


def small_gpt(dropout: float = 0.1) -> Case:
    config = GPTConfig(vocabulary=50, context=32, layers=2, heads=2, width=32, dropout=dropout)
    return build_gpt(config), torch.randint(50, (2, 32))


def small_resnet() -> Case:
    config = ResNetConfig("bottleneck", (1, 1, 1, 1), width=4, classes=5)
    return build_resnet(config), torch.randn(2, 3, 32, 32)


def small_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 8, 16)


class KeywordBlock(nn.Module):
    """A block with keyword and nested arguments, a tuple as output, and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.utils.parametrizations.spectral_norm(
            nn.Linear(8, 8)
        )  # has a buffer that affects the output

    def forward(
        self, x: Tensor, *, skip: tuple[Tensor, list[Tensor]], scale: float = 1.0
    ) -> tuple[Tensor, dict]:
        hidden = F.relu(self.first(x), inplace=True) + skip[1][0]
        hidden = self.norm(F.dropout(hidden * skip[0], 0.3, self.training))
        return self.second(hidden) * scale, {"hidden": hidden, "name": "block"}


class Keywords(nn.Module):
    """A model that uses one block twice, and results that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KeywordBlock(), KeywordBlock()])

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x
        for block in (*self.blocks, self.blocks[0]):
            x, more = block(x, skip=(mask, [hidden]), scale=0.5)
            hidden = more["hidden"]
        return x, hidden


def keywords() -> Case:
    return Keywords(), (torch.randn(4, 8), torch.rand(4, 8))


CASES: dict[str, Callable[[], Case]] = {
    "gpt": small_gpt,
    "resnet": small_resnet,
    "encoder": small_encoder,
    "keywords": keywords,
}


def step(model: nn.Module, example: Any, between: Callable[[], None] | None = None) -> dict[str, Tensor]:
    """Return outputs, gradients, buffers and the random state after a forward and backward pass with seed 7."""
    torch.manual_seed(7)
    model.zero_grad()
    inputs = example if isinstance(example, tuple) else (example,)
    for one in inputs:
        one.grad = None
    outputs = [one for one in tree_leaves(model(*inputs)) if isinstance(one, Tensor)]
    if between is not None:
        between()
    torch.stack([one.float().square().sum() for one in outputs]).sum().backward()
    found = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
    found |= {
        f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    found |= {f"input {index}": one.grad.clone() for index, one in enumerate(inputs) if one.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found | {"random state": torch.get_rng_state()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
