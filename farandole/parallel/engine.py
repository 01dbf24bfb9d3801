"""The engine: a model under a plan, its steps, clipping, optimizers and states.

    engine = farandole.parallelize(model, Plan(zero=2))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    step = engine.forward_backward(micro_batches, loss)     # loss(output, batch) -> (sum, count)
    engine.clip(1.0)
    optimizer.step()                        # this rank's shards; then all ranks have the new weights
    optimizer.zero_grad()
    engine.save(folder, extra={"step": n})

or, in a loop of one's own,

    with engine.no_sync():
        loss(engine(first)).backward()      # accumulates
    loss(engine(second)).backward()         # buckets are reduced as they fill, and the last one when it returns

where each rank's loss is a mean over its own samples.  When all ranks have equally many, the gradient is that of a single
process with all samples, times the number of backward passes, as always in accumulation.

The engine knows layouts, not axes: which ranks sum the gradient of a tensor, and which of them divide it, follows from its `Layout`
(`sharding`).  One engine serves all stages of ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models").

How a pipeline fits in: `forward_backward` owns the order of forward passes, backward passes and reductions.  A schedule of
micro-batches takes the place of the loop in `global_mean`; the reducer needs one signal per step, after the last backward pass of a
parameter (`GradientReducer.end_pass`), and sums and counts come from the ranks of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm import endpoint
from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.layout import Layout
from farandole.memory.swap import Swap
from farandole.mesh import Mesh
from farandole.parallel.building import build, connect
from farandole.parallel.checkpoint import folder as checkpoint
from farandole.parallel.checkpoint import safetensors_files
from farandole.parallel.checkpoint.folder import PendingSave
from farandole.parallel.data import GradientReducer
from farandole.parallel.global_mean import GlobalMean, Loss, StepLoss, first_of
from farandole.parallel.initial_values import (
    Initialise,
    broadcast_parameters,
    fill_model,
    is_deferred,
    stand_in,
)
from farandole.parallel.loss_scaling import LossScaler, Overflow, ScaledSteps
from farandole.parallel.model_checks import check_gradients, check_model
from farandole.parallel.optimizers.offloading import OffloadedUpdate, stores_at
from farandole.parallel.optimizers.rounding import StochasticRounding
from farandole.parallel.optimizers.shards import GradientNorms
from farandole.parallel.optimizers.updates import Updates
from farandole.parallel.overflow import GradientWatch, OutputWatch, OverflowReport
from farandole.parallel.precision import cast_floating
from farandole.parallel.sharding import BUCKET_BYTES, data_mesh, plan_sharding, ranks_of, replicated_layouts
from farandole.parallel.weights import FlatWeights, Masters
from farandole.parallel.whole_parameters import WholeParameters
from farandole.plan import Offloaded, Place


class Engine:
    """Trains `model` on the ranks of `comm`.

    At construction the parameters and buffers of rank 0 are copied to all ranks.  Frozen parameters get no
    gradient, tied ones are reduced once.  A parameter without a gradient on some ranks counts as zero there;
    without one on all ranks, its `.grad` stays None.  With one rank nothing is communicated.

    With `zero` >= 1 an optimizer updates shards of the parameters: `optimizer` gives it those.  The gradients are then
    those of the shards, and the parameters' own `.grad` stands for them (`optimizers.shards`).  Ranks that share memory have one
    copy of the weights between them.

    Args:
        bucket_bytes: about as many bytes of parameters are reduced together.
        compression: of gradients that cross hosts, with `zero=0`; gradients are then no longer those of one process, but with error
            feedback what a step misses comes in later ones.
        zero: what ranks divide: 1 optimizer states and master weights, 2 gradients too, 3 weights too.
        hybrid: whether the ranks of each host divide them, so that every host has a copy.
        dtype: in which the model computes (bf16, fp16), while the optimizer updates master weights of the type that parameters had,
            with gradients of that type.
        offload: "host" or "disk:FOLDER", where master weights and states of the optimizer are kept; they pass through memory in its
            step.  `offloaded`: also "gradients", with `zero` >= 2, or "parameters" too, with `zero=3`; on a disk for models on the CPU
            only.
        initialise: makes a model on the meta device, block by block, where ranks keep its parts (`initial_values`).
        watch: whether every rank checks its own gradients before they are averaged, so that `locate_nonfinite` names the rank whose
            gradients were not finite; the cost is one pass over a bucket that has just been filled.
        rounding: of the update of bf16 weights, instead of master weights; shards read as NaN between updates.
        scaler, diagnose, report: see `loss_scaling`.
        mesh, layouts: of parameters that are not the same on all ranks; by default ranks differ in their samples only.

    Raises:
        TypeError, ValueError: for options that exclude each other, and for a model that cannot be compressed.
        PlanError: with `hybrid`, where hosts have different numbers of ranks.
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
        mesh: Mesh | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        _check_options(zero, compression, rounding, offload, dtype)
        flat = zero > 0 or dtype is not None or offload != "none"
        check_model(model, moved=flat)
        if is_deferred(model) != (initialise is not None):
            raise ValueError(
                "initialise= fills the blocks of a model that is on the meta device: both are needed, or neither"
            )
        self.model, self.comm, self.zero, self.rank = model, comm, zero, comm.rank
        self.rounding = rounding
        self.swapped: Swap | None = None
        self._pending_save: PendingSave | None = None
        self._dtype, self._offload = dtype, Place.parse(offload)
        types: dict[int, torch.dtype] = {}
        if initialise is not None:
            types = stand_in(model, torch.get_default_device())
        if mesh is None:
            mesh = data_mesh(comm.size, comm.all_gather_object(endpoint.host_identity()) if hybrid else None)
        self.mesh, self.layouts = mesh, layouts or replicated_layouts(model)
        groups = connect(mesh, comm, self.layouts.values(), zero)
        dividing = {
            ranks_of(mesh, self.layouts[name], comm.rank, zero).shards for name, _ in model.named_parameters()
        }
        if initialise is None:
            broadcast_parameters(model, mesh, self.layouts, groups)
        plan = plan_sharding(
            model,
            mesh,
            self.layouts,
            comm.rank,
            zero=zero,
            dtype=dtype,
            flat=flat,
            gathered=zero == 3
            and (
                offloaded == "parameters"
                or any(_gathers(model, groups.of_ranks(ranks)) for ranks in dividing)
            ),
            bucket_bytes=bucket_bytes,
        )
        masters: Masters = "none" if rounding is not None else "memory" if offload == "none" else "offloaded"
        accelerator = any(p.is_cuda for p in model.parameters())
        self._stores = stores_at(self._offload, offloaded, plan, comm, accelerator=accelerator)
        built = build(
            model, plan, groups, zero=zero, masters=masters, compression=compression, stores=self._stores
        )
        self.buckets, self.shards_of_buckets = built.buckets, built.shards
        self._weights, self._gatherer = built.weights, built.gatherer
        if initialise is not None:
            fill_model(model, built.weights, comm, initialise, types)
        self._trained = {id(p) for bucket in built.buckets for p in bucket.parameters}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        shared = {id(weights.comm): weights.comm for weights in built.weights if weights.shared}
        self._sharing = [each for each in shared.values() if each is not None]
        self._divides = any(bucket.plan.ranks.holders != comm.size for bucket in built.buckets)
        self._whole = WholeParameters(model, built.weights, comm, self._is_whole)
        self._norms = GradientNorms(
            self.layouts, self._gradient_norms, self.device, comm if self._divides else None
        )
        scaler = scaler or LossScaler(enabled=False)
        gradient_watch = GradientWatch(model, built.shards) if watch or scaler.enabled else None
        self._steps = ScaledSteps(self, scaler, gradient_watch, diagnose=diagnose, report=report)
        self._reducer = GradientReducer(
            model,
            built.buckets,
            built.shards,
            comm,
            self._norms,
            every_pass=zero >= 2,
            events=self._steps,
            gatherer=built.gatherer,
        )
        self._mean = GlobalMean(self, mesh)
        self._updates = Updates(
            built.shards,
            comm,
            self.layouts,
            zero=zero,
            place=self._offload,
            rounding=rounding,
            before=self._before_update,
            after=self._after_update,
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model for these inputs, cast to its type where they are floating."""
        if self._reducer.all_cleared:
            self._reducer.begin_step()  # activations use the memory of gradients
        if self._dtype is not None:
            inputs, named = cast_floating((inputs, named), self._dtype)
        return self.model(*inputs, **named)

    # ---- steps and evaluations ----

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`, with the loss scaled if the precision is fp16.

        Gradients that it leaves in `.grad` after a step's last pass are unscaled.
        """
        if self._reducer.all_cleared:
            self._reducer.begin_step()
        self._steps.backward(loss)

    def forward_backward(
        self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> StepLoss:
        """Compute the gradients of the mean loss over the micro-batches of all ranks.  All ranks call it, once per step.

            step = engine.forward_backward(batches, lambda logits, batch: (masked_sum(logits, batch), batch.mask.sum()))

        The mean is over the global count: masks, packed sequences, and micro-batches of different sizes weigh as in one process.
        Ranks may have different numbers of micro-batches, also none.

        Args:
            batches: the micro-batches of this rank.
            loss: `loss(output, batch)` returns the sum of the losses of a micro-batch, and the count of summands: samples,
                or tokens that are not masked.
            inputs: the arguments of the model, of a micro-batch: a tensor, a tuple, or a mapping of named arguments.  By default
                the first element of a tuple or list, or the batch itself.

        Returns:
            The mean loss and the count over all ranks, the same on all of them.

        Raises:
            ValueError: on all ranks, if nothing counts.
            RuntimeError: if there are gradients of an earlier call that were not cleared.
        """
        if self._reducer.reduced and not self._reducer.all_cleared:
            raise RuntimeError(
                "forward_backward computes the gradients of a whole step, and there are some already: call optimizer.zero_grad() "
                "before, and give all micro-batches of a step to one call"
            )
        return self._mean.forward_backward(batches, loss, inputs)

    def evaluate(
        self, batches: Iterable[Any], metric: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> float:
        """Return the mean of `metric` over the batches of all ranks, computed in evaluation mode.  All ranks call it.

        The arguments are those of `forward_backward`.  Ranks may have different numbers of batches.
        """
        return self._mean.evaluate(batches, metric, inputs)

    def join_forward(self) -> None:
        """Take part in a forward pass of the other ranks, without inputs: gather the weights that they need."""
        if self._gatherer is not None:
            self._gatherer.end_pass("forward")

    def join_backward(self, *, last: bool) -> None:
        """Take part in a backward pass of the other ranks, the `last` one of a step or not, without gradients."""
        self._reducer.join_pass(last=last)

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
        """The overflow for which the last step was skipped, if it was."""
        return self._steps.overflow

    @property
    def scaler(self) -> LossScaler:
        """The scale of the loss; 1 unless the precision is fp16."""
        return self._steps.scaler

    def shards(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, shard, start): what this rank updates, and where it begins in the flattened parameter."""
        for shards in self.shards_of_buckets:
            yield from shards.stored()

    def updated_tensors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, tensor, start) of all tensors for which optimizers may have states: shards, and whole parameters."""
        return self._updates.tensors()

    def stored_parts(self) -> Iterator[StoredPart]:
        """Yield what this rank stores of trained parameters, and of frozen ones in flat buffers."""
        for shards in self.shards_of_buckets:
            for index, (parameter, tensor) in enumerate(zip(shards.parameters, shards.tensors, strict=True)):
                if tensor is not None:
                    values = partial(shards.values, index)
                    weights = None if shards.has_masters else shards.weights
                    yield StoredPart(parameter, shards.starts[index], values, weights, trained=True)
        for weights in self._weights:
            if not weights.trained:
                for parameter, part, start in weights.ranges():
                    values = partial(_part_of, weights, part)
                    yield StoredPart(parameter, start, values, weights, trained=False)

    def divides(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter lies in a flat buffer, of which this rank may store no part."""
        return any(each is parameter for weights in self._weights for each in weights.parameters)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have `optimizer`, made for the model's parameters, update this rank's shards of them; return it.

        Where ranks divide parameters the optimizer has to treat every element by itself, as SGD, Adam and AdamW do, or every
        parameter, as Muon and Adafactor do (`optimizers.owned_parameters`); where parameters are offloaded, every element.  If it has a state,
        all ranks have the same.  Its `step` then begins with all ranks' gradients and ends with all ranks' new weights; of a closure
        it gets the mean over ranks.

        With offload this is where its master weights and states move: all ranks call it together.

        Raises:
            TypeError: for a class, or anything else that is no optimizer.
            ValueError: for an optimizer that would give other results, or has parameters of another model.
            OffloadError: where there is no space for what is offloaded.
        """
        checked: object = optimizer
        if not isinstance(checked, torch.optim.Optimizer):
            given = checked.__name__ if isinstance(checked, type) else type(checked).__name__
            raise TypeError(
                f"engine.optimizer takes an optimizer, as torch.optim.AdamW(model.parameters()), not {given}"
            )
        if any(given is optimizer for given in self.optimizers):
            raise ValueError("the optimizer was given to the engine already")
        known = {id(parameter) for parameter in self.model.parameters()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer has parameters that are not the model's: make it from model.parameters()"
            )
        self._updates.add(optimizer)
        if any(update.state.weights for update in self.offloaded):
            self._whole.masters_are_elsewhere()
        return optimizer

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given to `optimizer`."""
        return self._updates.optimizers

    @property
    def offloaded(self) -> list[OffloadedUpdate]:
        """The optimizers whose states are offloaded, with their states."""
        return self._updates.offloaded

    def _before_update(self) -> bool:
        """Complete the gradients of a step; return whether the step is made."""
        self.synchronize()
        self._release_gathered()
        self._whole.check()
        check_gradients(self.model, self._trained)
        for shards in self.shards_of_buckets:
            shards.before_update()
        self._steps.decide()
        for ranks in self._sharing:  # no rank may read weights any more
            ranks.barrier()
        return not self.skipped

    def _after_update(self) -> None:
        if self.skipped:
            return
        self.all_gather_parameters()
        if self._reducer.buffers_changed:
            self._reducer.buffers.average()

    def all_gather_parameters(self, *, frozen: bool = False) -> None:
        """Have all ranks compute with the updated shards, of frozen parameters too if they were changed.  Optimizers do it themselves."""
        self._release_gathered()
        changed = [each for each in self._weights if frozen or each.trained]
        with torch.no_grad():
            for weights in changed:
                weights.all_gather_async()
        for weights in changed:
            weights.wait()
        for ranks in self._sharing:
            ranks.barrier()

    # ---- whole parameters ----

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it each rank can compute with the model by itself.  It begins and ends on all ranks together."""
        with self._gatherer.whole() if self._gatherer is not None else nullcontext():
            yield

    def edit_parameters(self) -> AbstractContextManager[None]:
        """Within it, under `torch.no_grad()`, all ranks may change the model's parameters in place, alike.

        The parameters are whole, and the optimizer goes on from the new values.  Each rank needs memory for all of them.

        Raises:
            RuntimeError: where the master weights are offloaded.
        """
        self._release_gathered()
        return self._whole.edit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model with the whole values of all parameters, in memory of its own.  All ranks call it.

        Parameters have the type in which the optimizer updates them; where it is offloaded, the one that the model computes
        with.  `model.load_state_dict` takes it.
        """
        self._release_gathered()
        return self._whole.state_dict()

    def whole_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its whole value, some at a time: all ranks go through them together."""
        gathered: set[int] = set()
        if self._gatherer is not None:
            for parameters in self._gatherer.one_by_one():
                yield from ((parameter, parameter.detach()) for parameter in parameters)
                gathered.update(id(parameter) for parameter in parameters)
        for parameter in self.model.parameters():
            if id(parameter) not in gathered:
                yield parameter, parameter.detach()

    def _release_gathered(self) -> None:
        if self._gatherer is not None:
            self._gatherer.release()

    def _is_whole(self) -> bool:
        return self._gatherer is None or self._gatherer.is_whole

    # ---- checkpoints ----

    def save(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        on_saved: Callable[[], None] | None = None,
    ) -> PendingSave:
        """Write the state of the model and its optimizers to a new folder; all ranks call it.

        There are parameters, buffers, optimizer states and settings, the loss scale, random generators, and what `extra` has: values
        that JSON can hold, such as the position in the data.  The folder gets its name when it is whole.

        With `asynchronous` the state is copied to host memory, and written by a thread while training goes on; `wait` of the returned
        object, the next `save` or `load`, and `close` return when it is on the disk.  Offloaded states are not copied: they are
        written before `save` returns.

        `on_saved` is called on rank 0 when the folder is whole, by the thread that wrote it; if it fails, the save has failed.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written; with `asynchronous` by what waits for it.
        """
        self._wait_for_save()
        path = Path(folder).expanduser()
        pending = checkpoint.save(self, path, extra or {}, on_saved, background=asynchronous)
        self._pending_save = pending if asynchronous else None
        return pending

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint of `save`, written under any plan by any number of ranks; all ranks call it.

        Optimizers are given to `optimizer` before.

        Returns:
            `extra`, as it was saved.

        Raises:
            CheckpointError: on all ranks, if the checkpoint is damaged or belongs to another model; the engine stays as it is.
        """
        self._wait_for_save()
        return checkpoint.load(self, Path(folder).expanduser())

    def export(self, folder: str | Path, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30) -> None:
        """Write parameters and buffers to safetensors files in a new folder, for other tools; all ranks call it.

        Args:
            dtype: of floating-point tensors; by default the type in which the optimizer updates.
            file_bytes: a larger model is divided into several files, with an index.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
        """
        safetensors_files.export(self, Path(folder).expanduser(), dtype, file_bytes)

    def load_weights(self, path: str | Path) -> None:
        """Set parameters and buffers to those of a safetensors file, or of the files in a folder; all ranks call it.

        A rank reads what it stores.  Optimizer states stay as they are.

        Raises:
            CheckpointError: on all ranks, for files that are damaged or of another model; the engine stays as it is.
        """
        safetensors_files.load_weights(self, Path(path).expanduser())

    def remember_parameters(self) -> None:
        """The parameters have been changed together with the master weights."""
        self._whole.remember()

    def _wait_for_save(self) -> None:
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.wait()

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors."""
        return {
            "scaler": {"enabled": self.scaler.enabled, **self.scaler.state_dict()},
            "rounding_steps": self.rounding.steps if self.rounding is not None else 0,
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "groups": self._updates.settings(),
            "count": self._mean.expected,
        }

    def restore_metadata(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `metadata` returned."""
        scaler = saved["scaler"]
        was_enabled = scaler.get("enabled", scaler["scale"] != 1)  # earlier versions did not say
        if self.scaler.enabled and was_enabled:
            self.scaler.load_state_dict(scaler)
        if self.rounding is not None:
            self.rounding.steps = saved["rounding_steps"]
        self._updates.restore_settings(saved["groups"])
        self._mean.expected = saved.get("count")  # of a checkpoint of an earlier version it is not known

    # ---- gradients ----

    def gradients(self) -> list[Tensor]:
        """Return what this rank has of the averaged gradients; they are then in memory until the next step, where they may be changed."""
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.holds_result:
                _ = bucket.reduced
        return [gradient for shards in self.shards_of_buckets for _, gradient in shards.set()]

    def gradient_norm(self) -> float:
        """Return the global norm: over all parameters, of the averaged gradients.  The same on all ranks.

        With fp16 it is infinite or NaN if the step is going to be skipped.
        """
        self._steps.norm = self._norms.total()
        return self._steps.norm

    def locate_nonfinite(self, outputs: OutputWatch | None = None) -> OverflowReport:
        """Return where gradients whose norm is not finite come from.  All ranks call it, before the update.

        Raises:
            RuntimeError: without `watch`.
        """
        if self._steps.watch is None:
            raise RuntimeError("gradients are not watched: make the engine with watch=True")
        return self._steps.watch.locate(self.comm, outputs)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`, unless an overflow is known, for which they are going to be thrown away."""
        if self._steps.finite:
            self.scale_all(factor)

    def scale_all(self, factor: float) -> None:
        """Multiply every gradient by `factor`, whatever it is."""
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.holds_result:
                bucket.scale(factor)

    def clip(self, max_norm: float) -> float:
        """Shrink the gradients so that their global norm is at most `max_norm`; return what it was."""
        norm = self.gradient_norm()
        if norm > max_norm:
            self.scale_gradients(max_norm / norm)
        return norm

    def zero_grad(self) -> None:
        """Start the next step: every gradient is None.  An optimizer's own `zero_grad` does as well."""
        self._reducer.begin_step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None; gradients keep their memory until the next step."""
        for shards in self.shards_of_buckets:
            shards.clear_gradients()

    def _gradient_norms(self, order: float) -> Iterator[tuple[str, Tensor, int]]:
        """(name of the parameter, norm of this rank's part of its gradient, the number of ranks that have the same part)."""
        for shards in self.shards_of_buckets:
            plan = shards.bucket.plan
            for index, norm in shards.norms(order):
                yield plan.names[index], norm, plan.ranks.holders

    # ---- compression ----

    def compression_state(self) -> dict[str, Tensor]:
        """Return what compression remembers on this rank, by name, for a checkpoint; `load_compression` goes on from it."""
        return {
            f"{number}.{name}": value
            for number, bucket in enumerate(self.buckets)
            if bucket.compressor is not None
            for name, value in bucket.compressor.state.items()
        }

    def load_compression(self, state: Mapping[str, Tensor]) -> None:
        """Remember what this rank did when `state` was saved."""
        for number, bucket in enumerate(self.buckets):
            if bucket.compressor is not None:
                own = f"{number}."
                bucket.compressor.load(
                    {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
                )

    def rescale(self, factor: float) -> None:
        """Gradients are from now on `factor` times as large, as the loss is: so is what compression remembers."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                bucket.compressor.scale_residuals(factor)

    # ---- the rest ----

    def swap(self, swap: Swap) -> None:
        """Take over a swap of the model's activations: `close` ends it."""
        self.swapped = swap
        if self._gatherer is not None:
            self._gatherer.keep_others(swap.pack, swap.unpack)

    def close(self) -> None:
        """Let go of the model: remove the hooks and the gradients."""
        self._wait_for_save()
        self._steps.close()
        self._reducer.close()
        if self.swapped is not None:
            self.swapped.close()
        if self._gatherer is not None:
            self._gatherer.close()
        self._whole.close()
        self._updates.close()
        self.zero_grad()
        self._stores.close()


@dataclass(frozen=True)
class StoredPart:
    """A rank's part of a parameter: consecutive elements from `start` of the flattened parameter on.

    `values()` returns them, as a view in which they may be changed; of `weights` that are offloaded while these are in memory.
    """

    parameter: nn.Parameter
    start: int
    values: Callable[[], Tensor]
    weights: FlatWeights | None
    trained: bool


def _part_of(weights: FlatWeights, part: slice) -> Tensor:
    return weights.shard[part]


def _gathers(model: nn.Module, shards: Communicator | None) -> bool:
    """Whether ranks that divide weights have to gather them, as they do not share memory."""
    return shards is not None and not all(shards.shares_memory(p.device) for p in model.parameters())


def _check_options(
    zero: int,
    compression: Compression | None,
    rounding: StochasticRounding | None,
    offload: str,
    dtype: torch.dtype | None,
) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: the stages are 0, 1, 2 and 3")
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(f"compression={compression!r}: a Compression (Cast, Int8, TopK, PowerSGD), or None")
    if compression is not None and zero:
        raise ValueError(f"compression and zero={zero}: gradients are compressed with zero=0 only")
    if rounding is not None and offload != "none":
        raise ValueError("stochastic rounding and offload: there are no master weights to keep elsewhere")
    if rounding is not None and dtype is not torch.bfloat16:
        raise ValueError(f"stochastic rounding with dtype={dtype}: it is for torch.bfloat16")
