"""The training engine: one model, its data and optimizer, and what one step does.

Nothing here prints, saves or decides when to stop; `run` does.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from farandole.comm.communicator import Communicator
from farandole.comm.compression import compression_named
from farandole.data.sampler import Sampler
from farandole.data.text import Text
from farandole.memory.disk import OffloadError
from farandole.memory.recompute import Recomputed, apply_recompute
from farandole.memory.swap import swap_activations
from farandole.models.gpt import build_gpt
from farandole.models.loss import next_token_loss
from farandole.parallel import engine as parallel_engine
from farandole.parallel.loss_scaling import LossScaler, Overflow
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from farandole.train.precision import autocast


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on all ranks.

    `loss` is the mean over the whole batch in nats per token; `gradient_norm` is from before clipping;
    `waited_s` is the mean over ranks of the seconds spent waiting for others; `stop` says whether any rank
    was asked to stop; `overflow` tells where fp16 gradients overflowed, if they did and nothing was learned.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    waited_s: float
    stop: bool
    overflow: Overflow | None

    @property
    def skipped(self) -> bool:
        """Whether fp16 gradients overflowed, so that nothing was learned."""
        return self.overflow is not None


class Engine:
    """Trains a GPT on `text`, `config.batch` samples at a time, over the ranks of `comm`."""

    def __init__(
        self, config: TrainConfig, text: Text, precision: str, comm: Communicator, device: torch.device
    ) -> None:
        self.config = config
        self.step_number = 0
        self.precision = precision
        self._text = text
        self._comm = comm
        self.device = device
        self._count, self._size = config.micro_batches(comm.size)
        torch.manual_seed(config.seed)
        self.model = build_gpt(config.model.gpt()).to(device)
        torch.manual_seed(config.seed + 1 + comm.rank)  # dropout differs between ranks
        self.recomputed = self._recompute()
        parallel = config.parallel
        options: dict[str, Any] = {
            "compression": compression_named(parallel.compression),
            "zero": parallel.zero,
            "offload": parallel.offload,
        }
        if precision == "fp16":
            options |= {"scaler": LossScaler(), "diagnose": config.log.diagnose}
        self.replica = parallel_engine.Engine(self.model, comm, watch=True, report=False, **options)
        self._swap(parallel.swap)
        self.optimizer = self.replica.optimizer(build_optimizer(self.model, config.optimizer))
        self.sampler = Sampler(text.train.samples, config.seed)

    @property
    def scaler(self) -> LossScaler:
        """The scale of the loss; 1 unless the precision is fp16."""
        return self.replica.scaler

    def step(self, stop: bool = False) -> StepResult:
        """Train on the next batch; `stop` tells all ranks that this one was asked to stop.

        Raises `FloatingPointError` on all ranks when the training has diverged.
        """
        rate = learning_rate(self.step_number, self.config.steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)

        self.replica.zero_grad()
        loss = self._backward()
        self.replica.synchronize()
        norm = self.replica.gradient_norm()
        mean_loss, waited, stops = self._share(loss, self.replica.waited_s, float(stop))
        self.replica.waited_s = 0.0

        if not math.isfinite(norm) and not self.scaler.enabled:
            raise FloatingPointError(
                f"step {self.step_number + 1}: the gradient is {norm} at a loss of {mean_loss:g}, "
                f"{self.replica.locate_nonfinite()}: the training has diverged; lower "
                f"optimizer.learning_rate={self.config.optimizer.learning_rate:g}"
            )
        self._learn(norm)
        self.step_number += 1
        return StepResult(mean_loss, norm, rate, waited, stops > 0, self.replica.overflow)

    def evaluate(self) -> float:
        """The loss on the validation samples of the configuration, the same ones each time."""
        available = self._text.validation.samples
        wanted = min(self.config.evaluate.samples, available)
        chosen = np.arange(wanted) * available // wanted
        mine = chosen[self._comm.rank :: self._comm.size]
        total = 0.0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(mine), self._size):
                windows = self._text.validation.read(mine[start : start + self._size])
                total += self._loss(torch.from_numpy(windows)).item() * len(windows)
        self.model.train()
        sums = torch.tensor([total, len(mine)], dtype=torch.float64)
        self._comm.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _recompute(self) -> Recomputed:
        """Have the model recompute what the configuration says."""
        asked, budget = self.config.parallel.recompute, self.config.parallel.activation_bytes
        if asked not in ("attention", "auto"):
            return apply_recompute(self.model, asked)
        tokens = torch.zeros(self._size, self.config.model.context, dtype=torch.int64, device=self.device)
        try:
            with autocast(self.precision, self.device):
                return apply_recompute(
                    self.model,
                    asked,
                    example=tokens,
                    loss=lambda logits: next_token_loss(logits, tokens),
                    budget_bytes=budget or None,
                )
        except ValueError as error:
            raise ConfigError(f"parallel.recompute={asked}: {error}") from error

    def _swap(self, place: str) -> None:
        """Have activations wait where the configuration says."""
        if place == "none":
            return
        try:
            self.replica.swap(swap_activations(self.model, place))
        except (ValueError, OffloadError) as error:
            raise ConfigError(f"parallel.swap={place}: {error}") from error

    def _backward(self) -> float:
        """Gradients of this rank's share of the batch; returns its mean loss."""
        samples = self.sampler.next(self.config.batch, self._comm.rank, self._comm.size)
        windows = torch.from_numpy(self._text.train.read(samples))
        total = 0.0
        for index, part in enumerate(windows.split(self._size)):
            last = index == self._count - 1
            with nullcontext() if last else self.replica.no_sync():
                loss = self._loss(part) / self._count if self._count > 1 else self._loss(part)
                self.replica.backward(loss)
            total += loss.item()
        return total

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        windows = windows.to(self.device)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with autocast(self.precision, self.device):
            return next_token_loss(self.model(inputs), targets)

    def _share(self, loss: float, waited: float, stop: float) -> tuple[float, float, float]:
        """The means of `loss` and `waited` over all ranks, and how many of them want to stop."""
        values = torch.tensor([loss, waited, stop], dtype=torch.float64)
        self._comm.all_reduce(values)
        total_loss, total_waited, stops = values.tolist()
        return total_loss / self._comm.size, total_waited / self._comm.size, stops

    def _learn(self, norm: float) -> None:
        """Clip and step; where fp16 gradients overflowed, the optimizer's step changes nothing."""
        factor = min(1.0, self.config.optimizer.clip / (norm + 1e-6))
        if factor < 1.0:
            self.replica.scale_gradients(factor)
        self.optimizer.step()
