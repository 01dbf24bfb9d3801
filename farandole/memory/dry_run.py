"""Dry runs of a model on fake tensors: saved bytes, recomputed operations and attention modules.

    model = build_gpt(config)                             # or under torch.device("meta"), without allocations
    kept = saved_bytes(model, tokens, loss=lambda logits: next_token_loss(logits, targets))
    kept.total, kept.blocks["1"], kept.outside

A fake tensor has a shape but no data.  A dry run allocates no memory for tensors, but autograd saves the same tensors
as in a real pass.  PyTorch's FakeTensor follows the code paths of a real device.  The meta device does not: for
example, its attention is unfused.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from farandole.memory.blocks import blocks_of
from farandole.memory.call_wrappers import unwrap_calls, wrap_calls
from farandole.memory.recompute_wrapper import FUSED_ATTENTION, observe_kept, recomputed_module
from farandole.models.chunks import repetitions

aten = torch.ops.aten

_SOFTMAX = frozenset({aten._softmax, aten._safe_softmax, aten.logsumexp})
"""The operators that normalize attention scores.

Ring attention (`parallel.context`) uses `logsumexp`.
"""

_BATCHED_PRODUCTS = frozenset({aten.bmm, aten.baddbmm})
"""The operators that compute the scores of unfused attention."""

_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
"""Maps in-place products, which torch's `FlopCounterMode` does not count, to the equivalent out-of-place products."""

_CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""The types of attributes whose items are restored after a dry run; subclasses may be read-only."""

OUTSIDE = None
"""The key for tensors that are saved outside blocks."""


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which to call a model on `example`.

    The items of a tuple or list become positional arguments, and the entries of a dict become keyword arguments.  Any
    other object is the only argument.
    """
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


def device_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Return the device for a dry run: by default the model's device, or the CPU for a model on the meta device.

    Raises:
        ValueError: if this machine cannot simulate the device.
    """
    if device is not None:
        wanted = torch.device(device)
    else:
        first = next(iter(model.parameters()), None)
        wanted = torch.device("cpu") if first is None or first.device.type == "meta" else first.device
    if wanted.type == "meta":
        raise ValueError(
            "device='meta': expected a device with kernels that determine the saved tensors; use device='cpu' or 'cuda'"
        )
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(wanted)!r}: PyTorch can simulate a CUDA device only if this machine has one; "
            "use device='cpu', whose result is similar"
        )
    return wanted


@contextmanager
def fake_model(
    model: nn.Module, example: Any, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[Any]:
    """Replace the tensors of `model` with fake tensors on `device`; yield `example` as fake tensors.

    If `dtype` is given, all floating-point tensors have this dtype.  Real parameters, buffers, gradients and random
    generator states do not change.  When the context exits, the modules have their previous attributes again.  No other
    thread may use the model inside the context.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins: dict[int, Tensor] = {}

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

    with mode, _restored_attributes(model):
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for owned in both:
                owned.update({name: twin(tensor) for name, tensor in owned.items() if tensor is not None})
        yield tree_map_only(Tensor, twin, example)


