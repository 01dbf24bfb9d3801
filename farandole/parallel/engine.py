"""The engine: a model under a plan, its steps, clipping, optimizers and states.

Every rank computes with the whole model on its own samples.  One engine serves all stages of ZeRO (Rajbhandari et al., 2020, "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models"); they differ in what a rank keeps after a backward pass: all
gradients, and an optimizer for all parameters (`zero=0`), or its shard of them (`weights`, `gradients`).

    engine = farandole.parallelize(model, Plan(zero=2))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    step = engine.forward_backward(micro_batches, loss)     # loss(output, batch) -> (sum, count)
    engine.clip(1.0)
    optimizer.step()                        # this rank's shard; then all ranks have the new weights
    optimizer.zero_grad()
    engine.save(folder, extra={"step": n})

or, in a loop of one's own,

    with engine.no_sync():
        loss(engine(first)).backward()      # accumulates
    loss(engine(second)).backward()         # buckets are reduced as they fill, and the last when it returns

where each rank's loss is a mean over its own samples.  When all ranks have equally many, the gradient is that of a single
process with all samples, times the number of backward passes, as always in accumulation.

How a pipeline fits in: `forward_backward` owns the order of forward passes, backward passes and reductions.  A schedule of
micro-batches takes the place of its loop; the reducer needs one signal per step, after the last backward pass of a parameter
(`GradientReducer.end_pass`), and the counts come from the ranks of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.memory.swap import Swap
from farandole.parallel import checkpoint
from farandole.parallel.buckets import total_norm
from farandole.parallel.building import Builder
from farandole.parallel.casting import cast_floating
from farandole.parallel.data import GradientReducer
from farandole.parallel.deferred import Initialise, fill_model, is_deferred, stand_in
from farandole.parallel.gathering import GatheredWeights
from farandole.parallel.hybrid import divide
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.nonfinite import GradientWatch, NonFinite, OutputWatch
from farandole.parallel.offloading import OffloadedUpdate, home_at, rooms_at
from farandole.parallel.optimizer_probe import state_of_part, why_not_elementwise
from farandole.parallel.rounding import StochasticRounding
from farandole.parallel.scaled import Overflow, ScaledSteps
from farandole.parallel.starting import start_equal
from farandole.parallel.weights import Masters
from farandole.parallel.whole_parameters import WholeParameters
from farandole.plan import Offloaded

BUCKET_BYTES = 4 << 20


_PLAIN = (bool, int, float, str, tuple, type(None))
"""The settings of an optimizer that a checkpoint holds; tensors, as of the learning rate, are set by those who made them."""

_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Settings that say how an optimizer computes, not what."""

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float]]
"""`loss(output, batch)` returns the sum over a micro-batch, and the count of what is summed."""


@dataclass(frozen=True)
class StepLoss:
    """What a step has computed over all ranks: the mean loss, and the count over which it is the mean."""

    loss: float
    count: float


def first_of(batch: Any) -> Any:
    """The inputs of the model in a batch such as `(inputs, targets)`."""
    return batch[0] if isinstance(batch, tuple | list) else batch


