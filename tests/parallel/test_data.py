"""Data parallelism gives the parameters of one process with the whole batch, under SGD in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.resident import in_shared_memory
from farandole.parallel.bucket import Bucket
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import box_mesh, fill, plan_sharding, replicated_layouts
from tests.parallel.odd import SHARE, loss_of, make_odd, world

STEPS, CLIP = 3, 0.5


def _train_alone(
    batches: list[Tensor], share: int, uses: Callable[[int], bool], clip: float
) -> dict[str, Any]:
    """Train in one process with the mean of the losses of all ranks' shares."""
    model = make_odd(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        parts = batch.split(share)
        for rank, part in enumerate(parts):
            (loss_of(model, part, uses(rank)) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def _train_parallel(
    rank: int, size: int, batches: list[Tensor], accumulate: int, user: int | None, bucket_bytes: int
) -> dict[str, Any]:
    model = make_odd(seed=rank)  # the parameters of rank 0 are used
    replica = Engine(model, world(), bucket_bytes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        mine = batch.split(SHARE)[rank].split(SHARE // accumulate)
        replica.zero_grad()
        for part in mine[:-1]:
            with replica.no_sync():
                (loss_of(model, part, rank == user) / accumulate).backward()
        (loss_of(model, mine[-1], rank == user) / accumulate).backward()
        replica.synchronize()
        replica.clip(CLIP)
        optimizer.step()
    assert model.never.weight.grad is None
    assert (model.sometimes.weight.grad is None) == (user is None)
    assert model.hidden.bias.grad is None
    replica.close()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("user", [None, 0])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_matches_one_process(
    ranks: Any, size: int, accumulate: int, user: int | None, bucket_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    batches = [torch.randint(0, 11, (SHARE * size, 6), generator=generator) for _ in range(STEPS)]
    expected = _train_alone(batches, SHARE, lambda rank: rank == user, CLIP)
    results = ranks(size).run(_train_parallel, batches, accumulate, user, bucket_bytes)
    for result in results:
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
            assert torch.equal(value, results[0][name]), f"{name} differs between ranks"


def _reductions(rank: int, size: int) -> tuple[int, int]:
    """Return the number of reductions in a step with accumulation, and the number of buckets."""
    comm = world()
    calls = 0
    reduce = comm.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += args[0].is_floating_point()  # other calls exchange which ranks have a gradient
        return reduce(*args, **options)

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    replica = Engine(model, comm, bucket_bytes=100)
    comm.all_reduce = counted  # type: ignore[method-assign]
    for _ in range(3):
        with replica.no_sync():
            model(torch.ones(2, 6)).sum().backward()
    assert calls == 0
    model(torch.ones(2, 6)).sum().backward()
    assert calls == len(replica.buckets), "not everything was reduced during the backward pass"
    replica.synchronize()
    return calls, len(replica.buckets)


def test_accumulation_communicates_once(ranks: Any) -> None:
    for calls, buckets in ranks(2).run(_reductions):
        assert calls == buckets > 1
    assert ranks(1).run(_alone_is_silent) == [True]


def _alone_is_silent(rank: int, size: int) -> bool:
    comm = world()
    comm.all_reduce = comm.broadcast = None  # type: ignore[method-assign,assignment]
    replica = Engine(make_odd(0), comm)
    loss_of(replica.model, torch.ones(2, 3, dtype=torch.long)).backward()
    replica.synchronize()
    return replica.waited_s == 0.0


def _several_passes(rank: int, size: int, zero: int) -> None:
    """Gradients of passes that are reduced separately add up, even if ranks use parameters in different passes."""
    model, reference = make_odd(0), make_odd(0)
    replica = Engine(model, world(), zero=zero)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    batches = torch.randint(0, 11, (2, 3, size, 2, 5), generator=torch.Generator().manual_seed(1))
    for passes in batches:
        for turn, parts in enumerate(passes):
            loss_of(model, parts[rank], use=turn == rank).backward()
            for other, part in enumerate(parts):
                (loss_of(reference, part, use=turn == other) / size).backward()
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
    world().barrier()
    values = replica.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(values[name], value)
    replica.close()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_passes_accumulate(ranks: Any, zero: int, backend: str) -> None:
    ranks(2, backend).run(_several_passes, zero)


def _views(rank: int, size: int) -> None:
    model = make_odd(0)
    replica = Engine(model, world())
    for _ in range(2):
        replica.zero_grad()
        loss_of(model, torch.ones(2, 3, dtype=torch.long)).backward()
        replica.synchronize()
        inside = {b.reduced.untyped_storage().data_ptr() for b in replica.buckets}
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.untyped_storage().data_ptr() in inside
                assert parameter.grad.data_ptr() % 64 == 0


def test_gradients_are_aligned_views_of_the_buckets(ranks: Any) -> None:
    ranks(2).run(_views)


def _norm(rank: int, size: int) -> tuple[float, float, float]:
    model = make_odd(0)
    replica = Engine(model, world(), bucket_bytes=50)
    loss_of(model, torch.full((2, 3), rank + 1)).backward()
    replica.synchronize()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    true = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients])))
    told = replica.clip(true / 2)
    return true, told, float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients])))


