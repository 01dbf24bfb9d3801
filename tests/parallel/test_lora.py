"""LoRA is the dense formula W + s B A, with gradients for A and B alone."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farandole.comm.communicator import Communicator
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel.engine import Engine
from farandole.parallel.lora import LoRALinear, add_lora, merge, remove, summarize, unmerge
from farandole.plan import LoRA
from farandole.train.config import load_config
from farandole.train.trainer import build_optimizer

GPT = GPTConfig(vocabulary=50, context=8, layers=2, heads=2, width=16)
TARGETS = ("*.qkv", "*.out")


def gpt(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return build_gpt(GPT)


def tokens(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (batch, 8), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, -1).flatten())


def disturb(model: nn.Module, seed: int = 1) -> nn.Module:
    """Set B of every adapter to random values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def adapted(lora: LoRA | None = None) -> nn.Sequential:
    model = gpt()
    add_lora(model, lora or LoRA(rank=4, alpha=8, targets=TARGETS))
    disturb(model)
    return model


class Dense(nn.Module):
    """The formula with one dense weight, x (W + s B A)^T + b, whose gradients come from autograd alone."""

    def __init__(self, linear: LoRALinear, scaling: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        self.a = nn.Parameter(linear.lora_A.detach().clone())
        self.b = nn.Parameter(linear.lora_B.detach().clone())
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.scaling * self.b @ self.a).T + self.bias


@pytest.mark.parametrize("use_rslora", [False, True])
def test_training_matches_the_dense_formula(use_rslora: bool) -> None:
    lora = LoRA(rank=4, alpha=6, targets=TARGETS, use_rslora=use_rslora)
    model = adapted(lora)
    scaling = 6 / 2 if use_rslora else 6 / 4
    formula = copy.deepcopy(model)
    for block in list(formula)[1:3]:
        attention: Any = block.attention
        attention.qkv, attention.out = Dense(attention.qkv, scaling), Dense(attention.out, scaling)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    both = zip(model.modules(), formula.modules(), strict=True)
    pairs = [(layer, dense) for layer, dense in both if isinstance(dense, Dense)]
    assert len(pairs) == 4
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    theirs = torch.optim.SGD([p for _, dense in pairs for p in dense.parameters()], 0.5)
    for step in range(3):
        for net, optimizer in ((model, ours), (formula, theirs)):
            optimizer.zero_grad()
            loss_of(net, tokens(seed=step)).backward()
        for layer, dense in pairs:
            torch.testing.assert_close(layer.lora_A.grad, dense.a.grad)
            torch.testing.assert_close(layer.lora_B.grad, dense.b.grad)
        ours.step()
        theirs.step()
    for layer, dense in pairs:
        torch.testing.assert_close(layer.lora_B, dense.b)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name.endswith(("lora_A", "lora_B"))), name
        if name in frozen:
            assert torch.equal(parameter, frozen[name])


def test_the_output_is_unchanged_and_the_summary_lists_trained_layers() -> None:
    model = gpt()
    expected = model(tokens())
    before = dict(model.named_parameters())
    summary = add_lora(model, LoRA(rank=4, alpha=8, targets=TARGETS, dropout=0.5))
    assert torch.equal(model(tokens()), expected), "B is zero: not even dropout has an effect"
    assert summary.layers == tuple(f"{block}.attention.{name}" for block in (1, 2) for name in ("qkv", "out"))
    assert summary.trained == 2 * (4 * (16 + 48) + 4 * (16 + 16))
    assert summary.total == GPT.parameters + summary.trained
    assert summary.bytes == 4 * summary.total
    assert str(summary) == "4 layers adapted: 768 of 8 k parameters trained (9.41 %), weights of 31.9 KiB"
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items()), "the same objects and names"
    a = model[1].attention.qkv.lora_A
    bound = 16**-0.5
    assert a.abs().max() <= bound and a.std() > 0.4 * bound
    optimizer = build_optimizer(model, load_config("tiny", []).optimizer)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == summary.trained


def test_merging_keeps_the_output_and_unmerging_restores_the_weights() -> None:
    model = adapted()
    model.eval()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = model(tokens())
    merge(model)
    assert "merged" in repr(model)
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(model[1].attention.qkv.weight, weights["1.attention.qkv.weight"])
    with pytest.raises(RuntimeError, match="already merged"):
        merge(model)
    model.train()
    with pytest.raises(RuntimeError, match="call unmerge"):
        model(tokens())
    model.eval()
    unmerge(model)
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="not merged"):
        unmerge(model)


