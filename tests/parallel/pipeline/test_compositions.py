"""Stages combine with other axes, precisions, adapters, recomputation and BatchNorm options, as in one process."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.memory.call_wrappers import wrapper_of
from farandole.memory.recompute_wrapper import RecomputeWrapper
from farandole.memory.tracker import MemoryTracker
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel.bucket import Bucket
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.precision import use_float8
from farandole.plan import LoRA, Plan, PlanError
from tests.parallel.pipeline.models import (
    MODELS,
    Result,
    alone,
    batches,
    build,
    compare,
    loss,
    train,
)

Case = tuple[str, Plan, dict[str, Any]]


def _cases(rank: int, size: int, cases: list[Case]) -> list[Result]:
    return [train(rank, size, name, plan, 3, **options) for name, plan, options in cases]


def _results(ranks: Any, size: int, cases: list[Case]) -> list[list[Result]]:
    """Return the results of all ranks for each case."""
    return [list(each) for each in zip(*ranks(size).run(_cases, cases), strict=True)]


def test_both_replicas_combine_with_tensor_parallelism(ranks: Any) -> None:
    plans = [
        Plan(pipeline=2, tensor=2, schedule="gems"),
        Plan(pipeline=2, tensor=2, schedule="chimera", zero=1),
    ]
    cases: list[Case] = [(name, plan, {"chunked": True}) for plan in plans for name in ("gpt", "llama")]
    for (name, *_), results in zip(cases, _results(ranks, 4, cases), strict=True):
        compare(results, alone(name, 3))


def test_stages_combine_with_context_parallelism(ranks: Any) -> None:
    cases: list[Case] = [
        (name, Plan(pipeline=2, context=2, schedule=schedule), {"chunked": chunked})
        for name, schedule, chunked in (
            ("gpt", "1f1b", True),
            ("llama", "zb-v", False),
            ("llama", "gems", True),
        )
    ]
    for (name, *_), results in zip(cases, _results(ranks, 4, cases), strict=True):
        compare(results, alone(name, 3))


def _evaluate(rank: int, size: int, plan: Plan) -> tuple[list[Tensor], list[float]]:
    """Return the logits and the mean losses of calls of a model in evaluation mode, with different sequences."""
    model = build("llama").eval()
    engine = farandole.parallelize(model, plan)
    logits, losses = [], []
    with torch.no_grad():
        for positions in (8, 9):
            tokens = torch.arange(2 * positions).view(2, positions)
            logits.append(engine(tokens))
            total, count = engine(tokens, None, tokens.roll(1, 1))
            losses.append(float(total) / float(count))
    engine.close()
    return logits, losses


def test_a_call_in_evaluation_mode_splits_positions_once(ranks: Any) -> None:
    ((expected, losses),) = ranks(1).run(_evaluate, Plan())
    for found, found_losses in ranks(4).run(_evaluate, Plan(pipeline=2, context=2)):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        for logits, other in zip(found, expected, strict=True):
            torch.testing.assert_close(logits, other, rtol=1e-4, atol=1e-5)


def test_stages_recompute_their_blocks(ranks: Any) -> None:
    cases: list[Case] = [
        ("gpt", Plan(pipeline=2, recompute="block"), {}),
        ("gpt", Plan(pipeline=2, recompute="selective"), {}),
        ("resnet", Plan(pipeline=2, recompute="block", schedule="gems"), {}),
    ]
    example = {"example": batches("gpt", 0, 0, 2)[1][0]}
    small, large = 20_000, 40_000
    cases += [
        ("gpt", Plan(pipeline=2, recompute="selective"), example),
        ("gpt", Plan(pipeline=2, recompute="attention"), example),
        ("gpt", Plan(pipeline=2, recompute="attention", schedule="gpipe"), example),
        ("gpt", Plan(pipeline=2, recompute="auto", activation_bytes=large), example),
        ("gpt", Plan(pipeline=2, recompute="auto", activation_bytes=small, schedule="gems"), example),
    ]
    for (name, *_), results in zip(cases, _results(ranks, 2, cases), strict=True):
        compare(results, alone(name, 3))


def _fill(name: str, block: torch.nn.Module) -> None:
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.zero_()


def _peak(rank: int, size: int, plan: Plan) -> tuple[int, int]:
    """Return the peak of all tensors in a step without the model and the gradients, and the number of recomputed
    blocks."""
    auto = plan.recompute == "auto"
    # a model on the meta device is divided by parameters, not by time
    with torch.device("meta" if auto else "cpu"):
        model = build_gpt(GPTConfig(29, 128, 8, 4, 64))
    tokens = torch.randint(0, 29, (4, 128))
    example, initialize = tokens if plan.stage_bytes or auto else None, _fill if auto else None
    engine = farandole.parallelize(model, plan, example=example, initialize=initialize)
    samples = [(tokens.clone(), tokens) for _ in range(6)]
    engine.forward_backward(samples, loss)
    engine.zero_grad()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    with MemoryTracker((*model.parameters(), *(inputs for inputs, _ in samples))) as tracker:
        engine.forward_backward(samples, loss)
    engine.close()
    recomputed = sum(wrapper_of(block, RecomputeWrapper) is not None for block in model)
    return tracker.peak - gradients, recomputed


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_each_rank_recomputes_within_its_budget(ranks: Any, schedule: str) -> None:
    """With 1F1B, rank 0 has activations of two micro-batches, and therefore recomputes more blocks than rank 1."""
    plan, budget = Plan(pipeline=2, schedule=schedule), 12 << 20
    before = [peak for peak, _ in ranks(2).run(_peak, plan)]
    plan = replace(plan, recompute="auto", activation_bytes=budget)
    after = ranks(2).run(_peak, plan)
    assert max(before) > 1.5 * budget
    assert all(0.6 * budget < peak < 1.25 * budget for peak, _ in after), (before, after)
    if schedule == "1f1b":
        assert after[0][1] > after[1][1]


def test_a_model_is_divided_within_the_memory_of_a_rank(ranks: Any) -> None:
    """Rank 0 has activations of two micro-batches, and therefore gets fewer blocks than in a division by time."""
    memory = 16 << 20
    before = [peak for peak, _ in ranks(2).run(_peak, Plan(pipeline=2))]
    after = [peak for peak, _ in ranks(2).run(_peak, Plan(pipeline=2, stage_bytes=memory))]
    assert before[0] > 1.2 * memory
    assert max(after) < 1.1 * memory, (before, after)


def test_separate_weight_gradients_need_little_more_memory(ranks: Any) -> None:
    """In a transformer, an input gradient releases almost as much memory as the waiting gradients need."""
    gems, gems_w = (
        max(peak for peak, _ in ranks(4).run(_peak, Plan(pipeline=4, schedule=schedule)))
        for schedule in ("gems", "gems-w")
    )
    assert gems_w < 1.2 * gems


def _refusal(rank: int, size: int, plan: Plan, options: dict[str, Any]) -> str:
    model = build("gpt")
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, plan, **{"example": torch.ones(1, 5, dtype=torch.int64), **options})
    return str(error.value)


BUDGET: dict[str, Any] = {"recompute": "auto", "activation_bytes": 9}


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (
            Plan(pipeline=2, schedule="gpipe", **BUDGET),
            {},
            "recompute='auto' cannot be used with schedule='gpipe': .*nearest plan: schedule='1f1b'",
        ),
        (Plan(pipeline=2, **BUDGET), {}, "use at least activation_bytes="),
        (Plan(pipeline=2, recompute="block", schedule="zb-v"), {}, "nearest plan: schedule='1f1b'"),
        (
            Plan(pipeline=2, schedule="gpipe", stage_bytes=1 << 20),
            {},
            "stage_bytes cannot be used with schedule='gpipe': .*nearest plan: schedule='1f1b'",
        ),
        (
            Plan(pipeline=2, stage_bytes=9),
            {},
            r"stages of size at most 9 each; raise the limit to at least \d+",
        ),
        (Plan(pipeline=2, stage_bytes=9), {"example": None}, "stage_bytes=9 requires example="),
    ],
)
def test_budgets_that_do_not_suit_a_pipeline_are_refused(
    ranks: Any, plan: Plan, options: dict[str, Any], message: str
) -> None:
    for found in ranks(2).run(_refusal, plan, options):
        assert re.search(message, found), found


def test_adapters_train_as_without_stages(ranks: Any) -> None:
    adapters = [LoRA(2), LoRA(2, also_train="6")]
    schedules = ["1f1b", "chimera"]
    cases: list[Case] = [
        ("gpt", Plan(pipeline=2, lora=lora, schedule=schedule), {})
        for lora, schedule in zip(adapters, schedules, strict=True)
    ]
    single: list[Case] = [("gpt", Plan(lora=lora), {}) for lora in adapters]
    references = _results(ranks, 1, single)
    for results, (reference,) in zip(_results(ranks, 2, cases), references, strict=True):
        compare(results, reference)


def _save_adapter(rank: int, size: int, plan: Plan, folder: Path) -> None:
    engine = farandole.parallelize(build("gpt"), plan)
    engine.save_adapter(folder)
    engine.close()


def test_the_adapter_of_all_stages_is_that_of_one_process(ranks: Any, tmp_path: Path) -> None:
    """The embedding and the tied output projection, which are trained too, are in different stages."""
    lora = LoRA(2, targets=["1.attention.qkv", "*.attention.out"], also_train=["0", "7"], bias="all")
    plans = [Plan(lora=lora), Plan(lora=lora, pipeline=2), Plan(lora=lora, pipeline=2, schedule="gems")]
    files = []
    for number, plan in enumerate(plans):
        folder = tmp_path / str(number)
        ranks(plan.pipeline).run(_save_adapter, plan, folder)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert files[1] == files[2] == files[0]


def test_offloaded_optimizer_states_train_as_in_memory(ranks: Any, tmp_path: Path) -> None:
    cases: list[Case] = [
        ("gpt", Plan(pipeline=2, offload=f"disk:{tmp_path}"), {}),
        ("gpt", Plan(pipeline=2, offload=f"disk:{tmp_path}", zero=1, schedule="chimera"), {}),
        ("resnet", Plan(pipeline=2, offload=f"disk:{tmp_path}", schedule="zb-v"), {}),
    ]
    for (name, *_), results in zip(cases, _results(ranks, 2, cases), strict=True):
        compare(results, alone(name, 3))
    replicas: list[Case] = [("gpt", Plan(data=2, pipeline=2, zero=1, offload=f"disk:{tmp_path}"), {})]
    for results in _results(ranks, 4, replicas):
        compare(results, alone("gpt", 3, replicas=2))


def _wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    )


def _learn(rank: int, size: int, plan: Plan, *, emulate: bool) -> tuple[dict[str, Tensor], int, int, int]:
    """Return the weights after two steps, the bytes that were swapped out and in, and the peak of the second step."""
    model = _wide()
    if emulate:
        use_float8(model, emulate=True)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        samples = [torch.randn(2048, 64, generator=generator) for _ in range(4)]
        with MemoryTracker((*model.parameters(), *samples)) as tracker:
            engine.forward_backward(samples, lambda y, _: (y.float().square().sum(), y.numel()))
        optimizer.step()
        optimizer.zero_grad()
    names = {p: n for n, p in model.named_parameters()}
    state = {names[p]: value.detach().clone() for p, value in engine.whole_parameters()}
    written, read = (
        (0, 0) if engine.swapped is None else (engine.swapped.written_bytes, engine.swapped.read_bytes)
    )
    engine.close()
    return state, written, read, tracker.peak


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "gems"])
def test_swapped_activations_train_as_in_memory(ranks: Any, tmp_path: Path, schedule: str) -> None:
    plan = Plan(pipeline=2, schedule=schedule)
    plain = ranks(2).run(functools.partial(_learn, emulate=False), plan)
    swapped = ranks(2).run(functools.partial(_learn, emulate=False), replace(plan, swap=f"disk:{tmp_path}"))
    for (expected, none, _, _), (found, written, read, _) in zip(plain, swapped, strict=True):
        assert none == 0 and written >= 2 * 4 * 3 * (2 << 20) and read > 0
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_products_of_8_bit_floats_train_as_without_stages(ranks: Any, schedule: str) -> None:
    """The products are emulated, because no processor here multiplies 8-bit floats; each micro-batch has a scale."""
    emulated = functools.partial(_learn, emulate=True)
    ((expected, *_),) = ranks(1).run(emulated, Plan(precision="bf16"))
    found = ranks(2).run(emulated, Plan(pipeline=2, precision="bf16", schedule=schedule))
    names = {name for state, *_ in found for name in state}
    assert names == set(expected)
    for state, *_ in found:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_lower_precisions_train_almost_as_in_fp32(ranks: Any) -> None:
    options: list[dict[str, Any]] = [
        {"precision": "bf16"},
        {"precision": "bf16", "zero": 1, "schedule": "gems-w"},
        {"precision": "fp16"},
        {"precision": "fp16", "zero": 1, "schedule": "zb-h1"},
    ]
    cases: list[Case] = [("gpt", Plan(pipeline=2, **each), {}) for each in options]
    state, losses, norms, metric = alone("gpt", 3)
    for results in _results(ranks, 2, cases):
        for own, found, found_norms, found_metric in results:
            assert found == pytest.approx(losses, rel=0.01)
            assert found_norms == pytest.approx(norms, rel=0.02)
            assert found_metric == pytest.approx(metric, rel=0.01)
            for name, value in own.items():
                torch.testing.assert_close(value.float(), state[name], rtol=0.02, atol=0.004)


def _overflows(rank: int, size: int) -> list[Any]:
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=2, precision="fp16"))
    optimizer = engine.optimizer(torch.optim.SGD(engine.model.parameters(), 0.1))
    found: list[Any] = []
    for step in range(2):
        factor = 1.0 if step else 1e9
        done = engine.forward_backward(
            batches("gpt", 0, 0, 3), lambda out, b, factor=factor: (loss(out, b)[0] * factor, loss(out, b)[1])
        )
        optimizer.step()
        optimizer.zero_grad()
        found.append((done.skipped, "" if engine.overflow is None else str(engine.overflow)))
    engine.close()
    return found


def test_an_overflow_of_a_stage_is_found_on_all_ranks(ranks: Any) -> None:
    first, last = ranks(2).run(_overflows)
    assert first == last
    assert first[0][0]
    assert "grad nan" in first[0][1] or "grad inf" in first[0][1]
    assert first[1] == (False, "")


def _statistics(samples: list[Tensor], momentum: float | None) -> tuple[Tensor, Tensor]:
    """Return BatchNorm's running statistics after one step, in which it sees all samples as one batch."""
    values = torch.cat([x.transpose(0, 1).flatten(1) for x in samples], 1)
    share = 1.0 if momentum is None else momentum
    return share * values.mean(1), 1 - share + share * values.var(1)


