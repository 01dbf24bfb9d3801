"""Run training steps for a task's model under a plan, with AdamW, linear warm-up and cosine decay.

Weight decay applies to matrices but not to vectors (biases and normalization weights), as in GPT-3.  See Loshchilov and
Hutter, 2019, "Decoupled Weight Decay Regularization".
Module `run` prints progress, saves checkpoints and decides when to stop.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_map_only

from farandole.comm.communicator import Communicator
from farandole.comm.errors import CommunicationError
from farandole.comm.notices import warn_once
from farandole.data.sampler import Sampler
from farandole.memory.disk import OffloadError
from farandole.models.moe import RouterLoad
from farandole.parallel.loss_scaling import LossScaler, Overflow
from farandole.parallel.parallelize import parallelize
from farandole.parallel.zero.initial_values import is_deferred
from farandole.plan import PlanError, Precision
from farandole.train.config import ConfigError, OptimizerSection, TrainConfig, plan_config_error
from farandole.train.flops import count_flops
from farandole.train.profile import Profile
from farandole.train.tasks import Mean, Samples, Task, checked_mean
from farandole.train.weights import load_initial_weights


@dataclass(frozen=True)
class StepResult:
    """The result of a step.  All ranks receive the same result.

    Args:
        loss: the mean loss over the whole batch.
        count: the sum of the counts that the task's loss returned for the whole batch, such as the number of targets.
        gradient_norm: the global gradient norm before clipping.
        waited_s: the time spent waiting for other ranks, in seconds, averaged over ranks.
        stop: whether any rank was asked to stop.
        overflow: the fp16 overflow that caused the step to be skipped, or None.
        loads: the expert loads of each mixture-of-experts router, keyed by router name.
    """

    loss: float
    count: float
    gradient_norm: float
    learning_rate: float
    waited_s: float
    stop: bool
    overflow: Overflow | None
    loads: dict[str, RouterLoad] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Return whether the step was skipped because fp16 gradients overflowed."""
        return self.overflow is not None


