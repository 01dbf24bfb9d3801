"""Frozen weights in 8 and 4 bits through torchao.  Without torchao, only the error message is tested."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.engine import Engine
from farandole.parallel.lora import LoRALinear, add_lora, merge, remove, unmerge
from farandole.parallel.lora.peft_adapter import load_adapter, save_adapter
from farandole.parallel.lora.quantized import dense, stored_bytes
from farandole.plan import LoRA

torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: pip install 'farandole[qlora]'",
)

BASES: Any = [("int8", 0.01, 1.1), ("nf4", 0.12, 0.6)]
"""The name, the relative error of weights with a normal distribution, and the bytes per weight."""

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64, bias=False)).to(dtype)


def adapted(base: Any, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    net = model(dtype)
    add_lora(net, LoRA(rank=4, alpha=8, base=base, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in (net[0], net[2]):
            b: Any = layer.lora_B
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return net


def as_dense(net: nn.Sequential) -> nn.Sequential:
    """Return the same model with the ordinary weights that the quantized weights represent."""
    other = copy.deepcopy(net)
    for layer in other:
        if isinstance(layer, LoRALinear):
            layer.weight = nn.Parameter(dense(layer.weight), requires_grad=False)
    return other


@torchao
@pytest.mark.parametrize(("base", "error", "bytes_each"), BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_small_and_close_to_the_original(
    base: str, error: float, bytes_each: float, dtype: torch.dtype
) -> None:
    net, original = adapted(base, dtype), model(dtype)
    for layer, before in ((net[0], original[0]), (net[2], original[2])):
        weight: Any = layer.weight
        exact: Any = before.weight
        assert 0 < (dense(weight) - exact).norm() < error * exact.norm()
        assert stored_bytes(weight.data) < bytes_each * exact.numel() + 100
        assert not weight.requires_grad
    assert net(X.to(dtype)).dtype == dtype


@torchao
@pytest.mark.parametrize(("base", "error", "bytes_each"), BASES)
def test_gradients_match_the_dequantized_weights(base: str, error: float, bytes_each: float) -> None:
    net = adapted(base, bias="lora_only")
    same = as_dense(net)
    results = []
    for each in (net, same):
        x = X.clone().requires_grad_()
        out = each(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert len(results[0]) == 2 + 5
    torch.testing.assert_close(results[0], results[1])
    assert net[0].weight.grad is None
    mixed = []
    for each in (net, same):
        each.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = each(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        mixed.append([out, x.grad, *(p.grad for p in each.parameters() if p.requires_grad)])
    torch.testing.assert_close(mixed[0], mixed[1], rtol=0.05, atol=0.05)


@torchao
@pytest.mark.parametrize(("base", "error", "bytes_each"), BASES)
def test_training_compensates_the_quantization_error(base: str, error: float, bytes_each: float) -> None:
    original, net = model(), adapted(base)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 3e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.mse_loss(net(X), original(X).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5


@torchao
@pytest.mark.parametrize(("base", "error", "bytes_each"), BASES)
def test_merging_makes_ordinary_weights(base: str, error: float, bytes_each: float) -> None:
    net = adapted(base).eval()
    expected = net(X)
    merge(net)
    torch.testing.assert_close(net(X), expected, rtol=1e-5, atol=1e-5)
    unmerge(net)
    torch.testing.assert_close(net(X), expected, rtol=1e-5, atol=1e-5)
    merge(net)
    remove(net)
    assert type(net[0]) is nn.Linear and type(net[0].weight) is nn.Parameter
    torch.testing.assert_close(net(X), expected, rtol=1e-5, atol=1e-5)


@torchao
@pytest.mark.parametrize(("base", "error", "bytes_each"), BASES)
def test_copies_pickles_and_files(base: str, error: float, bytes_each: float, tmp_path: Path) -> None:
    net = adapted(base).eval()
    expected = net(X)
    assert torch.equal(copy.deepcopy(net)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(net))(X), expected)
    state = io.BytesIO()
    torch.save(net.state_dict(), state)
    state.seek(0)
    other = adapted(base).eval()
    other.load_state_dict(torch.load(state))
    assert torch.equal(other(X), expected)
    save_adapter(net, tmp_path)
    other = model().eval()
    add_lora(other, LoRA(rank=4, alpha=8, base=base))  # type: ignore[arg-type]
    load_adapter(other, tmp_path)
    assert torch.equal(other(X), expected)


@torchao
def test_a_removed_layer_keeps_its_quantized_weight() -> None:
    net = adapted("int8")
    expected = F.linear(X, dense(net[0].weight), net[0].bias)
    remove(net)
    torch.testing.assert_close(net[0](X), expected)
    with pytest.raises(ValueError, match="already of type Int8Tensor"):
        add_lora(net, LoRA(targets="0"))


@torchao
def test_int4_is_refused_on_a_cpu_with_an_alternative() -> None:
    net = model()
    before = net(X)
    with pytest.raises(
        ValueError, match=r"cannot quantize the .* to int4 on cpu .*base='int8', or base='nf4'"
    ):
        add_lora(net, LoRA(base="int4"))
    assert torch.equal(net(X), before) and net[0].weight.requires_grad
    with pytest.raises(ValueError, match="33 inputs, not a multiple of 32"):
        add_lora(nn.Sequential(nn.Linear(33, 64)), LoRA(base="int4"))


@torchao
def test_weights_that_cannot_be_quantized_are_named_without_changes() -> None:
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 3, bias=False))
    with pytest.raises(ValueError, match="weight of 1 has 384 values, not a multiple of 16,384"):
        add_lora(net, LoRA(base="nf4"))
    assert type(net[0]) is nn.Linear and net[0].weight.requires_grad
    with torch.no_grad():
        net[1].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight of 1 contains non-finite values"):
        add_lora(net, LoRA(base="int8"))
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="weight of 0 is tied to 1.weight: a quantized weight"):
        add_lora(tied, LoRA(base="int8"))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    net = model()
    with pytest.raises(ImportError, match=r"base='int8' needs torchao .*pip install 'farandole\[qlora\]'"):
        add_lora(net, LoRA(base="int8"))
    assert type(net[0]) is nn.Linear and net[0].weight.requires_grad


def _train(net: nn.Module, x: Tensor, shares: int) -> list[Tensor]:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for part in x.chunk(shares):
        (net(part).square().mean() / shares).backward()
    optimizer.step()
    return [p.detach() for p in net.parameters() if p.requires_grad]


def _train_parallel(rank: int, size: int, base: Any) -> list[Tensor]:
    net = adapted(base)
    if rank > 0:  # the parameters of rank 0 are used
        for layer in (net[0], net[2]):
            other: Any = torch.randn_like(dense(layer.weight))
            net_layer = nn.Sequential(nn.Linear(other.shape[1], other.shape[0], bias=False))
            net_layer[0].weight = nn.Parameter(other)
            add_lora(net_layer, LoRA(base=base))
            layer.weight = net_layer[0].weight
    assert dist.group.WORLD is not None
    replica = Engine(net, Communicator(dist.group.WORLD))
    net(X.chunk(size)[rank]).square().mean().backward()
    replica.synchronize()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1).step()
    replica.close()
    return [p.detach() for p in net.parameters() if p.requires_grad]


@torchao
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_data_parallel_over_a_quantized_base(ranks: Any, base: str) -> None:
    expected = _train(adapted(base), X, 2)
    for result in ranks(2).run(_train_parallel, base):
        torch.testing.assert_close(result, expected)
