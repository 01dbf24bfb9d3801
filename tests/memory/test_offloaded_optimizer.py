"""An optimizer whose state is offloaded gives the results of torch's own optimizer, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer

from farandole.memory.disk import NoSpace, OffloadError
from farandole.memory.offloaded_optimizer import OffloadedOptimizer, ShardState
from farandole.memory.record_stream import disk_records, host_records
from tests.memory.disks import in_memory

Make = Callable[[list[dict[str, Any]]], Optimizer]
SIZES = [1000, 0, 1, 333, 70_000]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=0.01),
    "Adam, L2, amsgrad": partial(Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": partial(SGD, lr=0.1),
    "SGD, momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD, Nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adagrad": partial(Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "AdamW, unfused": partial(AdamW, lr=0.01, fused=False),
}


class Pair:
    """The same parameters twice: with torch's optimizer, and with the same optimizer whose state is offloaded."""

    def __init__(self, make: Make, records: Any, weights: bool = True, sizes: Sequence[int] = SIZES) -> None:
        values = [torch.randn(n) for n in sizes]
        self.own = [nn.Parameter(value.clone()) for value in values]
        self.away = [nn.Parameter(value.clone()) for value in values]
        self.reference = self._optimizer(make, self.own)
        for group in self.reference.param_groups:
            if group.get("fused", 0) is None:
                group["fused"] = True
        units = [self.away[:2], self.away[2:4], self.away[4:], []]
        self.offloaded = OffloadedOptimizer(self._optimizer(make, self.away), units, records, weights)

    @staticmethod
    def _optimizer(make: Make, shards: list[nn.Parameter]) -> Optimizer:
        return make([{"params": shards[:1] + shards[3:]}, {"params": shards[1:3], "lr": 0.003}])

    def step(self, absent: Sequence[int] = (), rate: float = 0.9) -> None:
        """Run a step of both optimizers; the shards in `absent` have no gradient."""
        for at, (own, away) in enumerate(zip(self.own, self.away, strict=True)):
            own.grad = None if at in absent else torch.randn(own.shape)
            away.grad = None if own.grad is None else own.grad.clone()
        for optimizer in (self.reference, self.offloaded.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= rate
        self.reference.step()
        self.offloaded.step()

    def check(self) -> None:
        """Check that all weights and states are equal."""
        seen = 0
        for unit, shards in self.offloaded.saved():
            for shard, found in zip(self.offloaded.units[unit], shards, strict=True):
                own = self.own[next(i for i, away in enumerate(self.away) if away is shard)]
                assert torch.equal(found.weights, own)
                wanted = self.reference.state.get(own, {})
                assert found.state.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert torch.equal(torch.as_tensor(found.state[name]), torch.as_tensor(value)), name
                seen += 1
        assert seen == len(self.own)


@pytest.fixture(params=["disk", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that creates records on the disk or in memory."""
    return partial(disk_records, tmp_path) if request.param == "disk" else host_records


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_results_are_bitwise_equal_to_torch(make: Make, records: Any) -> None:
    pair = Pair(make, records)
    pair.check()
    for _ in range(2):
        pair.step()
        pair.check()
    pair.step(absent=[0, 4])
    pair.step(absent=[2, 3])  # all shards of a unit
    pair.step(absent=range(5))
    pair.check()
    assert not pair.offloaded.optimizer.state
    pair.offloaded.close()
    pair.offloaded.close()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["AdamW", "Adam, L2, amsgrad", "NAdam"]),
    st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    st.lists(st.sets(st.integers(0, 4)), max_size=4),
    st.booleans(),
)
def test_any_sizes_and_shards_without_gradients(
    name: str, sizes: list[int], absent: list[set[int]], weights: bool
) -> None:
    pair = Pair(OPTIMIZERS[name], partial(disk_records, "/tmp", buffers=2), weights, sizes)
    for step in absent:
        pair.step(sorted(step))
    pair.check()
    pair.offloaded.close()


def test_a_shard_that_starts_later_than_its_unit(records: Any) -> None:
    pair = Pair(partial(SGD, lr=0.1, momentum=0.9, fused=True), records)
    pair.away[0].grad, pair.own[0].grad = torch.ones(1000), torch.ones(1000)
    pair.reference.step()
    pair.offloaded.step()
    # torch's fused SGD refuses to step the others together with the first one
    lone = SGD([{"params": [p]} for p in pair.own], lr=0.1, momentum=0.9, fused=True)
    lone.param_groups[1]["lr"] = lone.param_groups[2]["lr"] = 0.003
    lone.state.update(pair.reference.state)
    pair.reference = lone
    pair.step(rate=1.0)
    pair.check()
    pair.offloaded.close()


def test_values_may_stay_in_memory(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records, weights=False)
    before = [shard.data_ptr() for shard in pair.away]
    pair.step()
    assert [shard.data_ptr() for shard in pair.away] == before
    assert all(map(torch.equal, pair.away, pair.own))
    pair.check()
    in_records = Pair(OPTIMIZERS["AdamW"], records)
    assert pair.offloaded.budget().read_bytes < 0.7 * in_records.offloaded.budget().read_bytes
    pair.offloaded.close()
    in_records.offloaded.close()


def test_offloaded_values_use_no_memory_and_read_as_nan(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    assert [shard.shape for shard in pair.away] == [shard.shape for shard in pair.own]
    assert all(shard.untyped_storage().nbytes() <= 4 for shard in pair.away)
    assert pair.away[0].isnan().all()
    pair.offloaded.close()


def test_before_and_after_a_unit(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    for shard in pair.own:
        shard.grad = torch.randn(shard.shape)
    gradients = {
        away: own.grad.clone() for own, away in zip(pair.own, pair.away, strict=True) if own.grad is not None
    }
    published: dict[int, list[Tensor]] = {}

    def before(unit: int) -> None:
        for shard in pair.offloaded.units[unit]:
            shard.grad = gradients[shard]

    def after(unit: int) -> None:
        for shard in pair.offloaded.units[unit]:
            shard.grad = None
        published[unit] = [shard.detach().to(torch.bfloat16) for shard in pair.offloaded.units[unit]]

    pair.offloaded.step(before, after)
    pair.reference.step()
    pair.check()
    assert sorted(published) == [0, 1, 2]
    assert torch.equal(published[2][0], pair.own[4].bfloat16())
    pair.offloaded.close()


def test_existing_state_is_preserved(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], host_records)
    for _ in range(2):
        pair.step()
    shards = copy.deepcopy(pair.own)
    optimizer = pair._optimizer(OPTIMIZERS["AdamW"], shards)
    optimizer.load_state_dict(copy.deepcopy(pair.reference.state_dict()))
    pair.away = shards
    pair.offloaded = OffloadedOptimizer(optimizer, [shards[:3], shards[3:]], records)
    assert not optimizer.state
    pair.check()
    pair.step()
    pair.check()
    pair.offloaded.close()


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_group_may_have_parameters_of_several_dtypes(
    records: Any, first: torch.dtype, has_state: bool
) -> None:
    second = torch.float64 if first == torch.float32 else torch.float32
    own = [nn.Parameter(torch.randn(n, dtype=dtype)) for n, dtype in ((5, first), (9, second), (3, first))]
    away = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    reference, optimizer = AdamW(own, fused=True), AdamW(away, fused=True)
    if has_state:  # of the first dtype only
        for parameter in (own[0], away[0]):
            parameter.grad = torch.ones_like(parameter)
        reference.step()
        optimizer.step()
    offloaded = OffloadedOptimizer(optimizer, [away[:2], away[2:]], records)
    for _ in range(2):
        for mine, its in zip(own, away, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        reference.step()
        offloaded.step()
    found = [shard for unit in saved_copy(offloaded) for shard in unit]
    for parameter, shard in zip(own, found, strict=True):
        assert torch.equal(shard.weights, parameter)
        for name, value in reference.state[parameter].items():
            assert torch.equal(shard.state[name], value), name
    offloaded.close()


def test_schedulers_and_counts_in_groups_work(records: Any) -> None:
    class Counting(SGD):
        """Counts steps in its groups, and derives its learning rate from the count, as some optimizers do."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                group["lr"] = 0.1 / group["count"]
            return super().step(closure)

    pair = Pair(partial(Counting, lr=0.1, momentum=0.9), records)
    pair.reference.param_groups[0]["count"] = pair.reference.param_groups[1]["count"] = 0
    for group in pair.offloaded.optimizer.param_groups:
        group["count"] = 0
    for _ in range(3):
        pair.step()
    assert [group["count"] for group in pair.offloaded.optimizer.param_groups] == [3, 3]
    pair.check()
    pair.offloaded.close()


def saved_copy(optimizer: OffloadedOptimizer) -> list[list[ShardState]]:
    return [copy.deepcopy(shards) for _, shards in optimizer.saved()]


def test_a_checkpoint_unit_by_unit(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    pair.step(absent=[0])
    saved = saved_copy(pair.offloaded)
    other = Pair(OPTIMIZERS["AdamW"], host_records)
    other.step()
    other.own, other.reference = pair.own, pair.reference
    for unit in random.sample(range(4), 4):
        other.offloaded.load(unit, saved[unit])
    other.check()
    for group, wanted in zip(
        other.offloaded.optimizer.param_groups, pair.reference.param_groups, strict=True
    ):
        group["lr"] = wanted["lr"]
    other.step()
    other.check()
    assert saved[2][0].state["step"] == 1  # the later step does not change the checkpoint
    pair.offloaded.close()
    other.offloaded.close()


def test_a_checkpoint_that_does_not_fit_is_refused(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    pair.step()
    saved = saved_copy(pair.offloaded)
    with pytest.raises(ValueError, match="expected 2 shards for unit 0, got 1"):
        pair.offloaded.load(0, saved[2])
    with pytest.raises(
        ValueError, match=r"unit 2, shard 0: expected weights with the shard's shape \(70000,\), got \(3,\)"
    ):
        pair.offloaded.load(2, [ShardState(torch.zeros(3), {})])
    wrong = saved[2][0].state | {"exp_avg": torch.zeros(70_000, dtype=torch.float64)}
    with pytest.raises(
        ValueError, match="expected exp_avg in the record's dtype torch.float32, got torch.float64"
    ):
        pair.offloaded.load(2, [ShardState(saved[2][0].weights, wrong)])
    with pytest.raises(IndexError, match="unit 4 does not exist: there are 4 units"):
        pair.offloaded.load(4, [])
    pair.check()
    pair.offloaded.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_step_requires_a_checkpoint(records: Any, error: type[BaseException]) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    pair.step()
    saved = saved_copy(pair.offloaded)

    def fail_at_unit_1(unit: int) -> None:
        if unit == 1:
            raise error

    for shard in pair.away:
        shard.grad = torch.ones(shard.shape)
    with pytest.raises(error):
        pair.offloaded.step(after=fail_at_unit_1)
    assert pair.away[0].isnan().all()
    for unit in range(4):
        with pytest.raises(OffloadError, match=f"load {4 - unit} unit.*starting with unit {unit}"):
            pair.offloaded.step()
        pair.offloaded.load(unit, saved[unit])
    pair.check()
    pair.step()
    pair.check()
    pair.offloaded.close()


def test_a_failure_before_the_first_change_has_no_effect(records: Any) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], records)
    with pytest.raises(ZeroDivisionError):
        pair.offloaded.step(before=lambda unit: 1 // 0)  # type: ignore[arg-type, return-value]
    pair.step()
    pair.check()
    pair.offloaded.close()


def test_counts_in_attributes_work_and_hooks_are_not_called(records: Any) -> None:
    class Counting(SGD):
        """Counts steps in attributes, one of which it creates in the first step."""

        count = 0

        def __init__(self, groups: Any, lr: float) -> None:
            super().__init__(groups, lr, momentum=0.9)
            self.rates: list[float] = []
            self.total = torch.zeros(())

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            self.total += 1
            self.rates.append(0.1 / self.count)
            for group in self.param_groups:
                group["lr"] = self.rates[-1]
            return super().step(closure)

    pair = Pair(partial(Counting, lr=0.1), records)
    optimizer: Any = pair.offloaded.optimizer
    assert "count" not in vars(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    hook = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        pair.step()
    assert optimizer.count == optimizer.total == 3
    assert optimizer.rates == [0.1 / count for count in (1, 2, 3)]
    pair.check()
    pair.offloaded.close()
    assert not calls
    hook.remove()
    assert not optimizer._optimizer_step_post_hooks


def test_a_failed_step_does_not_change_attributes() -> None:
    class Counting(SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            return super().step(closure)

    pair = Pair(partial(Counting, lr=0.1), host_records)

    def fail(unit: int) -> None:
        raise RuntimeError(f"unit {unit}")

    with pytest.raises(RuntimeError, match="unit 0"):
        pair.offloaded.step(lambda unit: None, fail)
    assert "count" not in vars(pair.offloaded.optimizer)
    pair.offloaded.close()


def test_optimizers_that_cannot_step_shards_are_refused() -> None:
    shard, matrix = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(
        OffloadError, match=r"LBFGS cannot update one flattened shard .*; use an elementwise optimizer"
    ):
        OffloadedOptimizer(torch.optim.LBFGS([shard]), [[shard]], host_records)
    with pytest.raises(
        ValueError,
        match=r"shard 0: expected a 1-D floating-point parameter .* got \(2, 2\) torch.float32 on cpu",
    ):
        OffloadedOptimizer(Muon([matrix]), [[matrix]], host_records)
    optimizer = AdamW([shard])
    optimizer.state[shard] = {"odd": torch.zeros(2)}
    with pytest.raises(OffloadError, match=r"AdamW keeps 'odd' of shape \(2,\) for a shard of 4 elements"):
        OffloadedOptimizer(optimizer, [[shard]], host_records)


def test_units_divide_the_parameters() -> None:
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="found 1 optimizer parameter outside all units"):
        OffloadedOptimizer(AdamW([first, second]), [[first]], host_records)
    with pytest.raises(ValueError, match="unit 1, shard 0 occurs twice"):
        OffloadedOptimizer(AdamW([first]), [[first], [first]], host_records)
    with pytest.raises(ValueError, match="unit 0, shard 1 is not in the AdamW"):
        OffloadedOptimizer(AdamW([first]), [[first, second]], host_records)


def test_too_little_space_does_not_change_the_optimizer(tmp_path: Path) -> None:
    shards = [nn.Parameter(torch.ones(1 << 18)) for _ in range(2)]
    optimizer = AdamW(shards)
    with (
        in_memory(tmp_path / "disk", "5m") as disk,
        pytest.raises(
            NoSpace,
            match=r"^not enough disk space: 6\.0 MiB needed in .*, 5\.0 MiB free \(tmpfs .*; free 1\.0 MiB more",
        ),
    ):
        OffloadedOptimizer(optimizer, [[p] for p in shards], partial(disk_records, disk))
    for shard in shards:
        shard.grad = torch.ones(1 << 18)
    optimizer.step()
    assert all(shard.data.lt(1).all() for shard in shards)
