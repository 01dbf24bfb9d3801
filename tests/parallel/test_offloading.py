"""Offloaded master weights and states, and recomputed activations, do not change the trained weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.memory.call_wrappers import wrapper_of
from farandole.memory.disk import OffloadError
from farandole.memory.dry_run import saved_bytes
from farandole.memory.recompute_wrapper import RecomputeWrapper
from farandole.memory.tracker import DeviceMemory
from farandole.models.gpt import build_gpt
from farandole.parallel.parallelize import TYPES
from farandole.plan import Plan, PlanError
from tests.memory.disks import in_memory
from tests.parallel.odd import SHARE, loss_of, make_odd, world
from tests.parallel.test_zero import CLIP, GPT, STAGES, _batches, _grouped, _train_alone


def _train(
    rank: int, size: int, plans: list[Plan], accumulate: int, user: int | None
) -> list[dict[str, Tensor]]:
    return [_train_one(rank, size, plan, accumulate, user) for plan in plans]


def _train_one(rank: int, size: int, plan: Plan, accumulate: int, user: int | None) -> dict[str, Tensor]:
    model = make_odd(seed=rank)  # the parameters of rank 0 are used
    if plan.precision == "bf16":
        model.offset = model.offset.to(torch.bfloat16)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(_grouped(model))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with engine.no_sync():
                (loss_of(model, part, rank == user) / accumulate).backward()
        (loss_of(model, last, rank == user) / accumulate).backward()
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    world().barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)]: value.clone() for parameter, value in engine.whole_parameters()}
    engine.close()
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["half", "all"])
@pytest.mark.parametrize(
    ("size", "backend"), [(1, "farandole"), (2, "farandole"), (2, "gloo"), (4, "farandole")]
)
def test_training_matches_one_process(
    ranks: Any, size: int, precision: Any, backend: str, every: int, tmp_path: Path
) -> None:
    """Train under half of the plans for each kind of step; bf16 swaps the halves, and the slow test combines all."""
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
        Plan(zero=zero, precision=precision, offload=offload, offloaded=offloaded, recompute=recompute)
        for offload in ("host", disk)
        for zero, offloaded, recompute in (
            (2, "gradients", "none"),
            (3, "gradients", "none"),
            (3, "parameters", "block"),
        )
    ]
    dtype = None if precision == "fp32" else torch.bfloat16
    for half, (accumulate, user) in enumerate([(1, None), (2, 0)], start=precision == "bf16"):
        expected = _train_alone(size, accumulate, user, dtype)
        chosen = plans[half % every :: every]
        results = ranks(size, backend).run(_train, chosen, accumulate, user)
        for number, plan in enumerate(chosen):
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
    """AdamW, schedules and a closure give the same bits with states on a disk as with states in memory."""
    learned = []
    for offload in ("none", f"disk:{folder}"):
        model = make_odd(0)
        engine = farandole.parallelize(model, Plan(zero=zero, offload=offload))
        optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        tokens = (torch.arange(12) + rank).remainder(11).view(2, 6)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = loss_of(model, tokens, use=True)  # noqa: B023
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(4) if schedule.step() is None]
        if offload != "none":
            assert not optimizer.state
            assert engine.offloaded[0].state.budget().read_bytes > 0
        world().barrier()
        learned.append((losses, [p.detach().clone() for p in model.parameters()]))
        engine.close()
    (losses, weights), (others, other_weights) = learned
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_adam_and_schedules(ranks: Any, tmp_path: Path) -> None:
    for zero in STAGES:
        ranks(2).run(_adam, str(tmp_path), zero)


class _Counting(torch.optim.SGD):
    """Counts its steps in an attribute, and derives its learning rate from the count."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / self.count)


def _counts(rank: int, size: int, folder: str) -> None:
    """A step calls the hooks once and is counted once, also if it updates one bucket at a time."""
    learned = []
    for plan in (
        Plan(zero=1, offload="host"),
        Plan(zero=1, offload=f"disk:{folder}"),
        Plan(zero=1),
        Plan(precision="bf16", rounding="stochastic"),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
        engine = farandole.parallelize(model, plan)
        assert len(engine.buckets) > 1
        optimizer = _Counting(model.parameters(), lr=0.1)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        engine.optimizer(optimizer)
        assert not calls
        with warnings.catch_warnings(action="error"):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 1024)).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        assert calls == ["before", "after"] * 2
        assert optimizer.count == 2
        learned.append(engine.state_dict())
        world().barrier()
        engine.close()
    for name, value in learned[2].items():
        assert torch.equal(learned[0][name], value), name
        assert torch.equal(learned[1][name], value), name


