"""Masters and states that are kept elsewhere, and activations that are recomputed, change nothing that is learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.memory.call_wrappers import wrapper_of
from farandole.memory.disk import OffloadError
from farandole.memory.dry_run import saved_bytes
from farandole.memory.recompute_wrapper import RecomputeWrapper
from farandole.models.gpt import build_gpt
from farandole.parallel.parallelize import TYPES
from farandole.plan import Plan, PlanError
from tests.parallel.test_data import SHARE, _loss, _model
from tests.parallel.test_zero import CLIP, GPT, STAGES, _batches, _grouped, _train_alone, _world


def _train(
    rank: int, size: int, plans: list[Plan], accumulate: int, user: int | None
) -> list[dict[str, Tensor]]:
    return [_train_one(rank, size, plan, accumulate, user) for plan in plans]


def _train_one(rank: int, size: int, plan: Plan, accumulate: int, user: int | None) -> dict[str, Tensor]:
    model = _model(seed=rank)  # rank 0's must win
    if plan.precision == "bf16":
        model.offset = model.offset.to(torch.bfloat16)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(_grouped(model))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with engine.no_sync():
                (_loss(model, part, rank == user) / accumulate).backward()
        (_loss(model, last, rank == user) / accumulate).backward()
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    _world().barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)]: value.clone() for parameter, value in engine.whole_parameters()}
    engine.close()
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("size", "backend"), [(1, "farandole"), (2, "farandole"), (2, "gloo"), (4, "farandole")]
)
def test_the_answer_is_that_of_one_process(
    ranks: Any, size: int, precision: Any, backend: str, tmp_path: Path
) -> None:
    plans = [
        Plan(zero=zero, precision=precision, offload=offload, recompute=recompute)
        for zero in STAGES
        for offload, recompute in (
            ("none", "block"),
            ("none", "selective"),
            ("host", "none"),
            (f"disk:{tmp_path}", "block"),
        )
    ]
    disk = f"disk:{tmp_path}"
    plans += [
        Plan(zero=2, precision=precision, offload=disk, offloaded="gradients"),
        Plan(zero=3, precision=precision, offload=disk, offloaded="parameters", recompute="block"),
    ]
    dtype = None if precision == "fp32" else torch.bfloat16
    for accumulate, user in ((1, None), (2, 0)):
        expected = _train_alone(_batches(size), size, accumulate, lambda rank: rank == user, dtype)  # noqa: B023
        results = ranks(size, backend).run(_train, plans, accumulate, user)
        for number, plan in enumerate(plans):
            for result in results:
                for name, value in result[number].items():
                    torch.testing.assert_close(
                        value, expected[name], msg=lambda m, w=f"{plan}: {name}": f"{w}: {m}"
                    )
                    assert torch.equal(value, results[0][number][name]), (
                        f"{plan}: {name} differs between ranks"
                    )
    assert not list(tmp_path.iterdir())


def _adam(rank: int, size: int, folder: str, zero: int) -> None:
    """AdamW, schedules and a closure work on what is kept on a disk, to the bit as on what is kept in memory."""
    learned = []
    for offload in ("none", f"disk:{folder}"):
        model = _model(0)
        engine = farandole.parallelize(model, Plan(zero=zero, offload=offload))
        optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        tokens = torch.arange(12).remainder(11).view(2, 6)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = _loss(model, tokens, use=True)  # noqa: B023
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(4) if schedule.step() is None]
        if offload != "none":
            assert not optimizer.state
            assert engine.offloaded[0].state.budget().read_bytes > 0
        _world().barrier()
        learned.append((losses, [p.detach().clone() for p in model.parameters()]))
        engine.close()
    (losses, weights), (others, other_weights) = learned
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_adam_and_schedules(ranks: Any, tmp_path: Path) -> None:
    for zero in STAGES:
        ranks(2).run(_adam, str(tmp_path), zero)


def _auto(rank: int, size: int, precision: Any) -> tuple[int, float]:
    """What is recomputed to keep half of the activations, and the loss of a step with it."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    tokens = torch.randint(
        0, GPT.vocabulary, (2, GPT.context + 1), generator=torch.Generator().manual_seed(rank)
    )

    def loss_of(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    kept = saved_bytes(model, tokens[:, :-1], loss=loss_of, dtype=TYPES[precision]).total
    plan = Plan(zero=3, precision=precision, recompute="auto", activation_bytes=kept // 2)
    engine = farandole.parallelize(model, plan, example=tokens[:, :-1], loss=loss_of)
    recomputed = sum(wrapper_of(block, RecomputeWrapper) is not None for block in model)
    loss = loss_of(engine(tokens[:, :-1]))
    loss.backward()
    engine.synchronize()
    return recomputed, engine.gradient_norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_recomputation_to_a_budget(ranks: Any, precision: str, backend: str) -> None:
    (blocks, norm), (_, other) = ranks(2, backend).run(_auto, precision)
    assert blocks > 0
    assert norm == other > 0


def _overflow(rank: int, size: int, folder: str, zero: int) -> None:
    """A step in which rank 1 overflows changes nothing of what is on the disk, nor of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    engine = farandole.parallelize(model, Plan(zero=zero, precision="fp16", offload=f"disk:{folder}"))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    inputs = torch.randn(4, 6)
    seen = []
    for step in range(3):
        bad = next(p for p in model.parameters() if p.requires_grad).register_hook(
            lambda g: torch.full_like(g, torch.inf) if rank == 1 and step == 1 else g  # noqa: B023
        )
        engine.backward(engine(inputs).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        bad.remove()
        _world().barrier()
        assert engine.skipped == (step == 1)
        kept = [
            (piece.weights.clone(), {k: v.clone() for k, v in piece.state.items()})
            for _, piece in engine.offloaded[0].saved()
        ]
        seen.append(([p.detach().clone() for p in model.parameters()], kept))
        _world().barrier()
    (weights, kept), (same, as_kept), (others, _) = seen
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for (master, state), (master_after, state_after) in zip(kept, as_kept, strict=True):
        assert torch.equal(master, master_after)
        assert all(torch.equal(state[name], state_after[name]) for name in state)
    engine.close()


def test_an_overflow_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    for zero in (0, 2):
        ranks(2).run(_overflow, str(tmp_path), zero)


def _refused(rank: int, size: int, folder: str) -> None:
    model = _model(0)
    engine = farandole.parallelize(model, Plan(zero=2, offload=f"disk:{folder}/missing"))
    with pytest.raises(OffloadError, match="missing"):
        engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    _world().barrier()
    for place in ("missing", "only" if rank else ""):
        plan = Plan(zero=3, offload=f"disk:{folder}/{place}", offloaded="parameters")
        with pytest.raises(OffloadError, match="missing|only"):
            farandole.parallelize(_model(0), plan)
    _world().barrier()
    assert not list(Path(folder).iterdir())
    engine = farandole.parallelize(_model(0), Plan(zero=2, offload=f"disk:{folder}/{'' if rank else 'only'}"))
    with pytest.raises(OffloadError, match="only"):
        engine.optimizer(torch.optim.SGD(engine.model.parameters(), 0.1))
    _world().barrier()


def test_what_cannot_be_is_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_refused, str(tmp_path))
    with pytest.raises(PlanError, match="'none', 'host' or 'disk:FOLDER'"):
        Plan(offload="nvme")
    with pytest.raises(PlanError, match="nearest plan: zero=3"):
        Plan(zero=2, offload="disk:.", offloaded="parameters")
    with pytest.raises(PlanError, match="gradients and parameters go to a disk"):
        Plan(zero=2, offload="host", offloaded="gradients")
    with pytest.raises(PlanError, match="nothing else takes them"):
        Plan(recompute="block", activation_bytes=1)
    with pytest.raises(PlanError, match="one of none, block"):
        Plan(recompute="all")  # type: ignore[arg-type]


def _held(rank: int, size: int, folder: str) -> tuple[float, float]:
    """How much of the weights and gradients of a step lies in files of this process."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    plan = Plan(zero=3, offload=f"disk:{folder}", offloaded="parameters")
    engine = farandole.parallelize(model, plan)
    engine.backward(engine(torch.ones(2, 512)).sum())
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split(maxsplit=5) for line in maps if folder in line]
    held = sum(int(f[0].split("-")[1], 16) - int(f[0].split("-")[0], 16) for f in files)
    _world().barrier()
    engine.close()
    return held / sum(p.nbytes for p in model.parameters()), len(list(Path(folder).iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_and_gradients_lie_in_files(ranks: Any, tmp_path: Path) -> None:
    for share, names in ranks(2).run(_held, str(tmp_path)):
        assert share == pytest.approx(
            1.5, rel=0.02
        )  # all weights, as common memory, and half of the gradients
        assert names == 0
