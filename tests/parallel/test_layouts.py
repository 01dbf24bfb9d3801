"""The engine knows layouts, not axes: models divided by hand over tensor ranks and stages train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Layout, Part, Shard
from farandole.mesh import Mesh
from farandole.parallel.engine import Engine
from farandole.parallel.loss_scaling import LossScaler
from tests.parallel.test_optimizers import adafactor_refused

WIDTH, HIDDEN, WORDS, STEPS, CLIP = 6, 8, 11, 4, 0.4


class Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of the sum is the gradient of each summand."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Communicator | None) -> Tensor:
        """Sum."""
        total = value.clone()
        if comm is not None:
            comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass on."""
        return gradient, None


class Copy(torch.autograd.Function):
    """A value that all ranks have; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Communicator | None) -> Tensor:
        """Pass on."""
        ctx.comm = comm
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum."""
        gradient = gradient.contiguous().clone()
        if ctx.comm is not None:
            ctx.comm.all_reduce(gradient)
        return gradient, None


class Perceptron(nn.Module):
    """A tied embedding, a norm, and two layers; each rank of `comm` stores the weights of its hidden units."""

    def __init__(self, hidden: Sequence[int] = range(HIDDEN), comm: Communicator | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.comm = comm
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        own = torch.tensor(hidden)
        self.up, self.bias = nn.Parameter(up.weight[own].detach()), nn.Parameter(up.bias[own].detach())
        self.down = nn.Parameter(down.weight[:, own].detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (..., WORDS)."""
        x = self.embedding(tokens)
        inner = torch.tanh(F.linear(Copy.apply(self.norm(x), self.comm), self.up, self.bias))
        x = x + Sum.apply(F.linear(inner, self.down), self.comm)
        return F.linear(x, self.embedding.weight)


def _layouts() -> dict[str, Layout]:
    same = frozenset({"tensor"})
    parts = (Part(HIDDEN // 2), Part(HIDDEN // 2))  # two fused layers
    return {
        "up": Layout("up", (HIDDEN, WIDTH), shards=(("tensor", Shard(0, parts)),)),
        "bias": Layout("bias", (HIDDEN,), shards=(("tensor", Shard(0, parts)),)),
        "down": Layout("down", (WIDTH, HIDDEN), shards=(("tensor", Shard(1, parts)),)),
        "embedding.weight": Layout("embedding.weight", (WORDS, WIDTH), same=same),
        "norm.weight": Layout("norm.weight", (WIDTH,), same=same),
        "norm.bias": Layout("norm.bias", (WIDTH,), same=same),
    }


def _batch(step: int, replica: int) -> Tensor:
    return torch.randint(
        0, WORDS, (1 + replica, 5), generator=torch.Generator().manual_seed(9 * step + replica)
    )


def _loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    targets = tokens.roll(1, -1).flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"), tokens.numel()


def _alone(replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    norms = []
    for step in range(STEPS):
        parts = [_loss(model(batch), batch) for batch in (_batch(step, r) for r in range(replicas))]
        (sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def _parallel(
    rank: int, size: int, tensor: int, zero: int, dtype: torch.dtype | None, folder: Path | None
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    mesh = Mesh.box(size, data=size // tensor, tensor=tensor)
    (cell,) = mesh.of_rank(rank)
    over = mesh.connect(comm, [("tensor",)]).of(cell, "tensor").comm
    layouts = _layouts()
    hidden = [row for ((start, end),) in layouts["bias"].boxes(mesh, cell) for row in range(start, end)]
    model = Perceptron(hidden, over)
    scaler = LossScaler(2.0**8) if dtype is torch.float16 else None
    engine = Engine(model, comm, 100, zero=zero, dtype=dtype, scaler=scaler, mesh=mesh, layouts=layouts)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.05))
    norms, losses = [], []
    if folder is not None and folder.exists():
        engine.load(folder)
    for step in range(STEPS):
        losses.append(engine.forward_backward([_batch(step, cell.data)], _loss).loss)
        norms.append(engine.clip(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    if folder is not None and not folder.exists():
        engine.save(folder)
    engine.close()
    return state, norms, losses


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_tensor_parallel_layers_train_as_in_one_process(
    ranks: Any, size: int, tensor: int, backend: str
) -> None:
    expected, norms = _alone(size // tensor)
    for zero, dtype in [(0, None), (1, None), (2, None), (3, None), (1, torch.float16), (3, torch.float16)]:
        rtol, atol = (1e-4, 1e-5) if dtype is None else (5e-2, 5e-2)
        results = ranks(size, backend).run(_parallel, tensor, zero, dtype, None)
        for state, found, losses in results:
            assert found == pytest.approx(norms, rel=rtol)
            assert losses == results[0][2]
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name].float(), value, rtol=rtol, atol=atol, msg=f"{name}, zero={zero}, {dtype}"
                )


WAYS = [(1, 1, 0), (2, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 0), (2, 1, 1)]
"""The number of ranks, the number of ranks that share each layer, and the ZeRO stage."""


def test_a_checkpoint_of_any_layout_loads_into_any_other(ranks: Any, tmp_path: Path) -> None:
    for number, (size, tensor, zero) in enumerate(WAYS):
        folder = tmp_path / f"state{number}"
        ranks(size).run(_parallel, tensor, zero, None, folder)
        alone = ranks(1).run(_parallel, 1, 0, None, folder)[0]
        for other_size, other_tensor, other_zero in WAYS:
            if other_size // other_tensor > 1:
                continue  # more replicas have other batches
            for _, norms, losses in ranks(other_size).run(_parallel, other_tensor, other_zero, None, folder):
                assert losses == pytest.approx(alone[2], rel=1e-5)
                assert norms == pytest.approx(alone[1], rel=1e-4)


def _adafactor(rank: int, size: int) -> str:
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    mesh, layouts = Mesh.box(size, tensor=size), _layouts()
    (cell,) = mesh.of_rank(rank)
    hidden = [row for ((start, end),) in layouts["bias"].boxes(mesh, cell) for row in range(start, end)]
    return adafactor_refused(Engine(Perceptron(hidden, comm), comm, mesh=mesh, layouts=layouts))


def test_an_optimizer_of_matrices_requires_whole_matrices(ranks: Any) -> None:
    for message in ranks(2).run(_adafactor):
        assert "which tensor parallelism splits" in message
        assert "use tensor=1, or an elementwise optimizer" in message


class Chain(nn.Module):
    """The layers of some stages, and the embedding that the first and the last one share."""

    def __init__(self, stages: int, own: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(WORDS, WIDTH)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]
        if own & {0, stages - 1}:
            self.embedding = nn.Parameter(weight)
        self.layers = nn.ModuleDict({str(number): layers[number] for number in sorted(own)})


def _chain_layouts(stages: int) -> dict[str, Layout]:
    layouts = {"embedding": Layout("embedding", (WORDS, WIDTH), frozenset({0, stages - 1}))}
    for number in range(stages):
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
            key = f"layers.{number}.{name}"
            layouts[key] = Layout(key, shape, frozenset({number}))
    return layouts


def _contributions(chain: Chain, stages: int, tokens: Tensor) -> list[dict[str, Tensor]]:
    """Return each stage's contribution to the gradient of the loss, by parameter name."""
    first, last = (chain.embedding.detach().clone().requires_grad_() for _ in range(2))
    x = F.embedding(tokens, first)
    for number in range(stages):
        x = torch.tanh(chain.layers[str(number)](x))
    total, count = _loss(F.linear(x, last), tokens)
    (total / count).backward()
    found: list[dict[str, Tensor]] = []
    for number in range(stages):
        layer = chain.layers[str(number)]
        assert isinstance(layer, nn.Linear)
        names = {f"layers.{number}.weight": layer.weight.grad, f"layers.{number}.bias": layer.bias.grad}
        found.append({name: gradient for name, gradient in names.items() if gradient is not None})
    for stage, weight in ((0, first), (stages - 1, last)):
        assert weight.grad is not None
        found[stage]["embedding"] = found[stage].get("embedding", torch.zeros(())) + weight.grad
    return found


def _staged(rank: int, size: int, sizes: dict[str, int], zero: int) -> tuple[dict[str, Tensor], float]:
    """Run two steps with the gradients that each stage would have after its part of the backward pass."""
    assert dist.group.WORLD is not None
    comm, stages = Communicator(dist.group.WORLD), sizes["pipeline"]
    mesh = Mesh.box(size, factors=None, **sizes)
    cells = mesh.of_rank(rank)
    model = Chain(stages, {cell.pipeline for cell in cells})
    engine = Engine(model, comm, 100, zero=zero, mesh=mesh, layouts=_chain_layouts(stages))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.05))
    reference = Chain(stages, set(range(stages)))
    parameters = dict(model.named_parameters())
    for step in range(2):
        loss = torch.zeros(())
        for cell in cells:
            reference.zero_grad()
            tokens = _batch(step + 5 * cell.mirror, cell.data)
            for name, gradient in _contributions(reference, stages, tokens)[cell.pipeline].items():
                loss = loss + (parameters[name] * gradient).sum()
        engine.backward(loss)
        norm = engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    engine.close()
    return state, norm


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline": 2},
        {"pipeline": 2, "data": 2},
        {"pipeline": 3},
        {"pipeline": 2, "mirror": 2},
        {"pipeline": 3, "mirror": 2},  # the rank in the middle has a stage twice
        {"pipeline": 2, "mirror": 2, "data": 2},
    ],
    ids=lambda sizes: "x".join(f"{name}{size}" for name, size in sizes.items()),
)
def test_stages_with_a_tied_embedding_update_as_one_process(ranks: Any, sizes: dict[str, int]) -> None:
    stages, data = sizes["pipeline"], sizes.get("data", 1)
    model, reference = Chain(stages, set(range(stages))), Chain(stages, set(range(stages)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            for mirror in range(sizes.get("mirror", 1)):
                for replica in range(data):
                    reference.zero_grad()
                    parts = _contributions(reference, stages, _batch(step + 5 * mirror, replica))
                    for part in parts:
                        if name in part:
                            parameter.grad += part[name] / data
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    expected = {name: value.detach() for name, value in model.named_parameters()}
    for zero in (0, 1, 2):
        results = ranks(stages * data).run(_staged, sizes, zero)
        for state, found in results:
            assert found == pytest.approx(norm, rel=1e-5)
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], msg=f"{name}, zero={zero}")
    seen = {name for state, _ in results for name in state}
    assert seen == set(expected)
