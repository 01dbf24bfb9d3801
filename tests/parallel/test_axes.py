"""Every combination of axes gives the loss, gradients, norms and weights of one process, and loads the others'
checkpoints.

The reference is a loop in plain PyTorch.  The optimizer is SGD with momentum, whose momentum after the first step
equals the gradient.  Checkpoints are read with `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import farandole
from farandole.comm.communicator import Communicator
from farandole.models.deepseek import build_deepseek
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance
from farandole.parallel.checkpoint.ranges import Range
from farandole.parallel.checkpoint.state import state_of
from farandole.parallel.engine import Engine
from farandole.parallel.lora import add_lora
from farandole.parallel.precision import TYPES
from farandole.plan import LoRA, Plan
from tests.comm.hosts import hierarchical_group, on_hosts
from tests.parallel.plans import DEEPSEEK, WORDS, inputs_of

BATCHES = 4
"""The number of micro-batches in a step, which replicas share."""

RATE, MOMENTUM, CLIP = 0.3, 0.9, 0.3

# ---- the list of plans ----


def plans_of(sizes: dict[str, int], half: int | None = None) -> list[Plan]:
    """Return all ZeRO stages, with and without sequence parallelism, and with a ring of 1 rank or of 2 ranks.

    If `half` is 0 or 1, sequence parallelism is used either in the even or in the odd stages only.
    """
    sequence = [False, True] if "tensor" in sizes else [False]
    stages = range(2 if "pipeline" in sizes else 4)
    plans = [
        Plan(zero=zero, sequence=each, **sizes)
        for zero, each in itertools.product(stages, sequence)
        if half is None or "tensor" not in sizes or each == (zero % 2 == half)
    ]
    if sizes == {"data": 2, "context": 2}:
        plans += [Plan(zero=zero, ring=2, **sizes) for zero in (0, 3)]
    return plans


MODELS = {
    "llama": partial(
        build_llama, LlamaConfig(WORDS, 1, 4, 16, 15, kv_heads=2, attention_bias=True, tied=True)
    ),
    "grouped": partial(build_llama, LlamaConfig(WORDS, 1, 4, 16, 15, kv_heads=1, qk_norm=True)),
    "mixtral": partial(
        build_mixtral,
        MixtralConfig(WORDS, 1, 4, 16, 15, kv_heads=2, experts=4, top=2, balance=Balance(0.5, 0.1)),
    ),
    "deepseek": partial(build_deepseek, DEEPSEEK),
    # for pipelines: each stage has layers, and routers with losses
    "gpt, 3 layers": partial(build_gpt, GPTConfig(WORDS, 16, 3, 4, 16, positions="learned")),
    "llama, 3 layers": partial(build_llama, LlamaConfig(WORDS, 3, 4, 16, 15, kv_heads=2, tied=True)),
    "mixtral, 4 layers": partial(
        build_mixtral,
        MixtralConfig(WORDS, 4, 4, 16, 15, kv_heads=2, experts=4, top=2, balance=Balance(0.5, 0.1)),
    ),
    "deepseek, 4 layers": partial(build_deepseek, replace(DEEPSEEK, layers=4)),
}

PAIRS_AND_TRIPLES: list[tuple[str, dict[str, int]]] = [
    ("grouped", {"data": 2, "tensor": 2}),
    ("llama", {"data": 2, "context": 2}),
    ("grouped", {"tensor": 2, "context": 2}),
    ("mixtral", {"data": 2, "expert": 2}),
    ("mixtral", {"tensor": 2, "expert": 2}),
    ("mixtral", {"context": 2, "expert": 2}),
    ("llama", {"data": 2, "tensor": 2, "context": 2}),
    ("mixtral", {"data": 2, "tensor": 2, "expert": 2}),
]
"""A model and the sizes of its axes; "grouped" has fewer key-value heads than tensor-parallel ranks."""

PIPELINES = ("gpt, 3 layers", "llama, 3 layers")

AXES: list[tuple[str, list[Plan]]] = [
    *((name, plans_of(sizes, number % 2)) for number, (name, sizes) in enumerate(PAIRS_AND_TRIPLES)),
    ("llama", [Plan(data=2, tensor=4, sequence=True, zero=2)]),  # 2 key-value heads
    ("llama", [Plan(tensor=4, context=2, zero=1)]),
    ("mixtral", [Plan(tensor=4, expert=2, sequence=True, zero=3)]),
    ("deepseek", [Plan(tensor=2, context=2, expert=2, sequence=True, zero=2)]),
    ("llama", [Plan(data=4, tensor=2, zero=zero, data_shard=2) for zero in (1, 2, 3)]),
    *((name, plans_of({"pipeline": 2, "tensor": 2}, half)) for half, name in enumerate(PIPELINES)),
    (
        "llama, 3 layers",
        [
            Plan(pipeline=2, tensor=2, context=2, sequence=True, zero=1),
            Plan(pipeline=2, tensor=2, data=2, sequence=True, schedule="zb-h1"),
            Plan(pipeline=4, tensor=2, sequence=True, recompute="block"),
        ],
    ),
    ("gpt, 3 layers", [Plan(pipeline=2, tensor=2, data=2, sequence=True, zero=1, schedule="gems")]),
    (
        "mixtral, 4 layers",
        [Plan(pipeline=2), *(Plan(pipeline=2, schedule=each, zero=1) for each in ("zb-v", "gems"))],
    ),
    (
        "mixtral, 4 layers",
        [
            Plan(pipeline=2, expert=2),
            Plan(pipeline=2, expert=2, zero=1, schedule="zb-h1"),
            Plan(pipeline=2, expert=2, zero=1, schedule="chimera", recompute="block"),
            Plan(pipeline=2, context=2, zero=1),
        ],
    ),
    ("mixtral, 4 layers", [Plan(pipeline=2, tensor=2, expert=2, sequence=True, zero=1)]),
    (
        "deepseek, 4 layers",
        [
            Plan(pipeline=2, expert=2, zero=1),
            Plan(pipeline=2, expert=2, schedule="zb-v"),
            Plan(pipeline=2, tensor=2, sequence=True),
            Plan(pipeline=4, zero=1),
        ],
    ),
    ("deepseek, 4 layers", [Plan(pipeline=2, data=2, expert=2, zero=1, schedule="interleaved")]),
]

PRODUCTS: list[tuple[str, list[Plan]]] = [
    *((name, plans_of(sizes)) for name, sizes in PAIRS_AND_TRIPLES if "tensor" in sizes),
    *((name, plans_of({"pipeline": 2, "tensor": 2})) for name in PIPELINES),
]
"""All ZeRO stages with and without sequence parallelism, for a slow test."""

TARGETS = [
    Plan(data=1),
    Plan(data=3, zero=2),
    Plan(tensor=2, sequence=True, zero=1),
    Plan(context=2, ring=2, zero=3),
    Plan(expert=3, zero=3),
]
"""The plans that load checkpoints; each checkpoint is loaded under the first three that the model supports."""


def ranks_of(plan: Plan) -> int:
    assert plan.data is not None or plan.ranks_per_sample * plan.expert > 1
    return (plan.data or 1) * plan.ranks_per_sample * plan.expert


def describe(plan: Plan) -> str:
    fields = (
        "data",
        "pipeline",
        "schedule",
        "context",
        "ring",
        "expert",
        "tensor",
        "sequence",
        "zero",
        "data_shard",
        "recompute",
        "offload",
        "lora",
    )
    return " ".join(f"{n}={v}" for n in fields if (v := getattr(plan, n)) != getattr(Plan(), n))


def _axes_of(plan: Plan) -> set[str]:
    return {axis for axis, size in plan.sizes(ranks_of(plan)).items() if size > 1}


@contextmanager
def named(plan: Plan) -> Iterator[None]:
    """Add the plan to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(describe(plan))
        raise