def test_clipping_uses_the_norm_of_the_averaged_gradient(ranks: Any) -> None:
    results = ranks(2).run(_norm)
    assert results[0] == results[1]
    true, told, clipped = results[0]
    assert told == pytest.approx(true, rel=1e-5)
    assert clipped == pytest.approx(true / 2, rel=1e-5)


def test_a_bucket_has_one_type_and_device() -> None:
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    kinds = [(dtype, device) for dtype in (torch.float32, torch.bfloat16) for device in devices]
    parameters = [SimpleNamespace(dtype=dtype, device=device, nbytes=4) for dtype, device in kinds * 2]
    filled = fill(cast(Any, parameters), 1 << 20)
    assert [[(p.dtype, p.device) for p in members] for members in filled] == [[kind] * 2 for kind in kinds]


def test_a_long_parameter_has_a_separate_bucket() -> None:
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}

    def filled(*sizes: int) -> list[list[int]]:
        parameters = [SimpleNamespace(nbytes=nbytes, **kind) for nbytes in sizes]
        return [[p.nbytes for p in members] for members in fill(cast(Any, parameters), 100)]

    assert filled(1, 50, 49, 2) == [[1, 50, 49], [2]]
    assert filled(1, 250, 50, 100, 60, 3) == [[250], [100], [1, 50, 60], [3]]
    assert filled(300, 200) == [[300], [200]]
    assert filled() == []


def _memory_of_buckets(rank: int, size: int) -> None:
    comm = world()
    model = nn.Linear(3, 1, bias=False)
    for device in (torch.device("cpu"), torch.device("meta")):
        (plan,) = plan_sharding(model.to(device), box_mesh(2), replicated_layouts(model), 0).trained
        reduced = Bucket(plan, 0, None, comm).reduced
        assert reduced.device == device
        assert device.type == "meta" or in_shared_memory(reduced.data_ptr())


def test_a_bucket_is_in_shared_memory_on_the_device_of_its_parameters(ranks: Any) -> None:
    ranks(2).run(_memory_of_buckets)


def _empty(rank: int, size: int) -> None:
    comm = world()
    shared = comm.empty(5, device=torch.device("cpu")).fill_(rank)
    comm.all_reduce(shared)
    assert shared.tolist() == [1.0] * 5
    assert in_shared_memory(shared.data_ptr())
    elsewhere = comm.empty(2, 3, device=torch.device("meta"))
    assert (elsewhere.shape, elsewhere.device.type) == ((2, 3), "meta")


def test_only_memory_of_the_cpu_is_shared(ranks: Any) -> None:
    ranks(2).run(_empty)


class Reentrant(nn.Module):
    """Uses reentrant checkpointing: the backward pass of `inner` runs within the model's backward pass."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(lambda y: torch.tanh(self.inner(y)), self.first(x), use_reentrant=True)
        return self.inner(x) if self.twice else x


def _reentrant(rank: int, size: int, zero: int, twice: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Reentrant(twice=twice)
    reference = copy.deepcopy(model)
    replica = Engine(model, world(), bucket_bytes=1, zero=zero)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    replica(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    world().barrier()
    reference(torch.ones(2, 4)).square().mean().backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    for value, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, expected)
    replica.close()
    return []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_nested_backward_pass_is_correct_or_refused(ranks: Any, zero: int) -> None:
    with pytest.raises(Exception, match="inner.*after its gradients had been reduced.*use_reentrant=False"):
        ranks(2).run(_reentrant, zero, True)
    ranks(2).run(_reentrant, zero, False)


class Failing(torch.autograd.Function):
    """The identity; its backward pass fails while `broken` is true."""

    broken = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.broken:
            raise ArithmeticError("broken")
        return gradient


def _after_a_failure(rank: int, size: int, zero: int, width: int, bucket_bytes: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(6)]
    reference = copy.deepcopy(layers)
    model = nn.Sequential(*layers)
    replica = Engine(model, world(), bucket_bytes, zero=zero)
    optimizer = replica.optimizer(torch.optim.SGD(model.parameters(), 0.1))

    def loss(first: nn.Module, rest: Sequence[nn.Module]) -> Tensor:
        x = Failing.apply(first(torch.ones(2, width)))
        return cast(Tensor, nn.Sequential(*rest)(x).square().mean())

    Failing.broken = True
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            loss(layers[0], layers[1:]).backward()
        replica.zero_grad()
    Failing.broken = False
    for _ in range(2):
        loss(layers[0], layers[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    world().barrier()
    plain = torch.optim.SGD(nn.Sequential(*reference).parameters(), 0.1)
    for _ in range(2):
        loss(reference[0], reference[1:]).backward()
        plain.step()
        plain.zero_grad()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = dict(nn.Sequential(*reference).named_parameters())
    for parameter, value in replica.whole_parameters():
        torch.testing.assert_close(value, expected[names[id(parameter)]])
    replica.close()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_a_step_after_a_backward_pass_that_failed(ranks: Any, zero: int, backend: str) -> None:
    for width, bucket_bytes in ((16, 1), (7, 1), (16, 1 << 20)):
        ranks(2, backend).run(_after_a_failure, zero, width, bucket_bytes)
