"""Small models with their samples, and the results of training them in one process, for tests of pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.models.bert import BERTConfig, build_bert
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.resnet import ResNetConfig, build_resnet
from farandole.models.t5 import T5Config, build_t5
from farandole.plan import Plan

WORDS, CLASSES, CLIP, RATE = 29, 5, 0.3, 0.5

Batch = tuple[Any, Tensor]


class Tuples(nn.Module):
    """A block with several inputs and outputs: one is passed on, one is None, one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: Any) -> Any:
        x, skip, _, number = (
            inputs if isinstance(inputs, tuple) else (inputs, inputs * 2, None, torch.tensor(1))
        )
        return x + torch.tanh(self.linear(x)) * number, skip + x, None, number + 1


class Last(nn.Module):
    """Returns the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, WORDS)

    def forward(self, inputs: Any) -> Tensor:
        x, skip, _, number = inputs
        return self.linear(x + skip / number)


class InPlace(nn.Module):
    """Modifies its input in place before and after it computes something from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu_(x, 0.3)
        return x.clone().add_(self.linear(x)).mul_(1.5)


class Twice(nn.Module):
    """Returns one tensor twice; the next block modifies it in place and uses both."""

    def __init__(self, words: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, words)

    def forward(self, inputs: Any) -> Any:
        first, second = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        F.leaky_relu_(first, 0.3)
        x = self.linear(first + second * second)
        return x if x.shape[-1] == WORDS else (x, x)


class Enter(nn.Conv2d):
    """The first block of a U-Net: hidden states without skip connections."""

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),)


class Down(nn.Module):
    """Halves the image, and passes its input on to the `Up` of the same size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, 2 * channels, 3, 2, 1)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        x, *skips = inputs
        return F.gelu(self.convolution(x)), x, *skips


class Up(nn.Module):
    """Doubles the image, and adds the input of the `Down` of the same size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        x, skip, *skips = inputs
        return F.gelu(F.interpolate(self.convolution(x), skip.shape[-2:]) + skip), *skips


class Leave(nn.Conv2d):
    """The last block of a U-Net: logits of each pixel."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return super().forward(*inputs)


def _unet() -> nn.Module:
    sizes = [3, 6, 12]
    down, up = [Down(size) for size in sizes], [Up(size) for size in reversed(sizes)]
    return nn.Sequential(Enter(3, 3, 3, padding=1), *down, *up, Leave(3, CLASSES, 1))


def _frozen() -> nn.Module:
    """Return a model whose first blocks are frozen, so that some stages neither compute nor receive gradients."""
    model = nn.Sequential(nn.Embedding(WORDS, 6), *(InPlace() for _ in range(6)), nn.Linear(6, WORDS))
    model[:5].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: build_gpt(GPTConfig(WORDS, 16, 6, 4, 16, positions="learned")),
    "llama": lambda: build_llama(LlamaConfig(WORDS, 6, 4, 16, 20, kv_heads=2)),
    "mixtral": lambda: build_mixtral(MixtralConfig(WORDS, 6, 4, 16, 20, kv_heads=2, experts=4)),
    "bert": lambda: build_bert(BERTConfig(WORDS, 16, 6, 4, 16, padding=0)),
    "t5": lambda: build_t5(T5Config(WORDS, 2, 2, 4, 16, 4, 24, dropout=0.0)),
    "tuples": lambda: nn.Sequential(nn.Embedding(WORDS, 6), *(Tuples() for _ in range(6)), Last()),
    "in_place": lambda: nn.Sequential(
        nn.Embedding(WORDS, 6),
        *(InPlace() for _ in range(6)),
        nn.LeakyReLU(inplace=True),
        nn.Linear(6, WORDS),
    ),
    "twice": lambda: nn.Sequential(nn.Embedding(WORDS, 6), *(Twice() for _ in range(6)), Twice(WORDS)),
    "frozen": _frozen,
    "resnet": lambda: build_resnet(ResNetConfig("basic", (2, 2, 1, 1), 4, CLASSES)),
    "unet": _unet,
}


def build(name: str) -> nn.Module:
    """Return a model whose parameters, including biases and norms, are random."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def batches(name: str, step: int, replica: int, count: int) -> list[Batch]:
    """Return micro-batches of different sizes and shapes, some with masked targets; those of encoders are padded."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    found = []
    for number in range(count):
        rows, shape = 1 + number % 2, (5 + number % 3,)
        if name in ("resnet", "unet"):
            size = (48, 64) if name == "resnet" else (8, 8 + number % 3)
            inputs = torch.randn((rows, 3, *size), generator=generator)
            shape = () if name == "resnet" else size
        else:
            inputs = torch.randint(1, WORDS, (rows, *shape), generator=generator)
        if name in ("bert", "t5"):
            inputs[0, -2:] = 0
        targets = torch.randint(0, CLASSES, (rows, *shape), generator=generator)
        if shape:
            targets[0, ..., : number % 3] = -1
        found.append(((inputs, inputs.flip(1)) if name == "t5" else inputs, targets))
    return found


def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a micro-batch, and the number of targets."""
    if isinstance(output, tuple):
        return output
    logits = output.transpose(1, -1).flatten(0, -2) if output.dim() == 4 else output.flatten(0, -2)
    targets = batch[1].transpose(1, -1).flatten() if output.dim() == 4 else batch[1].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), (targets >= 0).sum()


