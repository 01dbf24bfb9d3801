"""Where a model meets a plan.

runtime = farandole.init()
engine = farandole.parallelize(model, Plan(zero=2, precision="bf16"))
optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
for inputs, targets in batches:
    engine.backward(loss_of(engine(inputs), targets))
    engine.clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import compression_named
from farandole.data.wording import counted, size
from farandole.memory.recompute import apply_recompute
from farandole.memory.swap import Swap, swap_activations
from farandole.parallel.engine import Engine
from farandole.parallel.initial_values import Initialise
from farandole.parallel.lora import add_lora
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.optimizers.rounding import StochasticRounding
from farandole.parallel.precision import TYPES, check_float8, use_float8
from farandole.plan import LoRA, Plan, PlanError

_log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    comm: Communicator | None = None,
    *,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    initialise: Initialise | None = None,
    diagnose: bool = False,
    watch: bool = False,
    report: bool = True,
) -> Engine:
    """Have all ranks of `comm` (by default all there are) train `model` together, as `plan` says.

    Called by all ranks; they get the parameters of rank 0.  The model's own parameters become those that the plan
    computes with: the model is used through what is returned, which is called as the model is.

    `example`, an input of a rank's micro-batch, and `loss`, what is made of the output, are for `recompute="attention"`
    and "auto", which measure with them (`memory.recompute.apply_recompute`).

    A `model` on the meta device needs `initialise(name, block)`, which fills one block at a time (`parallel.initial_values`): no
    process has more of it in memory than its own part and a block.

    With `rounding="stochastic"`, what is rounded up depends on torch's seed on rank 0.  With `precision="fp16"` the loss
    is scaled (`scaled`); then `diagnose` has every step's outputs looked at, so that the first overflow
    already names the block where the forward pass went wrong.  With `report` rank 0 prints a line for each overflow.

    With `watch` every rank looks at its own gradients before they are averaged, in any precision, so that
    `Engine.locate_nonfinite` names the rank and the parameter whose gradient is not finite.

    With `lora` the model's weights are frozen, and adapters are drawn from torch's generator: all ranks get those of rank 0.

    What is recomputed or adapted is logged at level INFO.

    Raises `PlanError` where the plan does not fit the ranks or the model, and RuntimeError where there are none.
    """
    plan = plan or Plan()
    if comm is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise RuntimeError("parallelize needs the ranks of a job: call farandole.init() before")
        comm = Communicator(dist.group.WORLD)
    plan.check(comm.size)
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    wanted = TYPES[plan.precision]
    if plan.precision == "fp32" and types - {torch.float32, torch.float64}:
        odd = next(n for n, p in model.named_parameters() if p.dtype not in (torch.float32, torch.float64))
        raise PlanError(
            f"precision='fp32', and {odd} is {dict(model.named_parameters())[odd].dtype}: make the model in fp32, "
            f"of which lower precisions keep masters"
        )
    if diagnose and plan.precision != "fp16":
        raise PlanError(
            f"diagnose=True with precision={plan.precision!r}: it explains the steps that precision='fp16' skips"
        )
    if plan.lora is not None:
        _add_lora(model, plan.lora)
    if plan.precision == "fp8":
        check_float8(_device_of(model))
        use_float8(model)
    _recompute(model, plan, example, loss)
    options: dict[str, Any] = {
        "zero": plan.zero,
        "hybrid": plan.hybrid,
        "dtype": None if plan.precision == "fp32" else wanted,
        "offload": plan.offload,
        "offloaded": plan.offloaded,
        "initialise": initialise,
        "compression": compression_named(plan.compression),
        "watch": watch,
        "report": report,
    }
    if plan.precision == "fp16":
        options |= {"scaler": LossScaler(), "diagnose": diagnose}
    if plan.rounding == "stochastic":
        options["rounding"] = StochasticRounding(_common_seed(comm))
    engine = Engine(model, comm, **options)
    if plan.swap != "none":
        engine.swap(_swap(model, plan))
    return engine


def _add_lora(model: nn.Module, lora: LoRA) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError("lora with a model on the meta device: adapters need a model that is in memory")
    try:
        _log.info("LoRA: %s", add_lora(model, lora))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _swap(model: nn.Module, plan: Plan) -> Swap:
    try:
        return swap_activations(model, plan.swap)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _device_of(model: nn.Module) -> torch.device:
    """Where the model computes; where a deferred one is going to be made."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    return devices[0] if devices else torch.get_default_device()


def _recompute(model: nn.Module, plan: Plan, example: Any, loss: Callable[[Any], Tensor] | None) -> None:
    """Recompute what the plan says; measured as the model that it is going to be."""
    kind = None if plan.precision == "fp32" else TYPES[plan.precision]
    try:
        done = apply_recompute(
            model, plan.recompute, example=example, loss=loss, budget_bytes=plan.activation_bytes, dtype=kind
        )
    except ValueError as error:
        raise PlanError(str(error).replace("budget_bytes", "activation_bytes")) from error
    if done.modules:
        kept = ""
        if done.before is not None and done.after is not None:
            kept = f": each rank keeps {size(done.after)} of activations instead of {size(done.before)}"
        _log.info("recomputing %s in %s%s", plan.recompute, counted(len(done.modules), "module"), kept)


def _common_seed(comm: Communicator) -> int:
    """The seed of torch on rank 0."""
    seed = torch.tensor(torch.initial_seed() % 2**63)
    if comm.size > 1:
        comm.broadcast(seed)
    return int(seed)
