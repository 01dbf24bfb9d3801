"""Provide `hvd.callbacks`, the Keras callbacks for distributed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from farandole.horovod.basics import rank, size
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.functions import broadcast_variables, tf_variable
from farandole.horovod.tensorflow.operations import grouped_allreduce, on_host


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the model weights and the optimizer state when training begins.

    If the model is not yet built when training begins, the broadcast happens after the first batch.  Dropout seeds are
    not broadcast.

    Args:
        root_rank: The rank to copy from.
        device: An empty string or the name of a CPU device.
        local_variables: A weight or a list of weights to exclude from the broadcast.
        process_set: The participating ranks.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        on_host(device)
        if not isinstance(local_variables, (list, tuple)):
            local_variables = [] if local_variables is None else [local_variables]
        self._local = {id(tf_variable(variable)) for variable in local_variables}
        self.root_rank = root_rank
        self.broadcast_done = False
        self._process_set = process_set

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables if the model is built."""
        optimizer = self.model.optimizer
        if self.model.built:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables after the first batch if the model was not built when training began."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done:
            variables = [*self.model.weights, *self.model.optimizer.variables]
            shared = [each for each in variables if id(tf_variable(each)) not in self._local]
            broadcast_variables(shared, self.root_rank, self._process_set)
            self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the epoch metrics across ranks.

    The Keras history and later callbacks in the list receive the averages.

    Args:
        device: An empty string or the name of a CPU device.
        process_set: The participating ranks.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        on_host(device)
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace each scalar in `logs` with its average across ranks.  All ranks must have the same metric names."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if logs is None or not names:
            return
        values = [tf.constant(float(logs[name]), tf.float64) for name in names]
        # the request name contains the metric names, so that requests with different metrics do not match
        request = f"MetricAverageCallback.{'.'.join(names)}"
        averages = grouped_allreduce(values, name=request, process_set=self._process_set)
        logs.update({name: float(average) for name, average in zip(names, averages, strict=True)})


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier.

    Args:
        initial_lr: The learning rate for a multiplier of 1.
        multiplier: A function that maps the epoch to the multiplier.  A number m selects the multiplier m ** epoch.
        start_epoch: The first epoch in which this callback sets the learning rate.
        end_epoch: The first epoch in which this callback no longer sets the learning rate, or None for no limit.
        staircase: Whether to set the learning rate once per epoch.  Otherwise the callback sets the learning rate for
            each batch, based on the fractional epoch.
        momentum_correction: Whether to scale SGD velocities by the same factor as the learning rate (Goyal et al.,
            2017, "Accurate, Large Minibatch SGD", section 3).
        steps_per_epoch: The number of batches per epoch.  Required if `staircase` is False and Keras cannot determine
            this number.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else _power(multiplier)
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determine the number of steps per epoch, which is required if `staircase` is False.

        Raises:
            ValueError: if the number is required, but neither the caller nor Keras has set it.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}()"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Store the current epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate at every batch, or only at the first batch of each epoch if `staircase` is True."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None  # set by on_train_begin
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Store the learning rate in `logs["lr"]`."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), float(self.initial_lr * self.multiplier(epoch))
        optimizer.learning_rate = after
        if self.momentum_correction and getattr(optimizer, "momentum", None) and before and before != after:
            for velocity in getattr(optimizer, "momentums", []):
                velocity.assign(velocity * (after / before))


def _power(base: float) -> Callable[[float], float]:
    return lambda epoch: base**epoch


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate with each batch, from `initial_lr` / size() to `initial_lr`.

    Args:
        initial_lr: The learning rate after the warmup, usually size() times the learning rate of one process.
        warmup_epochs: The number of warmup epochs.
        momentum_correction: Whether to scale SGD velocities by the same factor as the learning rate.
        steps_per_epoch: The number of batches per epoch.  Required if Keras cannot determine this number.
        verbose: Whether rank 0 prints a message after the warmup.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None  # set by on_train_begin
            # the progress includes the current batch, so that the last warmup batch reaches initial_lr
            progress = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 + progress * (size() - 1)) / size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Store the learning rate in `logs["lr"]`.  If `verbose` is set, rank 0 prints a message after the warmup."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            message = f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}."
            print(message)  # noqa: T201 - `verbose` asks for this output, as in Keras and Horovod


__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