@contextmanager
def _restored_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules when the context exits, and the items of dicts, lists and sets in them."""
    containers: list[Any] = [vars(module) for module in model.modules()]
    # parameters and buffers are items of dicts, and forward passes may also cache tensors in containers
    containers += [
        value for attributes in containers for value in attributes.values() if type(value) in _CONTAINERS
    ]
    before = [(container, copy.copy(container)) for container in containers]
    try:
        yield
    finally:
        for container, items in before:
            container.clear()
            if isinstance(container, list):
                container.extend(items)
            else:
                container.update(items)


# ---- bytes saved for the backward pass ----


@dataclass(frozen=True)
class SavedBytes:
    """The number of bytes saved for the backward pass.

    `blocks` maps each block's name to the bytes that the block saves.  `outside` is the number of bytes saved outside
    blocks, including bytes saved by the loss.
    """

    blocks: dict[str, int]
    outside: int

    @property
    def total(self) -> int:
        """The number of bytes saved inside and outside blocks."""
        return sum(self.blocks.values()) + self.outside


def saved_bytes(
    model: nn.Module,
    example: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    real: bool = False,
) -> SavedBytes:
    """Count the bytes that `model(example)` saves for backward, in the current train/eval mode and autocast context.

    The result includes tensors saved by autograd and by recomputation, but not parameters, buffers or the example.
    Memory shared by several views counts once, for the block that saves it first.  Tensors that a custom
    `autograd.Function` stores as attributes of `ctx`, or that the model itself stores, are not detected.

    Args:
        example: one tensor, a tuple of arguments or a dict of keyword arguments; if the model is on the meta device,
            the example must also be on the meta device.
        loss: a function of the model's output; tensors that it saves also count.
        device: the device of the fake tensors; by default the model's device, or the CPU for a model on the meta
            device.
        dtype: the dtype of all floating-point tensors; by default, tensors keep their dtypes.
        real: run a forward pass with the real tensors, then restore buffers and random states.  A model whose control
            flow depends on values (`.item()`) requires this option.

    Raises:
        ValueError: if this machine cannot simulate the device, or `real` is combined with `device` or `dtype`.
    """
    if real:
        if device is not None or dtype is not None:
            raise ValueError(
                f"device={device!r} and dtype={dtype} apply to fake tensors only; omit them with real=True"
            )
        with _undone(model):
            return _measured(model, example, loss)
    with fake_model(model, example, device_of(model, device), dtype) as fake_example:
        return _measured(model, fake_example, loss)


class _InBlock:
    """Pushes the name of a block onto `stack` while the block runs."""

    def __init__(self, name: str, stack: list[str | None]) -> None:
        self.name, self.stack = name, stack

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stack.append(self.name)
        try:
            return call(*args, **kwargs)
        finally:
            self.stack.pop()


def _measured(model: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None) -> SavedBytes:
    names = [name for name, _ in blocks_of(model)]
    stack: list[str | None] = [OUTSIDE]
    not_counted = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(example))
        if isinstance(tensor, Tensor)
    }
    found: dict[int, tuple[weakref.ref[torch.UntypedStorage], str | None]] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = found.get(storage._cdata)
        gone = known is not None and known[0]() is None  # another storage has this address
        if storage._cdata not in not_counted and (known is None or gone):
            found[storage._cdata] = (weakref.ref(storage), stack[-1])

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor.detach()  # an output would keep its graph alive

    args, kwargs = call_arguments(example)
    with ExitStack() as undo:
        for name, block in blocks_of(model):
            wrapper = _InBlock(name, stack)
            wrap_calls(block, wrapper)
            undo.callback(unwrap_calls, block, wrapper)
        undo.enter_context(observe_kept(note))
        undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        undo.enter_context(torch.enable_grad())
        output = model(*args, **kwargs)
        if loss is not None:
            output = loss(output)
    graph = [one.grad_fn for one in tree_leaves(output) if isinstance(one, Tensor)]
    del output
    kept: Counter[str | None] = Counter()
    for reference, block_name in found.values():
        storage = reference()
        if storage is not None:
            kept[block_name] += storage.nbytes()
    del graph
    return SavedBytes(blocks={name: kept[name] for name in names}, outside=kept[OUTSIDE])


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers (running statistics) and random generators when the context exits."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices), _restored_attributes(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


# ---- operations ----


def flops_of(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the number of floating-point operations in one call to the operator `kind`.

    Only matrix products, convolutions and attention count; the result for other operators is 0.  The result equals the
    count of torch's `FlopCounterMode` if that class supports the operator.  In-place products and fused CPU attention
    also count.  Fused CPU attention counts as two products in the forward pass, and as five products in the backward
    pass, which recomputes the scores (Dao et al., 2022, "FlashAttention").
    """
    if kind in FUSED_ATTENTION:
        return _attention_flops(args[0], args[1], args[2], score_products=1, value_products=1)
    if kind is _CPU_ATTENTION_BACKWARD:
        return _attention_flops(args[1], args[2], args[3], score_products=3, value_products=2)
    kind = _IN_PLACE.get(kind, kind)
    if kind in flop_registry:
        return int(flop_registry[kind](*args, **kwargs, out_val=output))
    return 0


def _attention_flops(query: Any, key: Any, value: Any, score_products: int, value_products: int) -> int:
    """Count the operations of `score_products` query-key products and `value_products` score-value products."""
    scores = 2 * query[..., 0].numel() * key.shape[-2]
    return int(scores * (score_products * query.shape[-1] + value_products * value.shape[-1]))


def recomputed_flops(model: nn.Module, example: Any, dtype: torch.dtype | None = None) -> Counter[str]:
    """Return the number of recomputed operations per module name, as counted by `flops_of`.

    This function runs one forward and backward pass of `model(example)` on fake tensors.  The pass also records the
    points at which later recomputations can stop early.  `dtype` has the same meaning as in `fake_model`.
    """
    counting = _CountRecomputed()
    with fake_model(model, example, device_of(model), dtype) as fake, torch.enable_grad(), counting:
        args, kwargs = call_arguments(fake)
        results = [one for one in tree_leaves(model(*args, **kwargs)) if isinstance(one, Tensor)]
        trained = [one for one in results if one.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(one) for one in trained])
    return counting.flops


class _CountRecomputed(TorchDispatchMode):
    """A dispatch mode that counts recomputed operations per module."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = recomputed_module()
        if name is not None:
            self.flops[name] += repetitions() * flops_of(func.overloadpacket, args, kwargs, output)
        return output


# ---- modules that compute attention ----


def attention_modules(
    model: nn.Module, example: Any, dtype: torch.dtype | None = None
) -> list[tuple[str, nn.Module]]:
    """Return a pair (name, module) for each module that computes attention itself, not in a submodule.

    Such a module calls torch's scaled dot-product attention, or batched matrix products and a softmax.  The softmax may
    be a submodule.  `dtype` has the same meaning as in `fake_model`.
    """
    finder = _AttentionFinder()
    with ExitStack() as undo:
        for module in dict.fromkeys(model.modules()):
            wrap_calls(module, finder)
            undo.callback(unwrap_calls, module, finder)
        args, kwargs = call_arguments(undo.enter_context(fake_model(model, example, device_of(model), dtype)))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(finder)
        model(*args, **kwargs)
    return [(name, module) for name, module in model.named_modules() if module in finder.found]


class _AttentionFinder(TorchDispatchMode):
    """Records the operations of each running module call, and collects attention modules in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[nn.Module] = []
        self.calls: list[set[str]] = [set()]

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls.append(set())
        try:
            return call(*args, **kwargs)
        finally:
            kinds = self.calls.pop()
            if "fused" in kinds or {"products", "softmax"} <= kinds:
                self.found.append(module)
            else:
                self.calls[-1] |= kinds & {"softmax"}  # the softmax may be a separate module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kinds = {"fused": FUSED_ATTENTION, "products": _BATCHED_PRODUCTS, "softmax": _SOFTMAX}
        self.calls[-1].update(kind for kind, operations in kinds.items() if func.overloadpacket in operations)
        return func(*args, **(kwargs or {}))