class Trainer:
    """Trains the model of `task` on the ranks of `comm`, in batches of `config.batch` samples.

    With `resumed`, the trainer does not read the initial weights, because the caller loads a checkpoint.

    Raises:
        ConfigError: on all ranks, if the plan does not support the model or the number of ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        precision: Precision,
        comm: Communicator,
        device: torch.device,
        resumed: bool = False,
    ) -> None:
        self.config = config
        self.task = task
        self.precision = precision
        self.device = device
        self.step_number = 0
        self._comm = comm
        _, self._size = config.micro_batches(comm.size)
        torch.manual_seed(config.seed)
        self.model = task.build(config)
        if not is_deferred(self.model):
            self.model.to(device)
        if not resumed:
            load_initial_weights(self.model, config)
        torch.manual_seed(config.seed + 1 + comm.rank)  # dropout differs between ranks
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        try:
            plan = config.plan.plan(precision)
            if plan.lora is not None:
                plan = replace(plan, lora=replace(plan.lora, also_train=task.also_train))
            self.flops = count_flops(self.model, plan.lora)  # while the model is complete
            with _captured_logs() as records, torch.device(device):  # load the weights onto this device
                self.engine = parallelize(
                    self.model,
                    plan,
                    comm,
                    diagnose=config.log.diagnose,
                    watch=True,
                    report=False,
                    **(
                        self._example()
                        if plan.recompute in ("attention", "auto") or plan.stage_bytes is not None
                        else {}
                    ),
                )
        except PlanError as error:
            raise plan_config_error(error) from error
        except OffloadError as error:
            raise ConfigError(f"plan.offload={plan.offload} plan.swap={plan.swap}: {error}") from error
        self.profile = Profile(self.engine, enabled=config.profile)
        self.notices = [record.getMessage() for record in records]
        self.optimizer = self.engine.optimizer(build_optimizer(self.model, config.optimizer))
        self.sampler = Sampler(len(task.train), config.seed)

    @property
    def scaler(self) -> LossScaler:
        """Return the loss scaler.  The scale is 1 unless the precision is fp16."""
        return self.engine.scaler

    def step(self, stop: bool = False) -> StepResult:
        """Train on the next batch.

        Args:
            stop: whether this rank was asked to stop.  `StepResult.stop` is True if any rank was asked to stop.

        Raises:
            FloatingPointError: on all ranks, if the gradient is not finite.  With fp16, the step is skipped instead.
            ConfigError: if the sum of the loss counts over all ranks is not positive.
        """
        rate = learning_rate(self.step_number, self.config.steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad()
        mesh = self.engine.mesh
        positions = self.sampler.take(self.config.batch, mesh.replica_of(self._comm.rank), mesh.replicas)
        with self.profile.phase("data"):
            batches = self._batches(
                self.task.train, self.sampler.at(positions), self.sampler.epochs(positions)
            )
        counts: list[Any] = []

        def loss(output: Any, batch: Any) -> Mean:
            total, count = checked_mean(self.config, self.task.loss(output, batch))
            counts.append(count)
            return total, self._size * self.task.units_per_sample

        with self.profile.phase("forward and backward"):
            result = self.engine.forward_backward(batches, loss, self.task.inputs)
        own = float(sum(float(count) for count in counts)) * self.engine.counts_loss
        with self.profile.phase("norm of gradients"):
            norm = self.engine.gradient_norm()
            count, waited, stops = self._sums(own, self.engine.waited_s, float(stop))
        self.engine.waited_s = 0.0
        if not count > 0:
            raise ConfigError(
                f"task={self.config.task!r}: expected loss(output, batch) to return a positive count on some rank, got a "
                f"total of {count:g} in step {self.step_number + 1}"
            )
        # The gradient is divided by the expected count, which is the same in every step, so that a resumed run
        # repeats a step exactly.  Clipping also corrects the gradient for the actual count.
        correction = result.count / count
        mean, norm = result.loss * correction, norm * correction
        if not math.isfinite(norm) and not self.scaler.enabled:
            raise FloatingPointError(
                f"step {self.step_number + 1}: training diverged: gradient norm {norm} at loss {mean:g}, "
                f"{self.engine.locate_nonfinite()}; reduce "
                f"optimizer.learning_rate={self.config.optimizer.learning_rate:g}"
            )
        factor = min(1.0, self.config.optimizer.clip / (norm + 1e-6)) * correction
        if factor != 1.0:
            with self.profile.phase("clip"):
                self.engine.scale_gradients(factor)
        with self.profile.phase("optimizer"):
            self.optimizer.step()  # does nothing if fp16 gradients overflowed
        loads = self.engine.take_router_loads()
        self.step_number += 1
        return StepResult(
            mean, count, norm, rate, waited / self._comm.size, stops > 0, self.engine.overflow, loads
        )

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss and the task's metrics, the same on all ranks."""
        available = len(self.task.validation)
        wanted = min(self.config.evaluate.samples, available)
        chosen = np.arange(wanted) * available // wanted
        mesh = self.engine.mesh
        own = chosen[mesh.replica_of(self._comm.rank) :: mesh.replicas]
        batches = [(batch, True) for batch in self._batches(self.task.validation, own, np.zeros_like(own))]
        # ranks that share experts must run the same number of micro-batches, so some repeat a sample that does not
        # count
        missing = math.ceil(math.ceil(wanted / mesh.replicas) / self._size) - len(batches)
        first = np.zeros(1, np.int64)
        batches += [(batch, False) for batch in self._batches(self.task.validation, first, first)] * missing
        sums: dict[str, list[float]] = {}

        def loss(output: Any, item: tuple[Any, bool]) -> Mean:
            batch, counts = item
            if not counts:
                return torch.zeros((), device=self.device), 0
            for name, returned in self.task.metrics(output, batch).items():
                both = sums.setdefault(name, [0.0, 0.0])
                for index, value in enumerate(checked_mean(self.config, returned, f"metrics {name!r}")):
                    both[index] += float(value)
            return checked_mean(self.config, self.task.loss(output, batch))

        found = {"loss": self.engine.evaluate(batches, loss, lambda item: self.task.inputs(item[0]))}
        names: set[str] = set().union(*self._comm.all_gather_object(list(sums)))
        for name in sorted(names):  # a rank without samples has no metrics
            total, count = self._sums(*sums.get(name, (0.0, 0.0)))
            found[name] = total / count if count else math.nan
        return found

    def report(self) -> str:
        """Return the task's report about the model.

        The model is in evaluation mode during the report, and the states of torch's random generators do not change.
        If the report fails on any rank, rank 0 logs a warning, and the result is empty on all ranks.

        Raises:
            CommunicationError: if the ranks cannot communicate.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        text, failure = "", ""
        try:
            with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                text = self.task.report(self.model)
        except CommunicationError:
            raise
        except Exception as error:  # a report must not end a run
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            failure = f"the report failed: {type(error).__name__}: {error} ({where})"
        finally:
            for module, mode in modes:
                module.training = mode
        if failures := [each for each in self._comm.all_gather_object(failure) if each]:
            if self._comm.rank == 0:
                warn_once(failures[0])
            return ""
        return text

    def _batches(self, samples: Samples, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> list[Any]:
        """Return the samples at the indices `numbers`, divided into micro-batches, on the trainer's device."""
        parts = [slice(start, start + self._size) for start in range(0, len(numbers), self._size)]
        batches = [self.task.batch(samples, numbers[part], epochs[part]) for part in parts]
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batches)

    def _example(self) -> dict[str, Any]:
        """Return the arguments with which `parallelize` measures activations."""
        first = np.arange(self._size) % len(self.task.train)
        (batch,) = self._batches(self.task.train, first, np.zeros_like(first))

        def loss(output: Any) -> torch.Tensor:
            return checked_mean(self.config, self.task.loss(output, batch))[0]

        return {"example": self.task.inputs(batch), "loss": loss}

    def _sums(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        self._comm.all_reduce(sums)
        result: list[float] = sums.tolist()
        return result


@contextmanager
def _captured_logs() -> Iterator[list[logging.LogRecord]]:
    """Return a context manager that collects the messages that `parallelize` logs."""
    logger, handler = logging.getLogger("farandole.parallel"), BufferingHandler(sys.maxsize)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.buffer
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def build_optimizer(model: nn.Module, config: OptimizerSection) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer for the trainable parameters of `model`.

    The first group contains the parameters with two or more dimensions.  The second group contains the other
    parameters, which have no weight decay.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8, fused=True
    )


def learning_rate(step: int, steps: int, config: OptimizerSection) -> float:
    """Return the learning rate for `step` (0 to steps - 1): linear warm-up, then cosine decay."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_share + (1 - config.final_share) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