# ---- one process ----


def make(name: str, lora: LoRA | None = None) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if lora is not None:
        add_lora(model, lora)
    return model


def batches_of(numbers: Sequence[int]) -> list[tuple[Any, Tensor]]:
    """Return micro-batches with different numbers of targets."""
    batches = [inputs_of("llama", 0, number) for number in numbers]
    for number, (_, targets) in zip(numbers, batches, strict=True):
        targets[1, : 2 * number] = -1
    return batches


@dataclass(frozen=True)
class Alone:
    """One step in one process: the loss, the norm, the clipped gradients, and the weights after the update."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    error: float


@functools.cache
def alone(name: str, lora: LoRA | None = None) -> Alone:
    """Train in one process, in plain PyTorch."""
    model = make(name, lora)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), RATE, momentum=MOMENTUM)
    pairs = [model(inputs, None, targets) for inputs, targets in batches_of(range(BATCHES))]
    loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(trained.values(), CLIP)
    optimizer.step()
    gradients = {key: p.grad for key, p in trained.items() if p.grad is not None}
    weights = {key: p.detach() for key, p in model.named_parameters()}
    return Alone(loss.item(), norm.item(), gradients, weights, relative_error(model, torch.float32))


def relative_error(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the relative error of a gradient that another order of its additions may cause: 4 eps sqrt(n).

    The rounding errors of n additions add up like a random walk, to eps sqrt(n) relative to the terms.  For a gradient,
    n is the number of tokens, and the length of every row (forward) and every column (backward) of all matrices.  Both
    of the compared results have this error, and we allow twice the expected difference.
    """
    tokens = sum(inputs.numel() for inputs, _ in batches_of(range(BATCHES)))
    terms = tokens + sum(sum(p.shape[-2:]) for p in model.parameters() if p.dim() > 1)
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms)


