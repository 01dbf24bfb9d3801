"""Every stage of ZeRO gives the parameters of one process with the whole batch, under SGD."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel.engine import Engine
from tests.parallel.odd import SHARE, Odd, loss_of, make_odd, world

STEPS, CLIP, RATE, MOMENTUM = 3, 0.5, 0.1, 0.9
STAGES = (0, 1, 2, 3)


def _batches(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randint(0, 11, (SHARE * size, 6), generator=generator) for _ in range(STEPS)]


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, with the usual separate groups for matrices and vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, RATE, momentum=MOMENTUM)


@functools.cache
def _train_alone(
    size: int, accumulate: int, user: int | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Train in one process: average the ranks' gradients, in `dtype` if given, for fp32 master weights."""
    master, model = make_odd(0), make_odd(0)
    if dtype is not None:
        model.to(dtype)
    optimizer = _grouped(master)
    for batch in _batches(size):
        totals: dict[str, Tensor] = {}
        for rank, share in enumerate(batch.split(SHARE)):
            for part in share.split(SHARE // accumulate):
                model.zero_grad()
                (loss_of(model, part, rank == user) / accumulate).backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        gradient = parameter.grad.float() / size
                        totals[name] = totals[name] + gradient if name in totals else gradient
        for name, parameter in master.named_parameters():
            parameter.grad = totals.get(name)
        nn.utils.clip_grad_norm_(master.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for low, high in zip(model.parameters(), master.parameters(), strict=True):
                low.copy_(high)
    return {name: value.detach() for name, value in model.named_parameters()}


def _train(
    rank: int,
    size: int,
    zero: int,
    accumulate: int,
    user: int | None,
    dtype: torch.dtype | None,
    bucket_bytes: int,
) -> dict[str, Tensor]:
    model = make_odd(seed=rank)  # the parameters of rank 0 are used
    model.offset = model.offset.to(dtype)
    replica = Engine(model, world(), bucket_bytes, zero=zero, dtype=dtype)
    optimizer = replica.optimizer(_grouped(model))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with replica.no_sync():
                (loss_of(model, part, rank == user) / accumulate).backward()
        (loss_of(model, last, rank == user) / accumulate).backward()
        replica.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    world().barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)]: value.clone() for parameter, value in replica.whole_parameters()}
    replica.close()
    return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_training_matches_one_process(
    ranks: Any, zero: int, size: int, dtype: torch.dtype | None, backend: str
) -> None:
    for accumulate, user, bucket_bytes in ((1, None, 200), (2, 0, 1), (2, None, 1 << 20)):
        expected = _train_alone(size, accumulate, user, dtype)
        results = ranks(size, backend).run(_train, zero, accumulate, user, dtype, bucket_bytes)
        for result in results:
            for name, value in result.items():
                torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
                assert torch.equal(value, results[0][name]), f"{name} differs between ranks"


GPT = GPTConfig(vocabulary=64, context=16, layers=2, heads=2, width=32)


