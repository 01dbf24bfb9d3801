"""A model that is initialized block by block on sharded ranks equals a model that is initialized as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole.models.bert import bert_config, block_generator, build_bert, initialize
from farandole.plan import Plan
from tests.parallel.odd import world


def _fill(name: str, block: nn.Module) -> None:
    initialize(block, block_generator(5, int(name)))


def _losses(rank: int, size: int, plan: Plan, whole: bool) -> list[float]:
    with torch.device("cpu" if whole else "meta"):
        model = build_bert(bert_config("tiny"), seed=5)
    engine = farandole.parallelize(model, plan, initialize=None if whole else _fill)
    assert model[-1].weight is model[0].tokens.weight
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    generator = torch.Generator().manual_seed(engine.mesh.replica_of(rank))
    tokens = torch.randint(0, 300, (4, 2, 8), generator=generator)
    losses = []
    for batch in tokens:
        loss = F.cross_entropy(engine(batch).float().flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    world().barrier()
    engine.close()
    return losses


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_losses_match_a_model_in_memory(ranks: Any, backend: str, tmp_path: Path) -> None:
    for zero, precision in ((0, "fp32"), (0, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")):
        for offload in ("none", f"disk:{tmp_path}"):
            plan = Plan(zero=zero, precision=precision, offload=offload)
            assert ranks(2, backend).run(_losses, plan, False) == ranks(2, backend).run(
                _losses, plan, True
            ), plan


def test_a_split_model_built_block_by_block(ranks: Any) -> None:
    for zero in (0, 3):
        plan = Plan(tensor=2, zero=zero)
        made = ranks(2).run(_losses, plan, False)
        assert made == ranks(2).run(_losses, plan, True)
        assert made[0] == pytest.approx(ranks(1).run(_losses, Plan(), True)[0], rel=1e-4)


class Mixed(nn.Module):
    """Parameters and buffers inside and outside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks[1][0].weight.requires_grad_(False)


def _mixed(rank: int, size: int, zero: int) -> None:
    with torch.device("meta"):
        model = Mixed()

    def fill(name: str, part: nn.Module) -> None:
        assert rank == 0
        for own, tensor in (*part.named_parameters(), *part.named_buffers()):
            whole = f"{name}.{own}" if name else own
            tensor.fill_(sum(whole.encode()) % 1000)

    farandole.parallelize(model, Plan(zero=zero), initialize=fill)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert (tensor == sum(name.encode()) % 1000).all(), name
    assert not model.blocks[1][0].weight.requires_grad
    with pytest.raises(ValueError, match="on the meta device"):
        farandole.parallelize(Mixed(), initialize=fill)
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device"):
        farandole.parallelize(Mixed())


def test_parameters_outside_of_blocks(ranks: Any) -> None:
    for zero in (0, 2):
        ranks(2).run(_mixed, zero)