def test_hooks_and_counts_of_steps(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_counts, str(tmp_path))


def _auto(rank: int, size: int, precision: Any) -> tuple[int, float]:
    """Return the number of recomputed blocks for half of the activations, and the loss of a step."""
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


def _learn(rank: int, size: int, plan: Plan) -> tuple[list[float], list[Tensor]]:
    """Return the losses and weights of training with two passes per step, clipping, and scaled gradients."""
    torch.manual_seed(0)
    model = build_gpt(GPT)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    tokens = torch.randint(
        0, GPT.vocabulary, (4, 2, 2, GPT.context + 1), generator=torch.Generator().manual_seed(rank)
    )

    def loss_of(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        targets = batch[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets, reduction="sum"
        ), targets.numel()

    losses = []
    for step, batches in enumerate(tokens):
        found = engine.forward_backward(list(batches), loss_of, lambda batch: batch[:, :-1])
        losses += [found.loss, engine.gradient_norm()]
        if step == 1:
            engine.scale_gradients(0.5)
        if step == 2:
            for gradient in engine.gradients():
                gradient.mul_(0.25)
        losses.append(engine.clip(0.1))
        optimizer.step()
        optimizer.zero_grad()
    losses.append(engine.evaluate(list(tokens[0]), loss_of, lambda batch: batch[:, :-1]))
    weights = [value.clone() for _, value in sorted(engine.state_dict().items())]
    world().barrier()
    engine.close()
    return losses, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offloading_is_bitwise_exact(ranks: Any, precision: Any, tmp_path: Path) -> None:
    for zero, backend, others in (
        (2, "farandole", ["gradients"]),
        (3, "farandole", ["gradients"]),
        (3, "gloo", ["gradients", "parameters"]),  # Gloo also gathers weights
    ):
        run = ranks(2, backend).run
        expected = run(_learn, Plan(zero=zero, precision=precision, offload="host"))
        for offloaded in others:
            for offload in ("host", f"disk:{tmp_path}"):
                plan = Plan(zero=zero, precision=precision, offload=offload, offloaded=offloaded)  # type: ignore[arg-type]
                for (losses, weights), (wanted, wanted_weights) in zip(
                    run(_learn, plan), expected, strict=True
                ):
                    assert losses == wanted, plan
                    assert all(torch.equal(a, b) for a, b in zip(weights, wanted_weights, strict=True)), plan


def _overflow(rank: int, size: int, plan: Plan) -> None:
    """A step that overflows on rank 1 changes neither the states on the disk nor the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    engine = farandole.parallelize(model, plan)
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
        world().barrier()
        assert engine.skipped == (step == 1)
        kept = [
            (piece.weights.clone(), {k: v.clone() for k, v in piece.state.items()})
            for _, piece in engine.offloaded[0].saved()
        ]
        seen.append(([value.clone() for _, value in engine.whole_parameters()], kept))
        world().barrier()
    (weights, kept), (same, as_kept), (others, _) = seen
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for (master, state), (master_after, state_after) in zip(kept, as_kept, strict=True):
        assert torch.equal(master, master_after)
        assert all(torch.equal(state[name], state_after[name]) for name in state)
    assert any(bucket.is_offloaded for bucket in engine.buckets) == (plan.offloaded != "optimizer")
    engine.close()


def test_an_overflow_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    for zero, offloaded in ((0, "optimizer"), (2, "optimizer"), (2, "gradients"), (3, "parameters")):
        plan = Plan(zero=zero, precision="fp16", offload=f"disk:{tmp_path}", offloaded=offloaded)  # type: ignore[arg-type]
        ranks(2).run(_overflow, plan)


def _refused(rank: int, size: int, folder: str) -> None:
    model = make_odd(0)
    engine = farandole.parallelize(model, Plan(zero=2, offload=f"disk:{folder}/missing"))
    with pytest.raises(OffloadError, match="missing"):
        engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    world().barrier()
    for place in ("missing", "only" if rank else ""):
        plan = Plan(zero=3, offload=f"disk:{folder}/{place}", offloaded="parameters")
        with pytest.raises(OffloadError, match="missing|only"):
            farandole.parallelize(make_odd(0), plan)
    world().barrier()
    assert not list(Path(folder).iterdir())
    engine = farandole.parallelize(
        make_odd(0), Plan(zero=2, offload=f"disk:{folder}/{'' if rank else 'only'}")
    )
    with pytest.raises(OffloadError, match="only"):
        engine.optimizer(torch.optim.SGD(engine.model.parameters(), 0.1))
    world().barrier()


def test_invalid_plans_are_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_refused, str(tmp_path))
    with pytest.raises(PlanError, match="'none', 'host' or 'disk:FOLDER'"):
        Plan(offload="nvme")
    with pytest.raises(PlanError, match="nearest plan: zero=3"):
        Plan(zero=2, offload="disk:.", offloaded="parameters")
    with pytest.raises(
        PlanError, match="gradients and parameters are offloaded only together with optimizer states"
    ):
        Plan(zero=2, offloaded="gradients")
    with pytest.raises(PlanError, match="only recompute='auto' uses activation_bytes"):
        Plan(recompute="block", activation_bytes=1)
    with pytest.raises(PlanError, match="one of none, block"):
        Plan(recompute="all")  # type: ignore[arg-type]


def _held(rank: int, size: int, folder: str) -> tuple[float, float, int]:
    """Return file bytes and peak memory, relative to the model's weights and gradients, and the number of file
    names."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(48)))
    plan = Plan(zero=3, offload=f"disk:{folder}", offloaded="parameters")

    def fill(name: str, block: nn.Module) -> None:
        nn.init.eye_(block.weight)  # type: ignore[arg-type]

    with DeviceMemory(None, torch.device("cpu")) as memory:
        engine = farandole.parallelize(model, plan, initialize=fill)
        optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 256)).sum())
            engine.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
    held = sum(tensors.store.nbytes for tensors in (engine._stores.gradients, engine._stores.weights))  # type: ignore[union-attr]
    world().barrier()
    whole = sum(p.nbytes for p in model.parameters())
    engine.close()
    return held / whole, memory.peak / whole, len(list(Path(folder).iterdir()))