def _gpt_losses(rank: int, size: int, zero: int | None, dtype: torch.dtype | None) -> list[float]:
    """Return the losses of a GPT under one stage of ZeRO, or under FSDP2."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    torch.manual_seed(rank)
    tokens = torch.randint(0, GPT.vocabulary, (6, 2, GPT.context + 1))
    if zero is None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model[1:-1]:  # embedding and head share a weight: they belong to the root
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
    else:
        replica = Engine(model, world(), 4000, zero=zero, dtype=dtype)
        optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.5))
    losses = []
    for batch in tokens:
        logits = model(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not any(isinstance(p, DTensor) for p in model.parameters()) or zero is None
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp2_has_the_same_losses(ranks: Any, dtype: torch.dtype | None) -> None:
    expected = ranks(2).run(_gpt_losses, None, dtype)
    for zero in STAGES:
        for ours, theirs in zip(ranks(2).run(_gpt_losses, zero, dtype), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5 if dtype is None else 5e-3)


def _adam_matches_torch(rank: int, size: int, zero: int) -> None:
    """AdamW on shards gives the results of AdamW on whole parameters."""
    model, reference = make_odd(0), make_odd(0)
    replica = Engine(model, world(), 300, zero=zero)
    optimizer = replica.optimizer(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
    plain = torch.optim.AdamW(reference.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    tokens = torch.arange(12).remainder(11).view(2, 6)
    for _ in range(3):
        loss_of(replica.model, tokens, use=True).backward()
        loss_of(reference, tokens, use=True).backward()
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
        schedule.step()
        plain_schedule.step()
    world().barrier()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    states = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    whole = sum(state["exp_avg"].numel() for state in plain.state.values())
    assert states == whole if zero == 0 else states < whole


def test_adam_and_schedulers_work_on_shards(ranks: Any) -> None:
    for zero in STAGES:
        ranks(2).run(_adam_matches_torch, zero)


def _refusals(rank: int, size: int) -> None:
    model = make_odd(0)
    with pytest.raises(ValueError, match="expected zero=0, 1, 2 or 3, got 4"):
        Engine(model, world(), zero=4)
    replica = Engine(model, world(), zero=1)
    with pytest.raises(ValueError, match="do not belong to the engine's model"):
        replica.optimizer(torch.optim.SGD(Odd().parameters(), 0.1))
    with pytest.raises(TypeError, match=r"creates one, got Linear; try"):
        replica.optimizer(lambda parameters: nn.Linear(1, 1))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"creates one, got SGD \(a class\); try"):
        replica.optimizer(torch.optim.SGD)  # type: ignore[arg-type]
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    tokens = torch.ones(2, 3, dtype=torch.long)
    loss_of(model, tokens).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="engine.optimizer was already called with this optimizer"):
        replica.optimizer(optimizer)
    world().barrier()


def test_unsupported_calls_are_refused(ranks: Any) -> None:
    ranks(2).run(_refusals)


def _two_passes(rank: int, size: int, zero: int) -> None:
    """Without no_sync, the averaged gradients of all passes add up."""
    model = nn.Linear(5, 3)
    nn.init.ones_(model.weight)
    replica = Engine(model, world(), zero=zero)
    x = torch.full((2, 5), float(rank + 1))
    for _ in range(2):
        for _ in range(2):
            replica(x).sum().backward()
        total = torch.cat([g.flatten() for g in replica.gradients()])
        expected = {2 * 2 * (size + 1) / 2, 2 * 2.0}  # weights: both samples of both passes; biases
        assert set(total.tolist()) <= expected
        replica.zero_grad()


def test_every_backward_pass_is_accumulated(ranks: Any) -> None:
    for zero in STAGES:
        ranks(2).run(_two_passes, zero)


def _order(rank: int, size: int, zero: int) -> None:
    """Use blocks in a different order from their declaration, and one of them twice."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))
    reference = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))
    reference.load_state_dict(layers.state_dict())
    replica = Engine(layers, world(), 1000, zero=zero)
    torch.manual_seed(1)
    xs = torch.randn(size, 3, 40)
    for chosen in ((4, 0, 3, 1, 2, 0), (0, 1, 2), (2, 4)):
        for model, inputs in ((reference, xs), (layers, xs[rank : rank + 1])):
            y = inputs
            for number in chosen:
                y = torch.tanh(model[number](y))
            y.square().mean().backward()
        for whole, piece, start in replica.shards():
            (true,) = [
                r.grad for p, r in zip(layers.parameters(), reference.parameters(), strict=True) if p is whole
            ]
            if true is None:
                assert piece.grad is None
            else:
                torch.testing.assert_close(
                    piece.grad.flatten(), true.flatten()[start : start + piece.numel()]
                )
        replica.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("zero", STAGES)
def test_any_order_of_blocks(ranks: Any, zero: int) -> None:
    ranks(2).run(_order, zero)


def _memory(rank: int, size: int, zero: int) -> tuple[int, int]:
    """Return the bytes that a stage keeps: of this rank's own tensors, and of tensors that all ranks share."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    replica = Engine(model, world(), 1, zero=zero)
    own = sum(bucket.reduced.nbytes for bucket in replica.buckets)
    common = sum(p.nbytes for p in model.parameters() if replica.shards_of_buckets[0].weights is not None)
    return own, common


def test_sharded_bytes_per_stage(ranks: Any) -> None:
    whole = 8 * 256 * 256 * 4
    assert ranks(4).run(_memory, 0) == [(whole, 0)] * 4
    for zero in (1, 2, 3):
        assert ranks(4).run(_memory, zero) == [(whole // 4, whole)] * 4


class Listed(nn.Module):
    """A tied embedding, a norm, and a list of blocks, of which two share a weight and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)) for _ in range(5)
        )
        self.blocks[3][2].weight = self.blocks[1][2].weight
        self.blocks[2].requires_grad_(False)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor, use: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks[:2]):
            x = x + block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def _train_listed(
    rank: int, size: int, zero: int, dtype: torch.dtype | None
) -> tuple[list[float], dict[str, Tensor], int]:
    """Return the losses, the weights at the end, and the peak bytes of gathered weights."""
    torch.manual_seed(0)
    model = Listed()
    replica = Engine(model, world(), zero=zero, dtype=dtype)
    optimizer = replica.optimizer(_grouped(model))
    losses = []
    most = 0
    for batch in _batches(size):
        logits = replica(batch.split(SHARE)[rank])
        most = max(most, sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes() > 8))
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.split(SHARE)[rank].roll(1, -1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            replica(batch.split(SHARE)[rank])  # an evaluation between steps
        losses.append(loss.item())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {names[id(p)]: value.clone() for p, value in replica.whole_parameters()}
    with replica.whole():
        alone = model(torch.zeros(1, 2, dtype=torch.long)) if rank == 0 else None
    assert alone is None or alone.isfinite().all()
    replica.close()
    return losses, weights, most


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_that_are_gathered_block_by_block(ranks: Any, dtype: torch.dtype | None) -> None:
    expected = ranks(2).run(_train_listed, 0, dtype)
    whole = sum(value.nbytes for value in expected[0][1].values())
    for backend in ("farandole", "gloo"):  # the first shares memory, the second gathers
        for ours, theirs in zip(ranks(2, backend).run(_train_listed, 3, dtype), expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
            for name, value in ours[1].items():
                torch.testing.assert_close(value, theirs[1][name])
            assert ours[2] < whole if backend == "gloo" else ours[2] == whole