# ---- ranks ----


def _make_engine(
    rank: int, size: int, name: str, plan: Plan, *, moved: bool = False
) -> tuple[Engine, torch.optim.Optimizer]:
    model = make(name)
    if moved:
        for parameter in model.parameters():
            parameter.data += 1
    comm = None
    if plan.data_shard == "host":
        hosts = [2 * each // size for each in range(size)]
        comm = Communicator(hierarchical_group(hosts, rank))
    with on_hosts(hosts, rank) if comm else nullcontext():
        engine = farandole.parallelize(model, plan, comm)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return engine, engine.optimizer(torch.optim.SGD(trained, RATE, momentum=MOMENTUM))


def _train(rank: int, size: int, name: str, plans: Sequence[Plan], folder: Path) -> list[tuple[float, float]]:
    """Train for one step under each plan, and save checkpoints; return losses and norms."""
    found = []
    for number, plan in enumerate(plans):
        with named(plan):
            engine, optimizer = _make_engine(rank, size, name, plan)
            mine = range(BATCHES)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
            skipped = True
            while skipped:  # fp16 lowers the loss scale until the gradients do not overflow
                result = engine.forward_backward(
                    batches_of(mine),
                    lambda output, _: output,
                    lambda batch: {"inputs": batch[0], "targets": batch[1]},
                )
                norm = engine.clip(CLIP)
                optimizer.step()
                optimizer.zero_grad()
                skipped = engine.skipped
            found.append((result.loss, norm))
            engine.save(folder / str(number))
            engine.close()
    return found


def _load(rank: int, size: int, name: str, plan: Plan, folders: Sequence[Path]) -> list[str]:
    """Load checkpoints one after the other; return the names of tensors that are not equal to the saved ones."""
    engine, _ = _make_engine(rank, size, name, plan, moved=True)
    names = {id(parameter): key for key, parameter in engine.model.named_parameters()}
    wrong = []
    for folder in folders:
        engine.load(folder)
        saved = torch.load(folder.with_suffix(".pt"), mmap=True)
        wrong += [
            f"{folder.name}: {names[id(parameter)]}"
            for parameter, value in engine.whole_parameters()
            if not torch.equal(value, saved[f"model.{names[id(parameter)]}"])
        ]
        for key, own in state_of(engine, rank).items():
            if isinstance(own, Range):
                parts = ((saved[key][tuple(slice(*ends) for ends in box)], part) for box, part in own.boxes())
                wrong += [f"{folder.name}: {key}" for whole, part in parts if not torch.equal(whole, part)]
            elif not key.startswith("random"):
                wrong += [f"{folder.name}: {key}"] * (not torch.equal(saved[key], own))
    engine.close()
    return wrong


def contents(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint with torch; elements that it does not contain are NaN."""
    reader = FileSystemReader(folder)
    state = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("random")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


# ---- tests ----


def check(expected: Alone, found: Sequence[tuple[float, float]], folder: Path) -> dict[str, Tensor]:
    """Compare the losses and norms of all ranks, and a checkpoint, with one process; return the checkpoint's
    contents."""
    for pair in found:
        assert pair == pytest.approx((expected.loss, expected.norm), rel=expected.error)
    saved = contents(folder)
    for key, gradient in expected.gradients.items():
        difference = float((saved[f"optimizer.{key}/momentum_buffer"] - gradient).norm())
        assert difference <= expected.error * float(gradient.norm()), f"gradient of {key}"
    for key, weight in expected.weights.items():
        difference = float((saved[f"model.{key}"] - weight).norm())
        assert difference <= expected.error * float(weight.norm()), key
    return saved


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        *(
            pytest.param(name, plans, id=f"{name} {describe(replace(plans[0], zero=0, data_shard='all'))}")
            for name, plans in AXES
        ),
        *(
            pytest.param(name, plans, id=f"{name} {describe(plans[0])} all", marks=pytest.mark.slow)
            for name, plans in PRODUCTS
        ),
    ],
)
def test_axes_train_as_one_process(ranks: Any, tmp_path: Path, name: str, plans: list[Plan]) -> None:
    expected, folders = alone(name), [tmp_path / str(number) for number in range(len(plans))]
    results = ranks(ranks_of(plans[0])).run(_train, name, plans, tmp_path)
    for plan, found, folder in zip(plans, zip(*results, strict=True), folders, strict=True):
        with named(plan):
            torch.save(check(expected, found, folder), folder.with_suffix(".pt"))
    axes = _axes_of(plans[0])
    experts = name.startswith(("mixtral", "deepseek"))
    targets = [plan for plan in TARGETS if experts or plan.expert == 1]
    # one process, and plans with an axis that the checkpoint's plan does not have
    for target in sorted(targets[1:], key=lambda plan: bool(axes & _axes_of(plan)))[:2] + targets[:1]:
        for wrong in ranks(ranks_of(target)).run(_load, name, target, folders):
            assert not wrong, f"loaded under {describe(target)}"


THREE = {"data": 2, "tensor": 2, "context": 2, "sequence": True}
WITH_EXPERTS = {"data": 2, "tensor": 2, "expert": 2, "sequence": True}
ADAPTERS = LoRA(rank=2, alpha=4.0)
OPTIONS: list[tuple[str, Plan, str | None]] = [
    ("llama", Plan(zero=2, recompute="block", **THREE), None),
    ("mixtral", Plan(zero=3, recompute="block", **WITH_EXPERTS), None),
    ("llama", Plan(zero=2, lora=ADAPTERS, **THREE), None),
    ("mixtral", Plan(zero=3, lora=ADAPTERS, **WITH_EXPERTS), None),
    ("llama", Plan(zero=2, offload="disk:FOLDER", **THREE), None),
    ("mixtral", Plan(zero=3, offload="disk:FOLDER", offloaded="parameters", **WITH_EXPERTS), None),
    ("mixtral", Plan(data=2, tensor=2, expert=2, zero=2, data_shard="host"), None),
    ("llama", Plan(data=2, tensor=2, zero=3, data_shard=1), "gloo"),
    (
        "mixtral",
        Plan(data=2, expert=2, zero=3, data_shard=1),
        "gloo",
    ),  # gathers weights outside of the experts
    ("llama", Plan(zero=3, **THREE), "gloo"),  # gathers weights, because ranks do not share memory
    ("mixtral", Plan(zero=3, **WITH_EXPERTS), "gloo"),
]


@pytest.mark.parametrize(
    ("name", "plan", "backend"), OPTIONS, ids=[f"{n} {describe(p)} {b or ''}" for n, p, b in OPTIONS]
)
def test_axes_with_other_options(
    ranks: Any, tmp_path: Path, name: str, plan: Plan, backend: str | None
) -> None:
    if plan.offload != "none":
        plan = replace(plan, offload=f"disk:{tmp_path}")
    results = ranks(ranks_of(plan), backend).run(_train, name, [plan], tmp_path)
    check(alone(name, plan.lora), [found for (found,) in results], tmp_path / "0")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"zero": 2, **THREE}),
        ("mixtral", {"zero": 2, "data": 2, "expert": 2}),
        ("mixtral, 4 layers", {"zero": 1, "pipeline": 2, "expert": 2}),
    ],
)
def test_axes_in_low_precision(
    ranks: Any, tmp_path: Path, name: str, sizes: dict[str, Any], precision: Any
) -> None:
    """Compare with one process in the same precision.

    The outputs and gradients of all modules are rounded.  These n errors add up like a random walk, to u sqrt(n) with
    the unit roundoff u = eps / 2.  We allow 4 times this error.
    """
    roundings = 2 * sum(1 for _ in make(name).modules())
    error = 4 * torch.finfo(TYPES[precision]).eps / 2 * math.sqrt(roundings)
    found = []
    for plan in (Plan(data=1, precision=precision), Plan(precision=precision, **sizes)):
        folder = tmp_path / str(ranks_of(plan))
        folder.mkdir()
        results = ranks(ranks_of(plan)).run(_train, name, [plan], folder)
        found.append(([each for (each,) in results], contents(folder / "0")))
    (alone_in_precision, expected), (pairs, saved) = found
    for pair in pairs:
        assert pair == pytest.approx(alone_in_precision[0], rel=error)
    for key, value in expected.items():
        assert float((saved[key] - value).norm()) <= error * float(value.norm()), key
