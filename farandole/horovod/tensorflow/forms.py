"""What the operations have in common: their inputs, the forms of their outputs, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from farandole.horovod.tensorflow import bridge

Gradient = Callable[..., Any]


def as_tensors(values: Any, kind: str, name: str | None) -> list[tf.Tensor]:
    """The tensors of a grouped operation; ValueError if there are none, or their types are not communicated."""
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"grouped_{kind} takes a list of at least one tensor, not {values!r}")
    tensors = [tf.convert_to_tensor(value) for value in values]
    for tensor in tensors:
        bridge.check_type(tensor.dtype, name)
    return tensors


def like(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Of the types and shapes of tensors."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def any_rows(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Of their shapes but for the first dimension."""
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(
                "this operation works along the first dimension of a tensor, and a scalar has none"
            )
    return [
        tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else None, tensor.dtype)
        for tensor in tensors
    ]


def gradient_name(name: str | None) -> str | None:
    """What a named operation's backward pass is called; ranks may run their backward passes in different orders."""
    return None if name is None else f"{name}.gradient"


def differentiable(
    function: Callable[..., list[tf.Tensor]], gradient: Gradient, inputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Outputs of a function of tensors, with `gradient` from the gradients of the outputs to those of the inputs."""

    @tf.custom_gradient
    def forward(*tensors: tf.Tensor) -> Any:
        outputs = function(*tensors)
        return outputs, lambda *gradients: gradient(tensors, gradients)

    return list(forward(*inputs))


def on_host(device: str) -> None:
    """ValueError for a device on which operations would not run: they run where torch's tensors are, on the host."""
    if device and "cpu" not in device.lower():
        raise ValueError(f"device {device!r} is not supported: operations run on the host; leave it out")