@pytest.mark.parametrize("schedule", ["1f1b", "gems", "chimera"])
def test_deferred_statistics_are_those_of_one_batch(ranks: Any, schedule: str) -> None:
    model, seen = build("resnet"), dict[str, list[Tensor]]()
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].detach())
            )
    for replica in range(2):
        for images, _ in batches("resnet", 0, replica, 3):
            model(images)
    plan = Plan(data=2, pipeline=2, schedule=schedule, deferred_batch_norm=True)
    (results,) = _results(ranks, 4, [("resnet", plan, {"steps": 1})])
    state = dict(alone("resnet", 3, replicas=2, steps=1)[0])
    for name, samples in seen.items():
        state[f"{name}.running_mean"], state[f"{name}.running_var"] = _statistics(samples, 0.1)
        state[f"{name}.num_batches_tracked"] = torch.tensor(1)
    for own, *_ in results:
        for name, value in own.items():
            torch.testing.assert_close(
                value, state[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_replicas_continue_with_the_mean_of_running_statistics(ranks: Any) -> None:
    """Each replica updates its statistics once per micro-batch, like one process with the replica's micro-batches."""
    means = []
    for replica in range(2):
        model = build("resnet")
        for images, _ in batches("resnet", 0, replica, 3):
            model(images)
        means.append({name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()})
    plans = [Plan(data=2, pipeline=2, schedule=schedule) for schedule in ("1f1b", "gems")]
    for results in _results(ranks, 4, [("resnet", plan, {"steps": 1}) for plan in plans]):
        for own, *_ in results:
            for name in means[0].keys() & own.keys():
                torch.testing.assert_close(
                    own[name], (means[0][name] + means[1][name]) / 2, rtol=1e-4, atol=1e-6
                )


def _fill(name: str, block: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            torch.nn.init.uniform_(tensor, 0.1, 0.3) if tensor.is_floating_point() else tensor.zero_()


def _deferred(rank: int, size: int, name: str, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = MODELS[name]()
    engine = farandole.parallelize(model, plan, initialize=_fill)
    names = {p: n for n, p in model.named_parameters()}
    found = {names[p]: value.clone() for p, value in engine.whole_parameters()}
    found |= {n: buffer.clone() for n, buffer in model.named_buffers() if buffer.is_floating_point()}
    engine.forward_backward(batches(name, 0, 0, 2), loss)
    engine.close()
    return found


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_stages_are_initialized_from_the_meta_device(ranks: Any, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.manual_seed(0)
    for number, block in enumerate(model):
        with torch.no_grad():
            kept = (
                [p.detach().clone() for p in model[0].parameters()] if number == 7 and name == "gpt" else []
            )
            _fill(str(number), block)
            for parameter, value in zip(model[0].parameters(), kept, strict=False):
                parameter.copy_(value)
    expected = dict((*model.named_parameters(), *model.named_buffers()))
    plans = [Plan(pipeline=2, zero=1), Plan(pipeline=2, schedule="gems")]
    for plan in plans:
        results = ranks(2).run(_deferred, name, plan)
        assert {n for each in results for n in each} == {
            n for n, t in expected.items() if t.is_floating_point()
        }
        for each in results:
            for found, value in each.items():
                torch.testing.assert_close(
                    value, expected[found], rtol=0, atol=0, msg=lambda m, n=found: f"{n}: {m}"
                )


def _reductions(rank: int, size: int, plan: Plan) -> tuple[int, int]:
    """Return the number of reductions that start while the schedule runs, and the number of buckets."""
    engine = farandole.parallelize(build("gpt"), plan)
    started: list[int] = []
    plain, run = Bucket.reduce_async, Pipeline.run

    def reduce_async(bucket: Bucket) -> None:
        started[-1] += 1
        plain(bucket)

    def counted(pipeline: Pipeline, *args: Any, **named: Any) -> None:
        started.append(0)
        run(pipeline, *args, **named)
        started.append(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "reduce_async", reduce_async)
        patch.setattr(Pipeline, "run", counted)
        engine.forward_backward(batches("gpt", 0, engine.mesh.replica_of(rank), 3), loss)
    found = started[0], len(engine.buckets)
    engine.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "gems"])
def test_reductions_start_while_the_pipeline_drains(ranks: Any, schedule: str) -> None:
    for started, buckets in ranks(4).run(_reductions, Plan(data=2, pipeline=2, schedule=schedule)):
        assert started == buckets > 0


def _gradient_bytes(rank: int, size: int, plan: Plan) -> tuple[int, int, int]:
    """Return peak bytes of gradients when a reduction starts, and bytes of all unsharded gradients and of a bucket."""
    torch.manual_seed(0)
    pairs = ((nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)) for _ in range(2 * size))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    engine = farandole.parallelize(model, plan)
    samples = [torch.randn(2, 512) for _ in range(3)]

    def step() -> None:
        engine.forward_backward(samples, lambda output, _: (output.square().sum(), output.numel()))
        engine.zero_grad()

    step()  # ranks agree on the order of the buckets
    seen, plain = [0], Bucket.reduce_async

    def reduce_async(bucket: Bucket) -> None:
        sharded = [b.reduced.nbytes for b in engine.buckets if b.plan.every_pass and b.holds_result]
        seen.append(sum(b.held_nbytes for b in engine.buckets) + sum(sharded))
        plain(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "reduce_async", reduce_async)
        step()
    whole = [bucket.whole_nbytes for bucket in engine.buckets]
    engine.close()
    return max(seen), sum(whole), max(whole)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranks_keep_shards_of_gradients_while_stages_run(ranks: Any, schedule: str) -> None:
    for zero in (1, 2):
        plan = Plan(data=2, pipeline=2, schedule=schedule, zero=zero)
        for peak, whole, bucket in ranks(4).run(_gradient_bytes, plan):
            assert peak == whole if zero == 1 else peak <= whole / 2 + 3 * bucket < whole


def _uneven(rank: int, size: int, plan: Plan, counts: list[int]) -> tuple[float, float]:
    engine = farandole.parallelize(build("gpt"), plan)
    replica = engine.mesh.replica_of(rank)
    step = engine.forward_backward(batches("gpt", 0, replica, counts[replica]), loss)
    found = step.loss, engine.gradient_norm()
    engine.close()
    return found


@pytest.mark.parametrize("counts", [[3, 1], [0, 2]])
def test_replicas_may_have_different_numbers_of_micro_batches(ranks: Any, counts: list[int]) -> None:
    model = build("gpt")
    samples = [b for replica, count in enumerate(counts) for b in batches("gpt", 0, replica, count)]
    parts = [loss(model(batch[0]), batch) for batch in samples]
    mean = sum(total for total, _ in parts) / sum(count for _, count in parts)
    mean.backward()  # type: ignore[union-attr]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for schedule, zero in (("1f1b", 1), ("v-min", 2)):
        plan = Plan(data=2, pipeline=2, schedule=schedule, zero=zero)
        for found in ranks(4).run(_uneven, plan, counts):
            assert found == pytest.approx((mean.item(), norm.item()), rel=1e-4)