@pytest.mark.parametrize("merged", [False, True])
def test_removing_restores_plain_layers(merged: bool) -> None:
    model = adapted()
    base = gpt()(tokens())
    expected = model(tokens()) if merged else base
    if merged:
        merge(model)
    remove(model)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert list(dict(model.named_parameters())) == list(dict(gpt().named_parameters()))
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(expected, base) != merged
    with pytest.raises(ValueError, match="no LoRA"):
        remove(model)
    add_lora(model, LoRA())  # adapters can be added again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_adapters_in_fp32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 6)).to(dtype)
    add_lora(model, LoRA(rank=2, alpha=2))
    disturb(model)
    layer: Any = model[0]
    assert layer.lora_A.dtype == torch.float32
    x = torch.randn(5, 8).to(dtype)
    dense = layer.weight.float() + layer.lora_B @ layer.lora_A
    before = layer.weight.detach().clone()
    assert model(x).dtype == dtype
    torch.testing.assert_close(
        model(x).float(), x.float() @ dense.T + layer.bias.float(), rtol=2e-2, atol=2e-2
    )
    merge(model)
    assert torch.equal(layer.weight, dense.to(dtype)), "rounded once"
    unmerge(model)
    torch.testing.assert_close(layer.weight, before, rtol=1e-2, atol=1e-2)


def test_under_autocast_products_are_in_bf16_and_gradients_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    add_lora(model, LoRA(rank=2, alpha=2))
    disturb(model)
    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    mixed: Any = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    model(x).square().sum().backward()
    for got, parameter in zip(mixed, (p for p in model.parameters() if p.requires_grad), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, parameter.grad, rtol=0.1, atol=0.1)


def test_dropout_applies_to_the_adapter_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4))
    add_lora(model, LoRA(rank=2, alpha=2, dropout=0.5))
    disturb(model)
    layer: Any = model[0]
    x = torch.randn(1, 64)
    torch.manual_seed(3)
    got = model(x)
    torch.manual_seed(3)
    kept = F.dropout(x, 0.5)
    expected = F.linear(x, layer.weight, layer.bias) + kept @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(got, expected)
    assert torch.equal(model.eval()(x), model(x))


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model = adapted(LoRA(rank=4, alpha=8, targets=TARGETS, dropout=0.3))
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        x = tokens()
        for block in model:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x.square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 8
    torch.testing.assert_close(gradients[0], gradients[1])


def test_copies_and_pickles_are_independent_models() -> None:
    model = adapted(LoRA(rank=4, targets=re.compile(r".*\.(qkv|out)")))
    expected = model(tokens())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(other(tokens()), expected)
        merge(other)
        assert other[0].tokens.weight is other[-1].weight, "tied weights stay tied"
    assert torch.equal(model(tokens()), expected)
    fresh = gpt(seed=9)
    add_lora(fresh, LoRA(rank=4, targets=TARGETS))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(tokens()), expected)


