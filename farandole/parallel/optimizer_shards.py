"""The tensors that the optimizer updates on this rank: the parameters of a bucket, or shards of their master weights.

    shards.set_gradients(used, norms)     # the optimizer, and functions of PyTorch, find gradients
    shards.clear_gradients()

A shard is an `nn.Parameter`: for each parameter its master weights, or the part of them in this rank's shard of the bucket.  Where the
optimizer updates shards, the `.grad` of the parameters stands for the gradient (`sharded_gradient`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from farandole.parallel.bucket import Bucket
from farandole.parallel.sharded_gradient import GradientNorms, ShardedGradient
from farandole.parallel.weights import FlatWeights


class OptimizerShards:
    """What the optimizer updates of `bucket`.

    Args:
        weights: None where the model and the optimizer share the parameters as they are: with `zero=0` and one type.
        number: of this rank's shard.
        offloaded: whether shards are kept elsewhere between updates; they are then flat.
    """

    def __init__(
        self, bucket: Bucket, weights: FlatWeights | None, number: int, *, offloaded: bool = False
    ) -> None:
        self.bucket, self.weights, self.number = bucket, weights, number
        self.parameters = bucket.parameters
        self.tensors: list[nn.Parameter | None] = [None] * len(self.parameters)
        """For each parameter the tensor that the optimizer updates; None where this rank has no part of it."""
        self.starts = [0] * len(self.parameters)
        """Where the tensor begins in the flattened parameter."""
        self._slices: dict[int, slice] = {}  # of the rank's shard of the bucket
        self._gradients: list[Tensor | None] | None = None
        self._marks: list[ShardedGradient | None] = [None] * len(self.parameters)
        for part in bucket.plan.layout.ranges(number):
            parameter = self.parameters[part.index]
            whole = part.length == parameter.numel() and not offloaded
            self._slices[part.index] = slice(part.offset, part.offset + part.length)
            self.starts[part.index] = part.start
            if weights is not None:
                assert weights.master is not None  # these are trained
                values = weights.master[self._slices[part.index]]
                self.tensors[part.index] = nn.Parameter(values.view(parameter.shape) if whole else values)
        if weights is None:
            self.tensors = list(self.parameters)

    # ---- gradients ----

    @property
    def gradients(self) -> list[Tensor | None]:
        """For each tensor its gradient in the memory of the bucket, whether it was set or not."""
        if self.weights is None:
            return [*self.bucket.gradient_views()]
        if self._gradients is None:
            reduced, tensors = self.bucket.reduced, self.tensors
            self._gradients = [
                None
                if (tensor := tensors[index]) is None
                else reduced[self._slices[index]].view(tensor.shape)
                for index in range(len(tensors))
            ]
        return self._gradients

    def set_gradients(self, used: Sequence[bool], norms: GradientNorms) -> None:
        """Set the `.grad` of tensors whose parameters any rank used, and of no others."""
        names = self.bucket.plan.names
        for index, (parameter, tensor, gradient, anybody) in enumerate(
            zip(self.parameters, self.tensors, self.gradients, used, strict=True)
        ):
            parameter.grad = None
            if self.weights is not None:
                own = gradient if tensor is not None else None
                mark = ShardedGradient(parameter, own, norms, names[index]) if anybody else None
                self._marks[index] = parameter.grad = mark
            if tensor is not None and gradient is not None:
                here = gradient.device == tensor.device
                shown = (
                    gradient if here else tensor.new_zeros(1).expand(tensor.shape)
                )  # a mark, without memory
                tensor.grad = shown if anybody else None

    def set(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, gradient) of the tensors whose gradient is set."""
        if not self.bucket.has_memory:
            return
        for index, (tensor, gradient) in enumerate(zip(self.tensors, self.gradients, strict=True)):
            if tensor is not None and gradient is not None and tensor.grad is not None:
                yield index, gradient

    def clear_gradients(self) -> None:
        """Set every `.grad` to None."""
        for tensor in (*self.parameters, *self.tensors):
            if tensor is not None:
                tensor.grad = None

    def clear(self) -> None:
        """Begin a new step, without gradients."""
        self.bucket.clear()
        for parameter, mark in zip(self.parameters, self._marks, strict=True):
            if mark is not None and parameter.grad is mark:
                parameter.grad = None
        self._marks = [None] * len(self.parameters)
        if not self.bucket.has_memory:
            self._gradients = None

    @property
    def all_cleared(self) -> bool:
        """Whether somebody has cleared all gradients that were set, to begin a new step."""
        gradients = self.gradients
        return all(self._is_cleared(index, gradients[index]) for index in range(len(self.parameters)))

    def resume(self, used: Tensor) -> None:
        """Have a further pass add to the gradients that are set.  `used`, which says of which parameters there were any, is updated."""
        self.bucket.resume()
        for index, gradient in enumerate(self.gradients):
            if self._is_cleared(index, gradient):
                used[index] = 0
                if gradient is not None:
                    gradient.zero_()

    def take_accumulated(self, index: int) -> Tensor:
        """Return the gradient that autograd has accumulated for a parameter."""
        gradient = self.parameters[index].grad
        if isinstance(gradient, ShardedGradient):
            gradient, self.parameters[index].grad = gradient.received, None
        assert gradient is not None  # the hook runs because there is one
        return gradient

    def before_update(self) -> None:
        """Clear the gradients of shards of which the parameters have none any more.

        Raises:
            RuntimeError: for a parameter that was assigned another gradient.
        """
        for index, (parameter, tensor) in enumerate(zip(self.parameters, self.tensors, strict=True)):
            mark = self._marks[index]
            if tensor is None or mark is None or parameter.grad is mark:
                continue
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was assigned a gradient, and the optimizer updates another "
                    f"tensor than it: change gradients through engine.gradients() or engine.scale_gradients(factor)"
                )
            tensor.grad = None

    def move_gradients(self) -> None:
        """Copy gradients to the device of the tensors, if that is another one."""
        for tensor, gradient in zip(self.tensors, self.gradients, strict=True):
            if tensor is not None and gradient is not None and tensor.grad is not None:
                tensor.grad = gradient.to(tensor.device)

    def _is_cleared(self, index: int, gradient: Tensor | None) -> bool:
        """Whether the gradient of a parameter was cleared, or never set."""
        tensor, mark = self.tensors[index], self._marks[index]
        if mark is not None and self.parameters[index].grad is not mark:
            return True
        if tensor is None or gradient is None:
            return mark is None
        same_device = tensor.grad is not None and tensor.grad.device == gradient.device
        return tensor.grad is None or (tensor.grad is not gradient and same_device)

    # ---- values ----

    def values(self, index: int) -> Tensor:
        """Return the values of tensor `index`, in its shape, or flat.

        Offloaded tensors read as NaN; the model then computes with a copy in the shard.
        """
        tensor, weights = self.tensors[index], self.weights
        assert tensor is not None
        if weights is None or weights.master is not None:
            return tensor.detach()
        return weights.shard[self._slices[index]]

    def update_weights(self, tensors: Iterable[nn.Parameter]) -> None:
        """Have the model compute with the values of offloaded `tensors`."""
        assert self.weights is not None
        wanted = {id(tensor) for tensor in tensors}
        for index, part in self._slices.items():
            tensor = self.tensors[index]
            if tensor is not None and id(tensor) in wanted:
                self.weights.shard[part].copy_(tensor.detach().view(-1))

    def place_in(self, shard: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Have the tensors lie in `shard` from now on; return them with the data that they had."""
        before = []
        for index, part in self._slices.items():
            tensor = self.tensors[index]
            assert tensor is not None
            before.append((tensor, tensor.data))
            tensor.data = shard[part].view(tensor.shape)
        return before
