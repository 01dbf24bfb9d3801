"""LoRA under every stage of ZeRO, with recomputation and offload: the same adapters, and an unchanged base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import farandole
from farandole.models.gpt import build_gpt
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.lora import add_lora, merge, unmerge
from farandole.parallel.lora.adapters import lora_layers
from farandole.parallel.lora.peft_adapter import save_adapter
from farandole.plan import LoRA, Plan, PlanError
from tests.parallel.odd import world
from tests.parallel.test_zero import GPT

ADAPTERS = LoRA(rank=4, alpha=8, targets=("*.qkv", "*.out"))


def _train(rank: int, size: int, plans: list[Plan]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [_train_one(rank, plan) for plan in plans]


def _train_one(rank: int, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the adapters at the end."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    torch.manual_seed(1)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = farandole.parallelize(model, plan)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.optimizer(torch.optim.AdamW(trained, 1e-2))
    tokens = torch.randint(
        0, GPT.vocabulary, (4, 2, GPT.context + 1), generator=torch.Generator().manual_seed(rank)
    )
    losses = []
    for batch in tokens:
        logits = engine(batch[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    world().barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adapters = {}
    for parameter, value in engine.whole_parameters():
        name = names[id(parameter)]
        if name in frozen:
            assert torch.equal(value, frozen[name].to(value.dtype)), f"{name} is frozen"
        else:
            adapters[name] = value.clone()
    assert sum(piece.numel() for _, piece, _ in engine.shards()) <= sum(p.numel() for p in trained)
    engine.close()
    return losses, adapters


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_adapters_are_the_same_under_any_plan(ranks: Any, backend: str, tmp_path: Path) -> None:
    plans = [
        Plan(zero=zero, recompute=recompute, offload=offload, lora=ADAPTERS)
        for zero in (0, 1, 2, 3)
        for recompute, offload in (("none", "none"), ("block", f"disk:{tmp_path}"))
    ]
    plans += [
        Plan(zero=3, offload=offload, offloaded="parameters", lora=ADAPTERS)
        for offload in ("host", f"disk:{tmp_path}")
    ]
    (expected, adapters), *others = ranks(2, backend).run(_train, plans)[0]
    assert all(
        value.any() for name, value in adapters.items() if name.endswith("lora_B")
    )  # they begin at zero
    for plan, (losses, found) in zip(plans[1:], others, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), plan
        for name, value in found.items():
            torch.testing.assert_close(
                value, adapters[name], rtol=1e-3, atol=1e-5, msg=lambda m, p=plan: f"{p}: {m}"
            )


def _refused(rank: int, size: int, lora: LoRA, adapted: bool, meta: bool) -> str:
    with torch.device("meta" if meta else "cpu"):
        model = build_gpt(GPT)
    if adapted:
        add_lora(model, lora)
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, Plan(lora=lora))
    return str(error.value)


@pytest.mark.parametrize(
    ("lora", "adapted", "meta", "says"),
    [
        (LoRA(targets="nothing"), False, False, "LoRA targets: 'nothing' matches no module"),
        (ADAPTERS, True, False, "the model already has LoRA"),
        (ADAPTERS, False, True, "not supported for a model on the meta device"),
    ],
)
def test_invalid_adapters_are_refused(ranks: Any, lora: LoRA, adapted: bool, meta: bool, says: str) -> None:
    assert says in ranks(1).run(_refused, lora, adapted, meta)[0]


def _merge(rank: int, size: int, zero: int, folder: str) -> tuple[list[str], Tensor, Tensor]:
    """Return the errors of a plain loop that saves and merges, and outputs before and after the supported merge."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    engine = farandole.parallelize(model, Plan(zero=zero, lora=ADAPTERS))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.optimizer(torch.optim.SGD(trained, 1.0))
    tokens = torch.randint(0, GPT.vocabulary, (2, GPT.context), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    errors = []
    for call in (lambda: save_adapter(model, folder), lambda: merge(model)):
        if rank == 0:
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
    world().barrier()
    model.eval()
    with torch.no_grad():
        before = engine(tokens)
        with engine.edit_parameters():
            merge(model)
        return errors, before, engine(tokens)


@pytest.mark.parametrize(
    ("zero", "backend", "refused"),
    [(1, "farandole", [False, True]), (3, "farandole", [False, True]), (3, "gloo", [True, True])],
)
def test_an_adapter_is_saved_and_merged_whole_or_not_at_all(
    ranks: Any, zero: int, backend: str, refused: list[bool], tmp_path: Path
) -> None:
    results = ranks(2, backend).run(_merge, zero, str(tmp_path))
    errors = results[0][0]
    assert len(errors) == sum(refused), errors
    assert all("engine.save_" in error for error in errors), errors
    for _, before, after in results:
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


def _load_merged(rank: int, size: int, saving: Plan, loading: Plan, folder: Path) -> None:
    """Load checkpoints with and without merged adapters into merged and unmerged models."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    engine = farandole.parallelize(model, saving)
    with torch.no_grad(), engine.edit_parameters():
        for layer in lora_layers(model).values():
            layer.lora_B.fill_(0.1)
    engine.save(folder / "apart")
    with engine.edit_parameters():
        merge(model)
    engine.save(folder / "merged")
    engine.close()

    model = build_gpt(GPT)  # with other initial values
    engine = farandole.parallelize(model, loading)
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"merged only in the checkpoint; .* merge\(model\)"):
        engine.load(folder / "merged")
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    with engine.edit_parameters():
        merge(model)
    with pytest.raises(CheckpointError, match=r"merged only in this model; .* unmerge\(model\)"):
        engine.load(folder / "apart")
    engine.load(folder / "merged")
    found = engine.state_dict()
    with engine.edit_parameters():
        unmerge(model)
    engine.load(folder / "apart")
    with engine.edit_parameters():
        merge(model)
    for name, expected in engine.state_dict().items():
        torch.testing.assert_close(found[name], expected)
    engine.close()


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (Plan(zero=1, lora=ADAPTERS), Plan(zero=3, lora=ADAPTERS)),
        (Plan(tensor=2, lora=ADAPTERS), Plan(pipeline=2, lora=ADAPTERS)),
        (Plan(pipeline=2, zero=1, lora=ADAPTERS), Plan(lora=ADAPTERS)),
    ],
)
def test_merged_checkpoints_are_loaded_only_into_merged_models(
    ranks: Any, saving: Plan, loading: Plan, tmp_path: Path
) -> None:
    ranks(2).run(_load_merged, saving, loading, tmp_path)


def test_adapters_and_8_bit_products_are_refused() -> None:
    with pytest.raises(PlanError, match="nearest plan: precision='bf16'"):
        Plan(lora=ADAPTERS, precision="fp8")