def test_weights_and_gradients_are_stored_in_files(ranks: Any, tmp_path: Path) -> None:
    for size in (1, 2):
        for held, peak, names in ranks(size).run(_held, str(tmp_path)):
            assert held == pytest.approx(2 / size, rel=0.02)
            # 3 blocks of weights, 2 blocks that are being read, 5 gradients in transfer, 3 records of the optimizer,
            # and writes
            assert peak < 0.35, "few of 48 blocks are in memory together"
            assert names == 0


def _full(rank: int, size: int, folder: str) -> None:
    """One rank's disk is full."""
    places = [folder, str(Path(folder) / "small")]
    for zero, offloaded in ((2, "gradients"), (3, "parameters")):
        plan = Plan(zero=zero, offload=f"disk:{places[rank]}", offloaded=offloaded)  # type: ignore[arg-type]
        with pytest.raises(OffloadError, match="small.*free"):
            farandole.parallelize(nn.Linear(1024, 1024), plan)


def test_a_full_disk_is_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    with in_memory(tmp_path / "small", "1m"):
        ranks(2).run(_full, str(tmp_path))


def _broken(rank: int, size: int, folder: str) -> None:
    """A disk that fails in the middle of a step is an error, not another result."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    engine = farandole.parallelize(model, Plan(zero=3, offload=f"disk:{folder}", offloaded="parameters"))
    engine.backward(engine(torch.ones(2, 64)).sum())
    assert engine._stores.gradients is not None
    with (
        mock.patch.object(engine._stores.gradients.store._file, "read", side_effect=OSError(5, "I/O error")),  # type: ignore[attr-defined]
        pytest.raises(OffloadError, match="cannot read record .* of gradients: I/O error"),
    ):
        engine.gradients()
    engine.close()


def test_a_disk_that_fails_is_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(_broken, str(tmp_path))
