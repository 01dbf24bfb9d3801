"""Compare SyncBatchNorm with PyTorch's batch normalization of the whole batch in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from tests.horovod.jobs import given, session


def near(a, b):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def normalized(rank, size):
    with session():
        for shape, whole_class in (
            ((3,), nn.BatchNorm1d),
            ((3, 4), nn.BatchNorm1d),
            ((3, 4, 5), nn.BatchNorm2d),
        ):
            for options in (
                {},
                {"affine": False},
                {"track_running_stats": False},
                {"momentum": None},
                {"eps": 0.1, "momentum": 0.5},
            ):
                torch.manual_seed(0)
                ours, whole = hvd.SyncBatchNorm(3, **options), whole_class(3, **options)
                if ours.affine:
                    with torch.no_grad():
                        for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
                            theirs.copy_(mine.uniform_(0.5, 2))
                rows = [(r * 2) % 5 for r in range(size)]  # rank 0 has no rows
                rows[-1] = 3
                for step in range(2):
                    parts = [given(r, (rows[r], *shape), seed=step) * 3 + 100 for r in range(size)]
                    losses = [given(r, (rows[r], *shape), seed=step + 10) for r in range(size)]
                    mine = parts[rank].clone().requires_grad_()
                    everything = torch.cat(parts).requires_grad_()
                    expected = whole(everything)
                    (expected * torch.cat(losses)).sum().backward()
                    result = ours(mine)
                    (result * losses[rank]).sum().backward()
                    near(result, expected.split(rows)[rank])
                    near(mine.grad, everything.grad.split(rows)[rank])
                for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
                    near(hvd.allreduce(a.grad, op=hvd.Sum), b.grad)
                for name, value in whole.state_dict().items():
                    near(ours.state_dict()[name], value)
                ours.eval()
                whole.eval()
                if options.get("track_running_stats", True):
                    near(ours(torch.ones(2, *shape)), whole(torch.ones(2, *shape)))
        half = hvd.SyncBatchNorm(3)(given(rank, (4, 3), torch.bfloat16))
        assert half.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="at least 2D"):
            hvd.SyncBatchNorm(3)(torch.ones(3))
        with pytest.raises(ValueError, match="expected 3 channels"):
            hvd.SyncBatchNorm(3)(torch.ones(2, 4))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            hvd.SyncBatchNorm(3)(torch.ones(int(rank == 0), 3))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_statistics_include_the_whole_batch(ranks, size):
    ranks(size).run(normalized)
