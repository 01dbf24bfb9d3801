"""Plans that swap activations: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.comm.communicator import Communicator
from farandole.plan import Plan, PlanError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3))
    )


def _learn(rank: int, size: int, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the weights after two steps with activations of 2 and 4 MiB each, and the bytes written to the disk."""
    model = _model()
    engine = farandole.parallelize(model, Plan(**options), Communicator(torch.distributed.group.WORLD))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        torch.manual_seed(size * step + rank)
        engine.backward(engine(torch.randn(2048, 256)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with engine.whole():
        found = [parameter.detach().clone() for parameter in model.parameters()]
    written = 0 if engine.swapped is None else engine.swapped.written_bytes
    engine.close()
    return found, written


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(
    ("zero", "backend"), [(0, "farandole"), (2, "farandole"), (3, "farandole"), (3, "gloo")]
)
def test_swapping_does_not_change_the_weights(
    ranks: Any, tmp_path: Path, zero: int, backend: str, recompute: str
) -> None:
    options = {"zero": zero, "recompute": recompute, "precision": "bf16"}
    plain = ranks(2, backend).run(_learn, options)
    swapped = ranks(2, backend).run(_learn, options | {"swap": f"disk:{tmp_path}"})
    for (expected, none), (found, written) in zip(plain, swapped, strict=True):
        assert none == 0 and written >= 4 << 20
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not list(tmp_path.iterdir())


def _refused(rank: int, size: int, swap: str) -> str:
    with pytest.raises((PlanError, RuntimeError)) as refusal:
        farandole.parallelize(_model(), Plan(swap=swap), Communicator(torch.distributed.group.WORLD))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ("host", "use swap='disk:FOLDER'"),
        ("tape", "swap='tape': expected 'none', 'host' or 'disk:FOLDER'"),
        (
            "disk:/there/is/none",
            "cannot offload to /there/is/none: the folder does not exist; create it or use the nearest existing folder, /",
        ),
    ],
)
def test_unsupported_swap_locations_are_refused(ranks: Any, swap: str, message: str) -> None:
    (said,) = ranks(1).run(_refused, swap)
    assert message in said