def test_parameters_may_become_views_of_one_tensor() -> None:
    model, same = adapted(), adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in trained])
    start = 0
    for parameter in trained:
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    for net in (model, same):
        loss_of(net, tokens()).backward()
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.5).step()
    expected = same(tokens())
    torch.testing.assert_close(model(tokens()), expected)
    everything = torch.cat([p.detach().flatten() for p in model.parameters()])  # includes frozen ones
    start = 0
    for parameter in model.parameters():
        parameter.data = everything[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    merge(model)
    torch.testing.assert_close(model.eval()(tokens()), expected, rtol=1e-5, atol=1e-5)
    first = model[1].attention.qkv.weight
    assert first.untyped_storage().data_ptr() == everything.untyped_storage().data_ptr()


class Tied(nn.Module):
    """A head tied to the embedding, as most language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


@pytest.mark.parametrize("by_memory", [False, True])
def test_a_tied_weight_is_not_merged_into_both(by_memory: bool) -> None:
    model = Tied()
    if by_memory:
        model.head.weight = nn.Parameter(torch.empty(11, 6))
        model.head.weight.data = model.embedding.weight.data
    add_lora(model, LoRA(rank=2, targets=("head", "hidden")))
    disturb(model)
    before = model.embedding.weight.detach().clone()
    expected = model(torch.arange(5))
    hidden = model.hidden.weight.detach().clone()
    with pytest.raises(ValueError, match=r"head is tied to embedding.weight.*untie=True"):
        merge(model)
    assert torch.equal(model.hidden.weight, hidden), "nothing was merged"
    model.eval()
    merge(model, untie=True)
    torch.testing.assert_close(model(torch.arange(5)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.embedding.weight, before)


def test_parameters_trained_in_addition_to_adapters() -> None:
    model = gpt()
    add_lora(
        model, LoRA(rank=2, targets=TARGETS, also_train=("norm_attention", "1.attention"), bias="lora_only")
    )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    norms = {f"{block}.norm_attention.{name}" for block in (1, 2) for name in ("weight", "bias")}
    whole = {f"1.attention.{layer}.{name}" for layer in ("qkv", "out") for name in ("weight", "bias")}
    second = {
        f"2.attention.{layer}.{name}" for layer in ("qkv", "out") for name in ("lora_A", "lora_B", "bias")
    }
    assert trained == norms | whole | second
    model = gpt()
    add_lora(model, LoRA(rank=2, targets="qkv", bias="all"))
    biases = {name for name, p in model.named_parameters() if p.requires_grad and name.endswith("bias")}
    assert biases == {name for name, _ in gpt().named_parameters() if name.endswith("bias")}
    with pytest.raises(
        ValueError, match="embedding.weight is tied to head.weight: also name head in also_train"
    ):
        add_lora(Tied(), LoRA(targets="hidden", also_train="embedding"))
    model = Tied()
    add_lora(model, LoRA(targets="hidden", also_train=("embedding", "head")))
    assert model.head.weight.requires_grad


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 8),
        ("qkv", 2),
        ("attention.qkv", 2),
        ("1.attention.qkv", 1),
        ("*.feed_forward.*", 4),
        ("[12].*.down", 2),
        (re.compile(r"2\..*(qkv|up)"), 2),
        (["qkv", "*.up", re.compile(r".*\.up")], 4),
    ],
)
def test_targets_are_names_globs_and_regular_expressions(targets: Any, count: int) -> None:
    assert len(add_lora(gpt(), LoRA(targets=targets)).layers) == count
    flat = nn.ModuleDict({"qkv": nn.Linear(2, 2)})
    assert add_lora(flat, LoRA(targets="*.qkv")).layers == ("qkv",)


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (
            gpt,
            "*.qvk",
            r"'\*\.qvk' matches no module; nearest: qkv; the model's layers: 1.attention.qkv, .*8 in all",
        ),
        (gpt, ("qkv", "1.atention.out"), "'1.atention.out' matches no module; nearest: 1.attention.out"),
        (gpt, re.compile("QKV"), r"re.compile\('QKV'\) matches no module; nearest: qkv"),
        (
            gpt,
            "*.norm_*",
            "only a plain nn.Linear or StackedLinear can be adapted: 1.norm_attention is a LayerNorm",
        ),
        (
            gpt,
            "attention",
            "1.attention is a SelfAttention.*layers inside: 1.attention.qkv, 1.attention.out",
        ),
        (lambda: nn.Linear(3, 3), "all-linear", r"a single nn.Linear, .*nn.Sequential\(model\)"),
        (
            lambda: nn.Sequential(nn.ReLU()),
            "all-linear",
            "matches no module; the model has no plain nn.Linear",
        ),
        (nn.Sequential, "x", "the model has no plain nn.Linear"),
        (
            lambda: nn.MultiheadAttention(4, 2),
            "out_proj",
            "out_proj is a NonDynamically.*without calling the layer",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "0", "0 is a LazyLinear"),
        (lambda: nn.Sequential(nn.Linear(3, 0)), "0", "0 is an nn.Linear with 3 inputs and 0 outputs"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), "linear1", "set_fastpath_enabled"),
        (
            lambda: adapted(),
            "up",
            r"already has LoRA, in 4 layers \(1.attention.qkv, ...\): call remove\(model\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_invalid_targets_do_not_change_the_model(make: Any, targets: Any, message: str) -> None:
    model = make()
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoRA(rank=2, targets=targets))
    assert [p.requires_grad for p in model.parameters()] == trained
    with pytest.raises(
        ValueError, match="also_train: 'nothing' matches no module|a single nn.Linear|already"
    ):
        add_lora(model, LoRA(also_train="nothing"))


def test_weight_norm_is_refused_and_a_shared_layer_is_adapted_once() -> None:
    normed = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="ParametrizedLinear"):
        add_lora(normed, LoRA(targets="0"))
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert add_lora(model, LoRA(rank=2, targets="2")).layers == ("0",)
    disturb(model)
    expected = model(torch.ones(1, 4))
    model.eval()
    merge(model)
    torch.testing.assert_close(model(torch.ones(1, 4)), expected)


def test_torchs_encoder_is_adapted_if_it_calls_its_layers() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        add_lora(model, LoRA(rank=2, targets="linear1"))
        disturb(model)
        expected = model(torch.ones(2, 3, 8))
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(torch.ones(2, 3, 8)), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank=0: expected at least 1"),
        ({"rank": 2.0}, TypeError, "rank=2.0: expected an integer"),
        ({"rank": True}, TypeError, "rank=True"),
        ({"alpha": float("nan")}, ValueError, "alpha=nan"),
        ({"alpha": 0}, ValueError, "alpha=0"),
        ({"alpha": "16"}, TypeError, "alpha='16'"),
        ({"dropout": 1.0}, ValueError, "dropout=1.0"),
        ({"dropout": None}, TypeError, "dropout=None"),
        ({"targets": ()}, ValueError, "expected at least one pattern; 'all-linear'"),
        ({"targets": ""}, ValueError, "got an empty string"),
        ({"targets": 3}, TypeError, "targets: expected a name.*got 3"),
        ({"targets": [nn.Linear]}, TypeError, "expected a name, a glob or a regular expression"),
        ({"bias": "some"}, ValueError, "bias='some'.*lora_only"),
        ({"base": "int2"}, ValueError, "base='int2'.*int8"),
    ],
)
def test_invalid_settings_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LoRA(**options)


def test_a_diverged_update_is_not_merged() -> None:
    model = adapted()
    layer: Any = model[2].attention.out
    with torch.no_grad():
        layer.lora_B[0, 0] = float("inf")
    before = model[1].attention.qkv.weight.detach().clone()
    with pytest.raises(ValueError, match="2.attention.out is not finite"):
        merge(model)
    assert torch.equal(model[1].attention.qkv.weight, before)


def test_inputs_may_have_any_leading_dimensions_and_strides() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    add_lora(model, LoRA(rank=2, alpha=2))
    disturb(model)
    layer: Any = model[0]
    dense = layer.weight + layer.lora_B @ layer.lora_A
    for x in (
        torch.randn(4),
        torch.randn(2, 0, 4),
        torch.randn(2, 3, 5, 4),
        torch.randn(4, 3, 2).transpose(0, 2),
    ):
        x.requires_grad_()
        torch.testing.assert_close(model(x), F.linear(x, dense, layer.bias))
        (got,) = torch.autograd.grad(model(x).square().sum(), x)
        (expected,) = torch.autograd.grad(F.linear(x, dense, layer.bias).square().sum(), x)
        torch.testing.assert_close(got, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 12),
    st.floats(0.1, 64),
    st.booleans(),
    st.integers(0, 3),
)
def test_any_shape(inputs: int, outputs: int, rank: int, alpha: float, bias: bool, rows: int) -> None:
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64))
    add_lora(model, LoRA(rank=rank, alpha=alpha))
    disturb(model)
    layer: Any = model[0]
    x = torch.randn(rows, inputs, dtype=torch.float64)
    dense = layer.weight + alpha / rank * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(model(x), F.linear(x, dense, layer.bias))
    model.eval()
    merge(model)
    torch.testing.assert_close(model(x), F.linear(x, dense, layer.bias))


def _train(model: nn.Module, batches: list[Tensor], shares: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(shares):
            (loss_of(model, part) / shares).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _train_parallel(rank: int, size: int, batches: list[Tensor]) -> tuple[dict[str, Tensor], int]:
    model = gpt(seed=rank)  # the base and the adapters of rank 0 are used
    add_lora(model, LoRA(rank=4, alpha=8, targets=TARGETS))
    disturb(model, seed=rank)
    assert dist.group.WORLD is not None
    replica = Engine(model, Communicator(dist.group.WORLD))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for batch in batches:
        replica.zero_grad()
        loss_of(model, batch.chunk(size)[rank]).backward()
        replica.synchronize()
        optimizer.step()
    reduced = sum(len(bucket.parameters) for bucket in replica.buckets)
    replica.close()
    return {name: p.detach() for name, p in model.named_parameters()}, reduced


def test_data_parallel_adapters_match_one_process(ranks: Any) -> None:
    batches = [tokens(4, seed) for seed in range(3)]
    model = gpt(0)
    add_lora(model, LoRA(rank=4, alpha=8, targets=TARGETS))
    disturb(model, seed=0)
    start = copy.deepcopy(dict(model.named_parameters()))
    expected = _train(model, batches, shares=2)
    results = ranks(2).run(_train_parallel, batches)
    for result, reduced in results:
        assert reduced == 8, "only the adapters are reduced"
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
            assert torch.equal(value, results[0][0][name])
            moved = not torch.equal(value, start[name])
            assert moved == name.endswith(("lora_A", "lora_B")), name
    assert summarize(model).trained == 768
