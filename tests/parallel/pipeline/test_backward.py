"""The two halves of a backward pass give the gradients of one backward pass, and compute nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from farandole.memory.tracker import MemoryTracker
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.moe import Experts, MixtureOfExperts, TopKRouter
from farandole.models.sequence import SequenceInfo
from farandole.parallel.pipeline.backward import SavedTensors, SplitBackward


class Several(nn.Module):
    """Shared weights, an unused input, and outputs that do not depend on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(self.linear(x).tanh() * self.frozen)
        return y, (self.scale * 2).expand(3, 6), y * self.scale, x + 1


class Parallel(nn.Module):
    """Functions next to each other that share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = nn.functional.linear(x, self.linear.weight, self.scale)
        return first + self.linear(x.tanh()), x * self.scale, self.scale + 1


class Blocks(nn.Module):
    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.model = build_gpt(GPTConfig(29, length, 2, 4, 16 if length == 16 else 64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        info = SequenceInfo()
        for block in list(self.model)[1:]:
            x = block(x, info)
        return (x,)


class Doubled(torch.autograd.Function):
    """A product with a weight that computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (Doubled.apply(x, self.weight).relu(),)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "several": (Several, ((3, 6), (3, 6))),
    "parallel": (Parallel, ((3, 6),)),
    "gpt": (Blocks, ((2, 9, 16),)),
    "custom": (Custom, ((3, 6),)),
    "experts": (
        lambda: _Tuple(MixtureOfExperts(TopKRouter(6, 4, 2), Experts(4, 6, 5), nn.Linear(6, 6))),
        ((3, 4, 6),),
    ),
    "norm": (lambda: _Tuple(nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))), ((3, 6),)),
}


class _Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x),)


def _leaves(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.double).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_both_halves_together_are_a_backward_pass(name):
    torch.manual_seed(0)
    build, shapes = CASES[name]
    model, inputs = build().double(), _leaves(shapes)
    outputs = model(*inputs)
    gradients = [torch.randn_like(output) for output in outputs]
    with FlopCounterMode(display=False) as whole:
        torch.autograd.backward(outputs, gradients)
    expected = {n: p.grad for n, p in model.named_parameters()}
    expected_inputs = [each.grad for each in inputs]
    for parameter in model.parameters():
        parameter.grad = None
    inputs, saved = _leaves(shapes), SavedTensors()
    with saved.hooks():
        outputs = model(*inputs)
    split = SplitBackward(outputs, inputs, saved)
    seen: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(seen.append)
    with FlopCounterMode(display=False) as halves:
        found = split.input_gradients(gradients)
        early = {id(parameter) for parameter in seen}
        split.weight_gradients()
    torch.testing.assert_close(found, expected_inputs, check_dtype=False)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], msg=key)
    assert {id(p) for p in seen} == {id(p) for p in model.parameters() if p.requires_grad}
    assert halves.get_total_flops() == whole.get_total_flops()
    names = {n for n, p in model.named_parameters() if id(p) in early}
    norms = {n for n, p in model.named_parameters() if "norm" in n}
    assert names == {
        "several": {"linear.weight", "linear.bias"},
        "custom": {"weight"},
        "norm": {"inner.0.weight", "inner.0.bias"},
    }.get(name, norms)


def test_both_halves_recompute_a_checkpointed_function():
    torch.manual_seed(0)
    first, frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        return checkpoint(lambda y: frozen(torch.tanh(first(y))), x * 2, use_reentrant=False)

    (x,), saved = _leaves(((3, 6),)), SavedTensors()
    first.double(), frozen.double()
    expected = torch.autograd.grad(run(x).square().sum(), (x, *first.parameters()))
    with saved.hooks():
        loss = run(x).square().sum()
    split = SplitBackward([loss], [x], saved)
    found = split.input_gradients([torch.ones_like(loss)])
    split.weight_gradients()
    torch.testing.assert_close([*found, first.weight.grad, first.bias.grad], list(expected))


def test_a_loss_that_frees_its_gradients_runs_once():
    torch.manual_seed(0)
    model = build_gpt(GPTConfig(29, 16, 1, 4, 16, tied=False))
    targets = torch.randint(0, 29, (2, 9))
    inputs = torch.randn(2, 9, 16, requires_grad=True)
    total, _ = model[-1](inputs, SequenceInfo(), targets)
    total.backward()
    expected, expected_input = {n: p.grad for n, p in model[-1].named_parameters()}, inputs.grad
    model.zero_grad()
    inputs = inputs.detach().requires_grad_()
    total, _ = model[-1](inputs, SequenceInfo(), targets)
    split = SplitBackward([total], [inputs])
    torch.testing.assert_close(split.input_gradients([torch.ones(())]), [expected_input])
    split.weight_gradients()
    for key, parameter in model[-1].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], msg=key)


def test_without_inputs_the_second_half_is_the_backward_pass():
    model = nn.Linear(3, 2)
    output = model(torch.ones(4, 3))
    split = SplitBackward([output], [])
    assert split.input_gradients([torch.ones_like(output)]) == []
    assert model.weight.grad is None
    split.weight_gradients()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 4.0))


def _peak(model: nn.Module, inputs: Tensor, *, halves: bool, release: bool = False) -> int:
    """Return the peak memory of a forward and a backward pass, without parameters, inputs and gradients of
    parameters."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    saved = SavedTensors()
    with MemoryTracker((*model.parameters(), *gradients, inputs)) as tracker:
        with saved.hooks() if release else nullcontext():
            outputs = model(inputs)
        given = [torch.ones_like(output) for output in outputs]
        if halves:
            split = SplitBackward(outputs, [inputs], saved)
            del outputs
            split.input_gradients(given)
            del given
            split.weight_gradients()
        else:
            torch.autograd.backward(outputs, given)
    return tracker.peak


def test_a_transformer_needs_little_more_memory_between_the_halves():
    model, inputs = Blocks(128), torch.randn(4, 128, 64, requires_grad=True)
    whole = _peak(model, inputs, halves=False)
    assert _peak(model, inputs, halves=True) > 1.4 * whole
    assert _peak(model, inputs, halves=True, release=True) < 1.2 * whole


def test_a_saved_tensor_that_has_changed_is_found():
    saved, inputs = SavedTensors(), torch.randn(4, 3, requires_grad=True)
    with saved.hooks():
        hidden = inputs.exp()
    split = SplitBackward([hidden], [inputs], saved)
    hidden.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        split.input_gradients([torch.ones(4, 3)])


def test_the_second_half_releases_the_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    freed: list[int] = []

    class Watched:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # a saved output would keep its own graph alive

        def __del__(self) -> None:
            freed.append(1)

    inputs = torch.ones(4, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Watched, lambda watched: watched.tensor):
        output = model(inputs)
    split = SplitBackward([output], [inputs])
    del output
    split.input_gradients([torch.ones(4, 3)])
    split.weight_gradients()
    del split
    assert len(freed) == 5  # inputs and weights of both layers, and the output of tanh
