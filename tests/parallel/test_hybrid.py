"""Hybrid sharding: groups of ranks that shard all states train as one process, on one host and on several hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import farandole
from farandole.comm.communicator import Communicator
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import box_mesh
from farandole.plan import DataShard, Plan, PlanError
from tests.comm.hosts import hierarchical_group, on_hosts
from tests.parallel.odd import SHARE, loss_of, make_odd, world
from tests.parallel.test_zero import CLIP, _batches, _grouped, _train_alone


def _train(
    rank: int,
    size: int,
    data_shard: DataShard,
    hosts: list[int],
    zero: int,
    accumulate: int,
    dtype: torch.dtype | None,
) -> tuple[dict[str, Tensor], int]:
    """Return the parameters at the end, and the number of elements that this rank updates."""
    comm = Communicator(hierarchical_group(hosts, rank)) if hosts else world()
    model = make_odd(seed=rank)
    model.offset = model.offset.to(dtype)
    mesh = box_mesh(size, hosts, data_shard=data_shard)
    with on_hosts(hosts or [0] * size, rank):
        engine = Engine(model, comm, 400, zero=zero, dtype=dtype, mesh=mesh)
    for weights in engine.weights if data_shard == 2 else ():
        assert weights.comm is not None
        assert weights.comm.size == 2
        assert weights.shared == comm.shares_memory()  # one copy of the weights in each group
    optimizer = engine.optimizer(_grouped(model))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with engine.no_sync():
                (loss_of(model, part, rank == 0) / accumulate).backward()
        (loss_of(model, last, rank == 0) / accumulate).backward()
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    comm.barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)]: value.clone() for parameter, value in engine.whole_parameters()}
    updated = sum(piece.numel() for _, piece, _ in engine.shards())
    engine.close()
    return result, updated


@pytest.mark.parametrize(
    ("data_shard", "hosts", "backend"),
    [
        ("host", [0, 0, 1, 1], "farandole"),
        ("host", [0, 1, 1, 0], "farandole"),
        ("host", [0, 1], "farandole"),
        (2, [], "farandole"),
        (2, [], "gloo"),
        (1, [], "farandole"),
    ],
    ids=str,
)
def test_training_matches_one_process(
    ranks: Any, data_shard: DataShard, hosts: list[int], backend: str
) -> None:
    size = len(hosts) or (4 if data_shard == 2 else 2)
    groups = len(set(hosts)) or size // int(data_shard)
    for dtype in (None, torch.bfloat16):
        for accumulate in (1, 2):
            expected = _train_alone(size, accumulate, 0, dtype)
            for zero in (1, 2, 3):
                results = ranks(size, backend).run(_train, data_shard, hosts, zero, accumulate, dtype)
                for result, _ in results:
                    for name, value in result.items():
                        torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")
                        assert torch.equal(value, results[0][0][name]), f"{name} differs between ranks"
                whole = sum(updated for _, updated in results) // groups
                assert whole == sum(p.numel() for p in make_odd(0).parameters() if p.requires_grad)


def _uneven(rank: int, size: int) -> None:
    with (
        on_hosts([0, 0, 1], rank),
        pytest.raises(PlanError, match="same number of ranks on each host, got (2, 1|1, 2)"),
    ):
        farandole.parallelize(make_odd(0), Plan(zero=1, data_shard="host"))
    with pytest.raises(PlanError, match="data_shard=2 does not divide data=3; nearest plan: data_shard=1"):
        farandole.parallelize(make_odd(0), Plan(zero=1, data_shard=2))


def test_groups_of_different_sizes_are_refused(ranks: Any) -> None:
    ranks(3).run(_uneven)
    with pytest.raises(PlanError, match="whose size is a multiple of 2 .the number of hosts., got data=1"):
        box_mesh(2, [0, 1], data_shard="host", tensor=2)
    with pytest.raises(PlanError, match="data_shard=4 does not divide data=6; nearest plan: data_shard=3"):
        Plan(data=6, zero=1, data_shard=4)


@pytest.mark.parametrize("data_shard", [0, -2, "hosts", 1.5])
def test_unknown_groups_are_refused(data_shard: Any) -> None:
    with pytest.raises(PlanError, match="expected 'all', 'host', or at least 1 rank"):
        Plan(zero=1, data_shard=data_shard)


def test_groups_require_sharded_states() -> None:
    with pytest.raises(PlanError, match="data_shard=2 with zero=0: no states are sharded"):
        Plan(data_shard=2)
