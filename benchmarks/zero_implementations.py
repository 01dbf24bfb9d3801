"""The implementations for the ZeRO benchmark; each builds a training step of a GPT in its own process.

All implementations train the same model on the same batch with AdamW.  In bf16, they compute in bf16 and keep master
weights, reduced gradients and optimizer states in fp32; DDP and a single rank use autocast instead.  The settings are
the fastest that were found for each implementation (see docs/benchmarks/method.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.models.layers import TransformerBlock
from farandole.models.loss import next_token_loss

LEARNING_RATE = 3e-4
BUCKET = 10_000_000
"""The number of values per message, where it can be configured; DeepSpeed's default is 5e8 values."""

Step = Callable[[Tensor, Tensor], float]
"""A training step that takes this rank's inputs and targets (samples, positions) and returns the loss."""


@dataclass(frozen=True)
class Setting:
    """An implementation and its settings."""

    implementation: str
    """A key of `BUILDERS`."""
    zero: int
    precision: str
    """`fp32` or `bf16`."""
    backend: str = "gloo"
    options: dict[str, Any] | None = None
    """Overrides of the implementation's settings, for experiments."""


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return the AdamW that all implementations use; the fused variant is also the fastest on a CPU."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **{"fused": True, **options})


def join(setting: Setting) -> None:
    """Join the job that torchrun's environment variables describe."""
    if setting.implementation == "DeepSpeed":
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.init_distributed(dist_backend=setting.backend, auto_mpi_discovery=False)
    elif setting.backend == "farandole":
        importlib.import_module("farandole.launch.runtime").init()
    elif setting.backend:
        dist.init_process_group(setting.backend)


def build(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step of `model` with the implementation that `setting` selects."""
    return BUILDERS[setting.implementation](setting, model)


def with_farandole(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step with `farandole.parallelize`."""
    import farandole

    plan = farandole.Plan(zero=setting.zero, precision=setting.precision, **(setting.options or {}))
    engine = farandole.parallelize(model, plan)
    return _stepper(engine, engine.optimizer(adamw(model)))


def with_fsdp2(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step with `fully_shard` on each block; stage 2 keeps the weights for the backward pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if setting.precision == "bf16" else MixedPrecisionPolicy()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if isinstance(block, TransformerBlock):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=setting.zero == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=setting.zero == 3)
    return _stepper(model, adamw(model, **(setting.options or {})))


def with_ddp(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step with DistributedDataParallel."""
    replica = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, **(setting.options or {})
    )
    return _stepper(replica, adamw(model), autocast=setting.precision == "bf16")


def alone(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step without communication, with the matrix products of farandole."""
    from farandole.parallel.matrix_products import use_fast_products

    use_fast_products()
    return _stepper(model, adamw(model), autocast=setting.precision == "bf16")


def with_deepspeed(setting: Setting, model: nn.Sequential) -> Step:
    """Return a training step with DeepSpeed's ZeRO stage 2 or 3.

    `setting.options` updates DeepSpeed's configuration; the option `adam` selects torch's or DeepSpeed's AdamW.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    options = dict(setting.options or {})
    adam = options.pop("adam", "torch")
    bf16 = setting.precision == "bf16"
    zero = {
        "stage": setting.zero,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
    } | ({"compute_grad_norm": False} if setting.zero < 3 else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # affects only reports
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero | options.pop("zero_optimization", {}),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    } | options
    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "torch": lambda: adamw(model),
        "foreach": lambda: adamw(model, fused=False, foreach=True),
        "cpu": lambda: deepspeed.ops.adam.DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.01
        ),
        "fused": lambda: deepspeed.ops.adam.FusedAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.01
        ),
    }
    engine = deepspeed.initialize(
        model=model, optimizer=optimizers[adam](), config=config, dist_init_required=False
    )[0]

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = next_token_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _stepper(model: Any, optimizer: torch.optim.Optimizer, *, autocast: bool = False) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = next_token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


BUILDERS: dict[str, Callable[[Setting, nn.Sequential], Step]] = {
    "alone": alone,
    "DDP": with_ddp,
    "FSDP2": with_fsdp2,
    "DeepSpeed": with_deepspeed,
    "Farandole": with_farandole,
}


def missing(setting: Setting) -> str | None:
    """Return why an implementation cannot run in this process, or None."""
    if setting.implementation == "DeepSpeed":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return (
            None
            if importlib.util.find_spec("deepspeed")
            else "DeepSpeed is not installed; benchmarks.zero --help explains how to install it"
        )
    if setting.implementation == "Farandole":
        import farandole

        return (
            None
            if hasattr(farandole, "parallelize")
            else "this version of farandole has no parallelize; install the version of this repository"
        )
    return None