class Engine:
    """Keeps the gradients of `model` equal on all ranks of `comm`.

    At construction the parameters and buffers of rank 0 are copied to all ranks.  Frozen parameters get no
    gradient, tied ones are reduced once.  A parameter without a gradient on some ranks counts as zero there;
    without one on all ranks, its `.grad` stays None.  With one rank nothing is communicated.

    With `zero` >= 1 an optimizer updates pieces of the parameters: `optimizer` gives it those.  The gradients are then
    those of the pieces, and the parameters' own `.grad` stands for them (`sharded_gradient`).  Ranks that share memory have one
    copy of the weights between them.  With `hybrid` the ranks of each host divide what is divided, and hosts have a copy each.

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
        scaler: LossScaler | None = None,
        diagnose: bool = False,
        report: bool = True,
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
        self.model = model
        self.zero = zero
        self.rank = comm.rank
        self.rounding = rounding
        self.comm = self._comm = comm
        self.optimizers: list[torch.optim.Optimizer] = []
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
            lambda number: self._reducer.wait_for(number),
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
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._shares_weights = any(bucket.weights and bucket.weights.common for bucket in self.buckets)
        self._gathering = built.gathering
        self._count: float | None = None  # of the last step, which is expected of the next one, too
        self._steps = ScaledSteps(self, scaler or LossScaler(enabled=False), diagnose=diagnose, report=report)
        self._watch = GradientWatch(model, built.buckets) if watch or self.scaler.enabled else None
        self._reducer = GradientReducer(
            model,
            built.buckets,
            comm,
            division,
            zero,
            events=self._steps,
            watch=self._watch,
            gathering=built.gathering,
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model makes of the inputs, cast to its type where they are floating."""
        if self._reducer.all_taken:
            self._reducer.begin_step()  # activations get the memory of gradients
        if self._dtype is not None:
            inputs, named = cast_floating((inputs, named), self._dtype)
        return self.model(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with the loss scaled if the precision is fp16.

        Gradients that it leaves in `.grad` after a step's last pass are unscaled.
        """
        if self._reducer.all_taken:
            self._reducer.begin_step()
        self._steps.backward(loss)

    # ---- a step, and an evaluation, over global counts ----

    def forward_backward(
        self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> StepLoss:
        """Compute the gradients of the mean loss over the micro-batches of all ranks.  All ranks call it, once per step.

            step = engine.forward_backward(batches, lambda logits, batch: (masked_sum(logits, batch), batch.mask.sum()))

        The mean is over the global count: masks, packed sequences, and micro-batches of different sizes weigh as in one process.
        Ranks may have different numbers of micro-batches.

        Args:
            batches: the micro-batches of this rank.
            loss: `loss(output, batch)` returns the sum of the losses of a micro-batch, and the count of what it sums: samples,
                or tokens that are not masked.
            inputs: the arguments of the model, of a micro-batch: a tensor, a tuple, or a mapping of named arguments.  By default
                the first element of a tuple or list, or the batch itself.

        Returns:
            The mean loss and the count over all ranks, the same on all of them.

        Raises:
            ValueError: on all ranks, if nothing counts, or weights are gathered and a rank has no micro-batch.
            RuntimeError: if there are gradients of an earlier call, which nobody has cleared.
        """
        if self._reducer.reduced and not self._reducer.all_taken:
            raise RuntimeError(
                "forward_backward computes the gradients of a whole step, and there are some already: call optimizer.zero_grad() "
                "before, and give all micro-batches of a step to one call"
            )
        mine = list(batches)
        passes = self._agreed_passes(len(mine))
        sums, counts = [], []
        for number in range(passes):
            last = number == passes - 1
            with nullcontext() if last else self.no_sync():
                total, count = self._loss_of(mine, number, loss, inputs)
                if self._count is None:
                    self._count = self._estimate_count(count, passes)
                if total is None:  # this rank has nothing left, and takes part in the reduction
                    self._reducer.join_pass(last=last)
                    continue
                sums.append(total.detach().double())
                counts.append(count)
                # the average over ranks of what is divided so is the sum over all, divided by the count that is expected
                self.backward(total * (self._comm.size / self._count))
        step = self._mean(sums, counts)
        if self._count is not None and step.count != self._count:
            self.scale_all(self._count / step.count)
        self._count = step.count
        return step

    def evaluate(
        self, batches: Iterable[Any], metric: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> float:
        """Return the mean of `metric` over the batches of all ranks, computed in evaluation mode.  All ranks call it.

        The arguments are those of `forward_backward`.  Ranks may have different numbers of batches.
        """
        mine, modes = list(batches), [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        sums, counts = [], []
        try:
            with torch.no_grad():
                for number in range(self._agreed_passes(len(mine))):
                    total, count = self._loss_of(mine, number, metric, inputs)
                    if total is not None:
                        sums.append(total.double())
                        counts.append(count)
        finally:
            for module, mode in modes:
                module.training = mode
        return self._mean(sums, counts).loss

    def _agreed_passes(self, mine: int) -> int:
        """The largest number of micro-batches of a rank."""
        if self._comm.size == 1:
            return mine
        numbers = torch.tensor([mine, -mine])
        self._comm.all_reduce(numbers, "max")
        most, least = int(numbers[0]), -int(numbers[1])
        if self._gathering is not None and least == 0 < most:
            raise ValueError(
                "a rank has no micro-batch, and with gathered weights all ranks compute together: give each rank one or more"
            )
        return most

    def _loss_of(
        self, batches: Sequence[Any], number: int, loss: Loss, inputs: Callable[[Any], Any]
    ) -> tuple[Tensor | None, Tensor | float]:
        """The sum and count of a micro-batch; (None, 0) if there is none of this number.

        Where weights are gathered a rank without one repeats its last one, which does not count: all ranks gather together.
        """
        if number >= len(batches) and self._gathering is None:
            return None, 0.0
        batch = batches[min(number, len(batches) - 1)]
        arguments = inputs(batch)
        if isinstance(arguments, Mapping):
            output = self(**arguments)
        else:
            output = self(*arguments) if isinstance(arguments, tuple) else self(arguments)
        total, count = loss(output, batch)
        if total.dim():
            raise ValueError(
                f"expected loss(output, batch) to return a sum and a count, got a sum of shape {tuple(total.shape)}"
            )
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        return (total, count) if number < len(batches) else (total * 0, 0.0)

    def _estimate_count(self, count: Tensor | float, passes: int) -> float:
        """Before the first step: the count of the whole step, if all micro-batches were like the first ones."""
        expected = torch.as_tensor(count).detach().double().cpu().reshape(1)
        if self._comm.size > 1:
            self._comm.all_reduce(expected, "sum")
        return max(1.0, float(expected)) * passes

    def _mean(self, sums: Sequence[Tensor], counts: Sequence[Tensor | float]) -> StepLoss:
        values = torch.zeros(2, dtype=torch.float64)
        if sums:
            values[0] = torch.stack(list(sums)).sum().cpu()
            values[1] = sum(float(count) for count in counts)
        if self._comm.size > 1:
            self._comm.all_reduce(values, "sum")
        total, count = values.tolist()
        if not count > 0:
            raise ValueError(
                "nothing counts: the counts that loss(output, batch) returned on all ranks add up to 0"
            )
        return StepLoss(total / count, count)

    # ---- a backward pass ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes accumulate gradients; with `zero` < 2 they communicate nothing.

        With `zero` >= 2 there is no memory to keep whole gradients in, so that every pass is reduced.
        """
        with self._reducer.no_sync():
            yield

    def synchronize(self) -> None:
        """Reduce what is left and wait until every gradient is the average over ranks.

        A backward pass outside of `no_sync` ends with it; it is for ranks that had none.
        """
        self._reducer.synchronize()

    @property
    def waited_s(self) -> float:
        """The seconds in which this rank had nothing to do but wait for others; may be set to 0."""
        return self._reducer.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._reducer.waited_s = seconds

    # ---- the optimizer ----

    @property
    def skipped(self) -> bool:
        """Whether the optimizer's last step was skipped, as fp16 gradients overflowed."""
        return self.overflow is not None

    @property
    def overflow(self) -> Overflow | None:
        """What is known of the overflow for which the last step was skipped, if it was."""
        return self._steps.overflow

    @property
    def scaler(self) -> LossScaler:
        """The scale of the loss; 1 unless the precision is fp16."""
        return self._steps.scaler

    def pieces(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """(parameter, piece, start): what this rank updates, and where it begins in the flattened parameter."""
        for bucket in self.buckets:
            for parameter, piece, start in zip(bucket.parameters, bucket.pieces, bucket.starts, strict=True):
                if piece is not None:
                    yield parameter, piece, start

    def frozen_shards(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """(parameter, values, start): what this rank stores of frozen parameters in flat buffers, flat."""
        for weights in self._weights:
            if not any(parameter.requires_grad for parameter in weights.parameters):
                yield from weights.shard_parts()

    def divides(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter lies in a flat buffer, of which this rank may store no part."""
        return any(each is parameter for weights in self._weights for each in weights.parameters)

    def piece_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(piece, values): the values of each piece, as many, in the order of `pieces`."""
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
            home = home_at(self._offload, self._comm, pinned=any(p.is_cuda for p in self.model.parameters()))
            update = OffloadedUpdate(optimizer, self.buckets, home, self._before_update, self._after_update)
            self.offloaded.append(update)
            if update.state.weights:
                self._whole.masters_are_elsewhere()
        _clear_parameters_too(optimizer, before)
        self.optimizers.append(optimizer)
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

    # ---- checkpoints ----

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the state of the model and its optimizers to a new folder; all ranks call it.

        There are parameters, buffers, optimizer states and settings, the loss scale, random generators, and what `extra` has: values
        that JSON can hold, such as the position in the data.  The folder gets its name when it is whole.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
        """
        checkpoint.save(self, Path(folder).expanduser(), extra or {})

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint of `save`, written under any plan by any number of ranks; all ranks call it.

        Optimizers are given to `optimizer` before.

        Returns:
            `extra`, as it was saved.

        Raises:
            CheckpointError: on all ranks, if the checkpoint is damaged or belongs to another model; the engine stays as it is.
        """
        return checkpoint.load(self, Path(folder).expanduser())

    def facts(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        groups = [
            [
                {k: v for k, v in group.items() if isinstance(v, _PLAIN) and k not in _IMPLEMENTATION}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]
        steps = self.rounding.steps if self.rounding is not None else 0
        return {
            "scaler": self.scaler.state_dict(),
            "rounding_steps": steps,
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "groups": groups,
        }

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Go on from what `facts` returned."""
        if self.scaler.enabled and facts["scaler"]["scale"] != 1:
            self.scaler.load_state_dict(facts["scaler"])
        if self.rounding is not None:
            self.rounding.steps = facts["rounding_steps"]
        for optimizer, groups in zip(self.optimizers, facts["groups"], strict=False):
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})

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
        self._steps.decide()
        if self._shares_weights:  # nobody may read weights any more
            self._shards.barrier()

    def _after_update(self) -> None:
        if self.skipped:
            return
        self.publish()
        if self._reducer.buffers_changed:
            self._reducer.buffers.average()

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self.model.named_parameters() if known is parameter)

    # ---- gradients ----

    def gradients(self) -> list[Tensor]:
        """What this rank has of the averaged gradients."""
        return [share for _, share in self._reducer.shares()]

    def gradient_norm(self) -> float:
        """The global norm: over all parameters, of the averaged gradients.  The same on all ranks.

        With fp16 it is infinite or NaN if the step is going to be skipped.
        """
        norm = total_norm(self.gradients())
        if self.zero and self._shards.size > 1:
            square = torch.tensor(norm, dtype=torch.float64) ** 2
            self._shards.all_reduce(square)
            norm = float(square.sqrt())
        self._steps.norm = norm
        return norm

    def locate_nonfinite(self, outputs: OutputWatch | None = None) -> NonFinite:
        """Where gradients whose norm is not finite come from.  All ranks call it, before the update.

        Raises RuntimeError without `watch`.
        """
        if self._watch is None:
            raise RuntimeError("gradients are not watched: make the engine with watch=True")
        return self._watch.locate(self._comm, outputs)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`, unless an overflow is known, for which they are going to be thrown away."""
        if self._steps.finite:
            self.scale_all(factor)

    def scale_all(self, factor: float) -> None:
        """Multiply every gradient by `factor`, whatever it is."""
        self._reducer.forget_norms()
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
        self._reducer.begin_step()
        self.take_away()

    def take_away(self) -> None:
        """Leave nothing with a gradient; gradients keep their memory until the next step."""
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
        self._steps.close()
        self._reducer.close()
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
