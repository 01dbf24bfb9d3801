"""The optimizer for op=Adasum, which combines what each rank's optimizer would change.

Adasum is meant for updates, not for gradients: each rank steps with its own gradients, and the changes that its step
makes are combined (Maleki et al., 2020, section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.torch.asynchronous import Adasum, allreduce_async_, reduction, synchronize
from farandole.horovod.torch.compression import Compressor
from farandole.horovod.torch.naming import name_parameters


class DistributedAdasumOptimizer(torch.optim.Optimizer):
    """What is mixed into the class of the optimizer that is wrapped; made by `DistributedOptimizer(op=Adasum)`."""

    def _prepare(
        self,
        named_parameters: Any,
        compression: type[Compressor],
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        self._compression = compression
        self._process_set = process_set
        self._included = process_set.included()
        self._names = [
            (parameter, name)
            for parameter, name in name_parameters(self.param_groups, named_parameters)
            if parameter.requires_grad
        ]
        reduction(Adasum, None, process_set, [parameter for parameter, _ in self._names])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes come before each `step`: as many as are run, as nothing happens before it."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Without effect: changes are combined in `step`."""

    def skip_synchronize(self) -> NoReturn:
        """AssertionError: there is no step without synchronization."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, and replace the change by the combination of all ranks' changes."""
        before = [parameter.clone() for parameter, _ in self._names]
        loss = super().step(closure)
        if not self._included:
            return loss
        waiting: list[tuple[Tensor, Tensor, int, Any]] = []
        for (parameter, name), start in zip(self._names, before, strict=True):
            narrow, context = self._compression.compress(parameter - start)
            handle = allreduce_async_(narrow, name=name, op=Adasum, process_set=self._process_set)
            waiting.append((parameter, start, handle, context))
        for parameter, start, handle, context in waiting:
            parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        return loss
