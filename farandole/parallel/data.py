"""Data parallelism: every rank computes with the whole model on its own samples; gradients are averaged.

One engine for all stages of ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models").  What a rank keeps after a backward pass is the only difference: all gradients, and an optimizer
for all parameters (`zero=0`), or its shard of them.  Where what lives is told by `weights` and `gradients`.

Gradients are reduced while the backward pass goes on (`reduction`).

    replica = DataParallel(model, comm, zero=2)
    optimizer = replica.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    with replica.no_sync():
        loss(replica(first)).backward()     # accumulates
    loss(replica(second)).backward()        # buckets are reduced as they fill, and the last when it returns
    replica.clip(1.0)
    optimizer.step()                        # this rank's shard; then all ranks have the new weights
    optimizer.zero_grad()

Each rank's loss is a mean over its own samples; when all ranks have equally many, the gradient is the one of a
single process with all samples (times the number of backward passes, as always in accumulation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.memory.swap import Swap
from farandole.parallel.buckets import total_norm
from farandole.parallel.building import Builder
from farandole.parallel.casting import cast_floating
from farandole.parallel.deferred import Initialise, fill_model, is_deferred, stand_in
from farandole.parallel.gathering import GatheredWeights
from farandole.parallel.hybrid import divide
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.nonfinite import GradientWatch, NonFinite, OutputWatch
from farandole.parallel.offloading import OffloadedUpdate, home_at, rooms_at
from farandole.parallel.optimizer_probe import state_of_part, why_not_elementwise
from farandole.parallel.reduction import Reduction
from farandole.parallel.rounding import StochasticRounding
from farandole.parallel.starting import start_equal
from farandole.parallel.weights import Masters
from farandole.parallel.whole_parameters import WholeParameters
from farandole.plan import Offloaded

BUCKET_BYTES = 4 << 20


class DataParallel(Reduction):
    """Keeps the gradients of `model` equal on all ranks of `comm`.

    At construction the parameters and buffers of rank 0 are copied to all ranks.  Frozen parameters get no
    gradient, tied ones are reduced once.  A parameter without a gradient on some ranks counts as zero there;
    without one on all ranks, its `.grad` stays None.  With one rank nothing is communicated.

    With `zero` >= 1 an optimizer updates pieces of the parameters: `optimizer` gives it those.  The gradients are then
    those of the pieces, and the parameters' own `.grad` is None.  Ranks that share memory have one copy of the
    weights between them.  With `hybrid` the ranks of each host divide what is divided, and hosts have a copy each.

    With `dtype` (bf16, fp16) the model computes with weights of that type, while the
    optimizer updates masters of the type that they had, with gradients of that type.  With `offload` ("host",
    "disk:FOLDER") masters and states of the optimizer are kept there, and pass through memory in its step; on a disk
    also gradients, with `zero` >= 2, or weights too, with `zero=3`, if `offloaded` says so.  With bf16
    and a `rounding` there are no masters but in the update, and `pieces` read as NaN between updates.

    A `compression` (`Int8()`, ...) is for what crosses hosts, with `zero=0`; gradients are then no longer those of
    one process, but with error feedback what a step misses comes in later ones.  Raises TypeError or ValueError
    where they cannot be compressed.

    A model on the meta device is made where ranks keep its parts, block by block, by `initialise` (`deferred`).

    With `watch` every rank looks at its own gradients before they are averaged, so that `locate_nonfinite` can tell
    whose were not finite; it costs one pass over a bucket that has just been filled.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        *,
        zero: int = 0,
        hybrid: bool = False,
        dtype: torch.dtype | None = None,
        offload: str = "none",
        offloaded: Offloaded = "optimizer",
        initialise: Initialise | None = None,
        watch: bool = False,
        rounding: StochasticRounding | None = None,
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={zero}: the stages are 0, 1, 2 and 3")
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(
                f"compression={compression!r}: a Compression (Cast, Int8, TopK, PowerSGD), or None"
            )
        if compression is not None and zero:
            raise ValueError(f"compression and zero={zero}: gradients are compressed with zero=0 only")
        if rounding is not None and offload != "none":
            raise ValueError("stochastic rounding and offload: there are no masters to keep elsewhere")
        if rounding is not None and dtype is not torch.bfloat16:
            raise ValueError(f"stochastic rounding with dtype={dtype}: it is for torch.bfloat16")
        super().__init__(comm, zero)
        self.model = model
        self.rounding = rounding
        self.scaler = LossScaler(enabled=False)  # for loops that train in any precision
        self._dtype = dtype
        self._offload = offload
        self.offloaded: list[OffloadedUpdate] = []
        self.swapped: Swap | None = None
        if is_deferred(model) != (initialise is not None):
            raise ValueError(
                "initialise= fills the blocks of a model that is on the meta device: both are needed, or neither"
            )
        types: dict[int, torch.dtype] = {}
        if initialise is None:
            start_equal(model, comm)
        else:
            types = stand_in(model, torch.get_default_device())
        masters: Masters = "none" if rounding is not None else "beside" if offload == "none" else "offloaded"
        division = divide(comm, hybrid=hybrid)
        self._shards = division.shards
        built = Builder(
            division.shards,
            bucket_bytes,
            compression,
            zero,
            dtype,
            self._settle,
            masters=masters,
            replicas=division.replicas,
            rooms=rooms_at(
                offload, offloaded, division.shards, accelerator=any(p.is_cuda for p in model.parameters())
            ),
        ).build(model)
        self.buckets, self._weights = built.buckets, built.weights
        if initialise is not None:
            fill_model(model, built.weights, comm, initialise, types)
        gathering = built.gathering
        self._whole = WholeParameters(
            model, built.weights, comm, lambda: gathering is None or gathering.is_whole
        )
        self._shares_weights = any(bucket.weights and bucket.weights.common for bucket in self.buckets)
        self._follow(
            built.buckets,
            GradientWatch(model, built.buckets) if watch else None,
            built.gathering,
            crosses=division.replicas is not None,
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model makes of the inputs, cast to its type where they are floating."""
        if self._reduced and self._all_taken():
            self._begin_step()  # activations get the memory of gradients
        if self._dtype is not None:
            inputs, named = cast_floating((inputs, named), self._dtype)
        return self.model(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, for loops that train in any precision."""
        loss.backward()

    # ---- the optimizer ----

    @property
    def skipped(self) -> bool:
        """Whether the optimizer's last step was skipped: only where the loss is scaled (`ScaledDataParallel`)."""
        return False

    def pieces(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """(parameter, piece, start): what this rank updates, and where it begins in the flattened parameter."""
        for bucket in self.buckets:
            for parameter, piece, start in zip(bucket.parameters, bucket.pieces, bucket.starts, strict=True):
                if piece is not None:
                    yield parameter, piece, start

    def piece_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(piece, values): the values of each piece, flat, in the order of `pieces`."""
        for bucket in self.buckets:
            for index, piece in enumerate(bucket.pieces):
                if piece is not None:
                    yield piece, bucket.values_of_piece(index)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have `optimizer`, made for the model's parameters, update this rank's pieces of them; returns it.

        Where ranks divide or offload parameters the optimizer has to treat every element by itself, as SGD, Adam, AdamW and their
        like do.  If it has a state, all ranks have the same.  Its `step` then begins with all ranks' gradients and
        ends with all ranks' new weights; of a closure it gets the mean over ranks.

        With offload this is where its masters and states move: all ranks call it together.

        Raises ValueError for an optimizer that cannot update pieces, or has parameters of another model, and
        `OffloadError` where there is no room for them.
        """
        before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self.model.parameters()}
        if any(id(parameter) not in known for parameter in before):
            raise ValueError(
                "the optimizer has parameters that are not the model's: make it from model.parameters()"
            )
        self._check_optimizer(optimizer)
        pieces = {id(parameter): (piece, start) for parameter, piece, start in self.pieces()}
        for group in optimizer.param_groups:
            group["params"] = [pieces[id(p)][0] for p in group["params"] if id(p) in pieces]
        for name, value in vars(optimizer).items():  # LBFGS keeps a list of its own
            if isinstance(value, list) and value and all(id(each) in known for each in value):
                setattr(optimizer, name, [pieces[id(p)][0] for p in value if id(p) in pieces])
        for parameter in list(optimizer.state):
            piece, start = pieces.get(id(parameter), (parameter, 0))
            if piece is not parameter or id(parameter) not in pieces:
                state = optimizer.state.pop(parameter)
                if id(parameter) in pieces:
                    optimizer.state[piece] = state_of_part(state, parameter, piece, start)
        if self._offload == "none":
            if self.rounding is not None:
                self.rounding.drive(optimizer, self.buckets)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self._after_update())
        else:
            home = home_at(self._offload, self._comm, pinned=self._used.is_cuda)
            update = OffloadedUpdate(optimizer, self.buckets, home, self._before_update, self._after_update)
            self.offloaded.append(update)
            if update.state.weights:
                self._whole.masters_are_elsewhere()
        _clear_parameters_too(optimizer, before)
        return optimizer

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot update the pieces that this engine has."""
        name = type(optimizer).__name__
        if self._offload != "none" and optimizer.state:
            raise ValueError(
                f"{name} has a state, and with offload={self._offload!r} states begin where they are kept: give the optimizer here "
                f"before its first step"
            )
        divided = self.zero and self._shards.size > 1
        if not divided and self._offload == "none" and self.rounding is None:
            return
        if reason := why_not_elementwise(optimizer):
            how = (
                f"zero={self.zero}"
                if divided
                else "offload"
                if self.rounding is None
                else "stochastic rounding"
            )
            raise ValueError(
                f"{name} cannot be used with {how}, where each rank updates shards of parameters: {reason}; use zero=0 without offload, or "
                f"an optimizer that updates each element by itself, as AdamW does"
            )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args begin with the optimizer
        if closure is None:
            self._before_update()
            return None

        def averaged() -> Any:
            """The closure over all ranks: it computes with published weights, and leaves averaged gradients."""
            self._after_update()
            loss = closure()
            self._before_update()
            if loss is None:
                return None
            mean = torch.as_tensor(loss).detach().double().clone()
            if self._comm.size > 1:
                self._comm.all_reduce(mean, "avg")
            return mean

        return (optimizer, averaged), {}

    def publish(self) -> None:
        """Give all ranks' models what optimizers have made of their pieces.  Optimizers do it themselves."""
        if self._gathering is not None:
            self._gathering.forget()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.weights is not None:
                    bucket.weights.publish()
        if self._shares_weights:
            self._shards.barrier()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it each rank can compute with the model by itself.  It begins and ends on all ranks together."""
        with self._gathering.whole() if self._gathering is not None else nullcontext():
            yield

    def edit_parameters(self) -> AbstractContextManager[None]:
        """Within it, under `torch.no_grad()`, all ranks may change the model's parameters in place, alike.

        The parameters are whole, and the optimizer goes on from the new values.  Each rank needs memory for all of them.

        Raises RuntimeError where the masters are offloaded.
        """
        self._forget_gathered()
        return self._whole.edit()

    def state_dict(self) -> dict[str, Any]:
        """The state of the model with the whole values of all parameters, in memory of its own.  All ranks call it.

        Parameters have the type in which the optimizer updates them; where it is offloaded, the one that the model computes
        with.  `model.load_state_dict` takes it.
        """
        self._forget_gathered()
        return self._whole.state_dict()

    def _forget_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.forget()

    def whole_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its whole value, some at a time: all ranks go through them together."""
        gathered: set[int] = set()
        for weights in self._weights:
            if isinstance(weights, GatheredWeights):
                weights.use()
                yield from ((parameter, parameter.detach()) for parameter in weights.parameters)
                weights.forget()
                gathered.update(id(parameter) for parameter in weights.parameters)
        for parameter in self.model.parameters():
            if id(parameter) not in gathered:
                yield parameter, parameter.detach()

    def _before_update(self) -> None:
        self.synchronize()
        self._forget_gathered()
        self._whole.check(self._name)
        for bucket in self.buckets:
            bucket.before_update()
        if self._shares_weights:  # nobody may read weights any more
            self._shards.barrier()

    def _after_update(self) -> None:
        self.publish()
        if self._buffers_changed:
            self._average_buffers()

    def _average_buffers(self) -> None:
        """Have all ranks go on with the mean of buffers such as the statistics of BatchNorm."""
        buffers = self._floating_buffers()
        kinds = {(buffer.dtype, buffer.device): 0 for buffer in buffers}
        for kind in kinds:
            members = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == kind]
            with torch.no_grad():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in members])
                self._comm.all_reduce(flat, "avg")
                for buffer, mean in zip(members, flat.split([b.numel() for b in members]), strict=True):
                    buffer.copy_(mean.view(buffer.shape))
        self._remember_buffers()

    # ---- gradients ----

    def gradients(self) -> list[Tensor]:
        """What this rank has of the averaged gradients."""
        return [share for _, share in self._shares()]

    def gradient_norm(self) -> float:
        """The global norm: over all parameters, of the averaged gradients.  The same on all ranks."""
        norm = total_norm(self.gradients())
        if self.zero == 0 or self._shards.size == 1:
            return norm
        square = torch.tensor(norm, dtype=torch.float64) ** 2
        self._shards.all_reduce(square)
        return float(square.sqrt())

    def locate_nonfinite(self, outputs: OutputWatch | None = None) -> NonFinite:
        """Where gradients whose norm is not finite come from.  All ranks call it, before the update.

        Raises RuntimeError without `watch`.
        """
        if self._watch is None:
            raise RuntimeError("gradients are not watched: make DataParallel with watch=True")
        return self._watch.locate(self._comm, outputs)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for bucket in self.buckets:
            if bucket.gradients.held:
                bucket.gradients.reduced.mul_(factor)

    def clip(self, max_norm: float) -> float:
        """Shrink the gradients so that their global norm is at most `max_norm`; returns what it was."""
        norm = self.gradient_norm()
        if norm > max_norm:
            self.scale_gradients(max_norm / norm)
        return norm

    def zero_grad(self) -> None:
        """Start the next step: every gradient is None.  An optimizer's own `zero_grad` does as well."""
        self._in_pass = False
        self._begin_step()
        for bucket in self.buckets:
            bucket.take_away()

    # ---- compression ----

    def compression_state(self) -> dict[str, Tensor]:
        """What compression remembers on this rank, by name, for a checkpoint; `load_compression` goes on from it."""
        return {
            f"{number}.{name}": value
            for number, bucket in enumerate(self.buckets)
            if bucket.gradients.compressor is not None
            for name, value in bucket.gradients.compressor.state.items()
        }

    def load_compression(self, state: Mapping[str, Tensor]) -> None:
        """Remember what this rank did when `state` was saved."""
        for number, bucket in enumerate(self.buckets):
            if bucket.gradients.compressor is not None:
                own = f"{number}."
                bucket.gradients.compressor.load(
                    {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
                )

    def rescale(self, factor: float) -> None:
        """Gradients are from now on `factor` times as large, as the loss is: so is what compression remembers."""
        for bucket in self.buckets:
            if bucket.gradients.compressor is not None:
                bucket.gradients.compressor.scale_residuals(factor)

    def swap(self, swap: Swap) -> None:
        """Take over a swap of the model's activations: `close` ends it."""
        self.swapped = swap
        if self._gathering is not None:
            self._gathering.keep_others(swap.pack, swap.unpack)

    def close(self) -> None:
        """Let go of the model: remove the hooks and the gradients."""
        self._unfollow()
        if self.swapped is not None:
            self.swapped.close()
        if self._gathering is not None:
            self._gathering.close()
        self._whole.close()
        for update in self.offloaded:
            update.close()
        self.zero_grad()


def _clear_parameters_too(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Have `zero_grad` of an optimizer, which knows pieces, clear the `.grad` of the parameters, too."""
    plain = type(optimizer).zero_grad

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        plain(self, set_to_none)
        if set_to_none:
            for parameter in parameters:
                parameter.grad = None

    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
