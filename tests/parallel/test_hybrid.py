"""States divided inside hosts, of which each has a copy: nothing that is learned changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import box_mesh
from farandole.plan import Plan, PlanError
from tests.comm.hosts import hierarchical_group, on_hosts
from tests.parallel.odd import SHARE, loss_of, make_odd, world
from tests.parallel.test_zero import CLIP, _batches, _grouped, _train_alone


def _train(
    rank: int, size: int, hosts: list[int], zero: int, accumulate: int, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], int]:
    """The parameters at the end, and the elements that this rank updates."""
    comm = Communicator(hierarchical_group(hosts, rank))
    model = make_odd(seed=rank)
    model.offset = model.offset.to(dtype)
    with on_hosts(hosts, rank):
        engine = Engine(model, comm, 400, zero=zero, hybrid=True, dtype=dtype)
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


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0], [0, 1]])
def test_training_matches_one_process(ranks: Any, hosts: list[int]) -> None:
    size = len(hosts)
    for dtype in (None, torch.bfloat16):
        for accumulate in (1, 2):
            expected = _train_alone(size, accumulate, 0, dtype)
            for zero in (1, 2, 3):
                results = ranks(size).run(_train, hosts, zero, accumulate, dtype)
                for result, _ in results:
                    for name, value in result.items():
                        torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")
                        assert torch.equal(value, results[0][0][name]), f"{name} differs between ranks"
                whole = sum(updated for _, updated in results) // len(set(hosts))
                assert whole == sum(p.numel() for p in make_odd(0).parameters() if p.requires_grad)


def _uneven(rank: int, size: int) -> None:
    with (
        on_hosts([0, 0, 1], rank),
        pytest.raises(PlanError, match="same number of ranks on each host, got (2, 1|1, 2)"),
    ):
        Engine(make_odd(0), world(), zero=1, hybrid=True)
    assert not box_mesh(3, ["one host"] * 3, hybrid=True).sub_axes


def test_uneven_hosts_are_refused(ranks: Any) -> None:
    ranks(3).run(_uneven)
    with pytest.raises(PlanError, match="there are no states to shard"):
        Plan(hybrid=True)
