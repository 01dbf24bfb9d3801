"""A model for a moment without memory: its parameters become fake tensors, which have a shape and no data.

A forward pass then runs the kernels' shape functions only, in no time worth speaking of and without an allocation, and
autograd saves what it would save: torch's FakeTensor follows the same code paths as the device that it stands for,
which the meta device does not (its attention, for one, is the written-out one).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `example` stands for: a tuple's or list's members, a dict's keywords, else itself."""
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


def device_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where `model` is to be thought: `device`, else where it is, else (meta, no parameters) the host.

    Raises ValueError for a device that this machine cannot even pretend to have.
    """
    if device is not None:
        wanted = torch.device(device)
    else:
        first = next(iter(model.parameters()), None)
        wanted = torch.device("cpu") if first is None or first.device.type == "meta" else first.device
    if wanted.type == "meta":
        raise ValueError(
            "device='meta': what is saved depends on a device's kernels; give device='cpu' or 'cuda'"
        )
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(wanted)!r}: this machine has no CUDA device, without which torch cannot follow its "
            "kernels; device='cpu' works here and differs little"
        )
    return wanted


@contextmanager
def faked(
    model: nn.Module, example: Any, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[Any]:
    """Within it, `model` is made of fake tensors on `device`; yields `example` made of such.

    With a `dtype` all that is floating is of that type.

    Its real parameters and buffers, gradients and the states of random generators are untouched.  Not for
    a model that another thread uses meanwhile.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], str, Tensor]] = []

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            fake: Tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            twins[id(tensor)] = fake
        return twins[id(tensor)]

    with mode:
        try:
            for module in model.modules():
                both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for owned in both:
                    for name, tensor in owned.items():
                        if tensor is not None:
                            originals.append((owned, name, tensor))
                            owned[name] = twin(tensor)
            yield tree_map_only(Tensor, twin, example)
        finally:
            for owned, name, tensor in originals:
                owned[name] = tensor
