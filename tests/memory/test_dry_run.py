"""Bytes kept for the backward pass: a dry run without memory counts as many bytes as a real pass keeps."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farandole.memory.dry_run import saved_bytes
from farandole.memory.recompute import apply_recompute
from farandole.models.gpt import GPTConfig, build_gpt
from tests.memory.models import CASES, small_gpt, small_resnet, step


class Storages(TorchDispatchMode):
    """Records every storage that an operation creates; a forward pass keeps the storages that are alive after it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return output


def alive_after_forward(model: nn.Module, example: Any) -> int:
    """Return the bytes that only the graph of the outputs keeps alive, without asking autograd."""
    inputs = example if isinstance(example, tuple) else (example,)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *inputs)}
    with Storages() as storages:
        outputs = [one for one in tree_leaves(model(*inputs)) if isinstance(one, Tensor)]
    graph = [one.grad_fn for one in outputs]
    del outputs
    gc.collect()
    alive = [ref() for key, ref in storages.made.items() if key not in own]
    found = {storage._cdata: storage.nbytes() for storage in alive if storage is not None}
    del graph
    return sum(found.values())


@pytest.mark.parametrize("way", ["none", "block", "selective"])
@pytest.mark.parametrize("name", CASES)
def test_fake_and_real_tensors_agree_with_live_memory(name: str, way: Any) -> None:
    torch.manual_seed(0)
    model, example = CASES[name]()
    apply_recompute(model, way)
    step(model, example)  # selective recomputation learns in the first step how far it must go
    for autocast in (False, True) if name in ("gpt", "resnet") else (False,):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            fake, real = saved_bytes(model, example), saved_bytes(model, example, real=True)
            if name == "resnet" and autocast:
                # The mean and deviation of a batch are fp32 on a CPU, and bf16 in torch's shape function.
                channels = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
                assert real.total - fake.total in (0, 2 * 2 * channels)
                fake = real
            assert fake == real
            # Copies of buffers (batch norms) and random states for a recomputation are small, and are not saved
            # tensors.
            extra = alive_after_forward(model, example) - fake.total
            calls = 3 if name == "keywords" else len(fake.blocks)
            buffers = sum(buffer.nbytes for buffer in model.buffers())
            states = torch.get_rng_state().nbytes * calls
            assert 0 <= extra <= (0 if way == "none" else buffers + states), (extra, fake)


def test_a_linear_layer_by_hand() -> None:
    """ReLU keeps its output (4, 16), and the second layer keeps its input, which is the same tensor."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(4, 8)
    kept = saved_bytes(model, x)
    assert kept.blocks == {"0": 0, "1": 4 * 16 * 4, "2": 0} and kept.outside == 0  # x belongs to the caller
    assert saved_bytes(model, x, loss=lambda out: out.square().sum()).outside == 4 * 2 * 4
    wide = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    assert saved_bytes(wide, x).total == 4 * 16 * 4
    with torch.no_grad():
        assert saved_bytes(wide, x).total == 4 * 16 * 4


def test_parameters_views_and_dead_branches_do_not_count() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("mask", torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x.exp().sin()  # a branch that nothing uses
            hidden = x @ (self.weight.t() * self.mask)
            first, second = hidden.chunk(2, -1)  # two views of one memory
            return first.sin() * second.sin()

    x = torch.randn(3, 8)
    # `hidden` counts once; the masked weight is kept only if x requires a gradient; the product keeps both sines.
    assert saved_bytes(Model(), x).total == 3 * 8 * 4 + 2 * 3 * 4 * 4
    assert saved_bytes(Model(), x.requires_grad_()).total == 3 * 8 * 4 + 2 * 3 * 4 * 4 + 8 * 8 * 4


def test_billions_of_parameters_on_the_meta_device() -> None:
    config = GPTConfig(vocabulary=50_000, context=2048, layers=4, heads=32, width=8192)
    with torch.device("meta"):
        model = build_gpt(config)
        tokens = torch.empty(4, 2048, dtype=torch.int64)
    assert config.parameters > 3_000_000_000
    targets = torch.zeros(4 * 2048, dtype=torch.int64)
    kept = saved_bytes(model, tokens, loss=lambda out: F.cross_entropy(out.view(4 * 2048, -1), targets))
    per_token = kept.blocks["2"] / (4 * 2048)
    assert kept.blocks["2"] == kept.blocks["3"] == kept.blocks["4"]
    tables = 2 * 2048 * 128 * 4  # sines and cosines, which the first block computes for all blocks
    assert kept.blocks["1"] == kept.blocks["2"] + tables
    assert 15 < per_token / (4 * config.width) < 25  # about 20 values of fp32 per value of the stream
    assert (
        kept.outside == 8192 * 50_000 * 4 + 8192 * 8 + 4
    )  # log-probabilities, targets, the sum of their weights
    assert all(parameter.is_meta for parameter in model.parameters())
    chosen = apply_recompute(model, "auto", example=tokens, budget_bytes=8 << 30)
    assert chosen.after is not None and chosen.after <= 8 << 30 < chosen.before


def test_a_meta_model_has_the_same_bytes_as_a_real_model() -> None:
    config = GPTConfig(vocabulary=50, context=32, layers=2, heads=2, width=32, dropout=0.1)
    with torch.device("meta"):
        meta, tokens = build_gpt(config), torch.empty(2, 32, dtype=torch.int64)
    real = saved_bytes(build_gpt(config), torch.randint(50, (2, 32)), real=True)
    assert saved_bytes(meta, tokens) == saved_bytes(meta, torch.randint(50, (2, 32))) == real


@pytest.mark.parametrize("real", [False, True])
def test_measuring_does_not_change_the_model(real: bool) -> None:
    for case in (small_gpt, small_resnet):
        model, example = case()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parameters, kinds = list(model.parameters()), [type(module) for module in model.modules()]
        state = torch.get_rng_state()
        saved_bytes(model, example, real=real)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
        assert [type(module) for module in model.modules()] == kinds
        assert all(parameter.grad is None for parameter in parameters)


class FrozenConfig(OrderedDict[str, int]):
    """A read-only dict, as in diffusers."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("the configuration is read-only")