Result = tuple[dict[str, Tensor], list[float], list[float], float]
"""The state after the last step, the losses and the gradient norms of all steps, and the loss of an evaluation."""


@functools.cache
def alone(name: str, micro_batches: int, replicas: int = 1, steps: int = 2) -> Result:
    """Train a model in one process, which accumulates the gradients of all micro-batches."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses, norms = [], []
    for step in range(steps):
        samples = [b for replica in range(replicas) for b in batches(name, step, replica, micro_batches)]
        parts = [loss(model(batch[0]), batch) for batch in samples]
        mean = sum(total for total, _ in parts) / sum(count for _, count in parts)  # type: ignore[union-attr]
        mean.backward()
        losses.append(float(mean.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        samples = [b for replica in range(replicas) for b in batches(name, 9, replica, micro_batches)]
        parts = [loss(model(batch[0]), batch) for batch in samples]
    metric = sum(float(total) for total, _ in parts) / sum(int(count) for _, count in parts)
    return state_of(model, model.named_parameters()), losses, norms, metric


def state_of(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of parameters and of the model's persistent buffers by their first names."""
    buffers = [
        (f"{path}.{name}" if path else name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    return {name: tensor.detach().clone() for name, tensor in (*parameters, *buffers)}


def train(
    rank: int,
    size: int,
    name: str,
    plan: Plan,
    micro_batches: int,
    steps: int = 2,
    *,
    chunked: bool = False,
    folder: Path | None = None,
    example: Any = None,
) -> Result:
    """Train under a plan; with a folder, load the state if it exists, and otherwise save the state at the end."""
    model = build(name)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the values of rank 0 count
    engine = farandole.parallelize(model, plan, example=example)
    if plan.precision == "fp16":
        engine.scaler.scale = 2.0**7  # the first steps do not overflow
    momentum = 0.9 if folder else 0.0
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), RATE, momentum=momentum))
    if folder is not None and folder.exists():
        engine.load(folder)
    replica = engine.mesh.replica_of(rank)
    losses, norms = [], []

    def inputs(batch: Batch) -> Any:
        return {"inputs": batch[0], "targets": batch[1]} if chunked else (batch[0],)

    for step in range(steps):
        samples = batches(name, step, replica, micro_batches)
        losses.append(engine.forward_backward(samples, loss, inputs).loss)
        norms.append(engine.clip(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    metric = engine.evaluate(batches(name, 9, replica, micro_batches), loss, lambda batch: (batch[0],))
    if folder is not None and not folder.exists():
        engine.save(folder)
    names = {p: n for n, p in model.named_parameters()}
    state = state_of(model, ((names[p], value) for p, value in engine.whole_parameters()))
    engine.close()
    return state, losses, norms, metric


def compare(results: list[Result], expected: Result, rel: float = 1e-4) -> None:
    """Compare the results of all ranks with one process; each rank has the tensors of its stages."""
    state, losses, norms, metric = expected
    seen = set()
    for own, found, found_norms, found_metric in results:
        assert found == pytest.approx(losses, rel=rel / 10)
        assert found_norms == pytest.approx(norms, rel=rel)
        assert found_metric == pytest.approx(metric, rel=rel)
        for name, value in own.items():
            torch.testing.assert_close(
                value, state[name], rtol=rel, atol=rel / 100, msg=lambda m, n=name: f"{n}: {m}"
            )
        seen |= set(own)
    assert seen == set(state)