class Caching(nn.Module):
    """Caches tensors in its first forward pass, and assigns a running mean in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = FrozenConfig({"width": 4})
        self.mask: Tensor | None = None
        self.masks: dict[int, Tensor] = {}
        self.history: list[Tensor] = []
        self.register_buffer("scale", None, persistent=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(4.0)
            self.masks[4] = 2 * self.mask
            self.register_buffer("scale", torch.full((4,), 3.0))
            self.register_buffer("shift", torch.ones(4))
            self.later = nn.Parameter(torch.ones(4))
        self.history.append(x)
        self.mean = self.mean + x.detach().mean(0)
        return self.linear(x * self.mask * self.masks[4] * self.scale) + self.shift * self.later


@pytest.mark.parametrize("real", [False, True])
def test_tensors_that_the_forward_pass_stores_are_removed(real: bool) -> None:
    model, fresh, x = Caching(), Caching(), torch.randn(2, 4)
    fresh.load_state_dict(model.state_dict())
    saved_bytes(model, x, real=real)
    assert model.mask is None and model.scale is None and not model.masks and not model.history
    assert model._non_persistent_buffers_set == {"scale"} and not hasattr(model, "shift")
    assert list(dict(model.named_parameters())) == ["linear.weight", "linear.bias"]
    assert torch.equal(model.mean, torch.zeros(4)) and model.config == {"width": 4}
    assert torch.equal(model(x), fresh(x))
    history = model.history
    saved_bytes(model, x, real=real)
    assert model.history is history and len(history) == 1 and history[0] is x
    assert torch.equal(model(x), fresh(x))


@pytest.mark.parametrize("mode", ["block", "attention", "auto"])
def test_a_mask_cached_at_first_use_does_not_affect_training(mode: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.mask = nn.Linear(8, 24), None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.full((4, 4), -1e9).triu(1)
            q, k, v = self.project(x).chunk(3, -1)
            return (q @ k.transpose(1, 2) + self.mask).softmax(-1) @ v

    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 4, 8)
    plain = nn.Sequential(Attention(), Attention())
    plain.load_state_dict(model.state_dict())
    apply_recompute(model, mode, example=x, budget_bytes=1500 if mode == "auto" else None)
    for each in (plain, model):
        each(x).sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and torch.equal(found.grad, expected.grad)


def test_a_failing_model_is_restored() -> None:
    model, _ = small_gpt()
    weight = model[0].tokens.weight
    with pytest.raises(Exception, match="Long, Int|indices"):
        saved_bytes(model, torch.randn(2, 32))
    assert model[0].tokens.weight is weight and model[3].weight is weight


def test_ways_to_give_an_example() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return F.silu(x) * scale.sin()

    x, scale = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    kept = saved_bytes(Scaled(), (x, scale))
    assert kept == saved_bytes(Scaled(), {"x": x, "scale": scale}) and kept.total == 2 * 5 * 4
    assert list(kept.blocks) == [""]


def test_devices_that_cannot_be_simulated_are_refused() -> None:
    model, tokens = small_gpt()
    with pytest.raises(ValueError, match="use device='cpu'"):
        saved_bytes(model, tokens, device="meta")
    with pytest.raises(ValueError, match="omit them with real=True"):
        saved_bytes(model, tokens, device="cpu", real=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="only if this machine has one"):
            saved_bytes(model, tokens, device="cuda")
