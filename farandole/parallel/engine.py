"""The engine: trains a model under a plan.

    engine = farandole.parallelize(model, Plan(zero=2))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    step = engine.forward_backward(micro_batches, loss)     # loss(output, batch) -> (sum, count)
    engine.clip(1.0)
    optimizer.step()                        # updates this rank's shards, and gathers the new weights
    optimizer.zero_grad()
    engine.save(folder, extra={"step": n})

or, in a plain loop:

    with engine.no_sync():
        loss(engine(first)).backward()      # accumulates
    loss(engine(second)).backward()         # buckets are reduced as they fill, and the last one when it returns

In a plain loop each rank's loss is the mean over its own samples.  If all ranks have equally many samples, the gradient equals that of
a single process with all samples.  Accumulated backward passes add up, as in PyTorch.

The engine reads layouts, not axes: the `Layout` of a tensor determines which ranks sum its gradient and which ranks divide it
(`sharding`).  One engine implements all stages of ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models").

To host a pipeline, `forward_backward` owns the order of forward passes, backward passes and reductions.  A pipeline schedule replaces
the loop over micro-batches in `global_mean`.  The reducer needs one signal per step, after the last backward pass of a parameter
(`GradientReducer.end_pass`), and the ranks of the last stage provide sums and counts.
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
from farandole.parallel.checkpoint.folder import PendingSave, fail_on_all
from farandole.parallel.data import GradientReducer
from farandole.parallel.global_mean import GlobalMean, Loss, StepLoss, first_of
from farandole.parallel.initial_values import (
    Initialise,
    WeightSource,
    allocate,
    broadcast_parameters,
    fill_model,
    is_deferred,
    stand_in,
)
from farandole.parallel.lora.peft_adapter import save_adapter
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

    `farandole.parallelize` creates an engine.

    The constructor broadcasts the parameters and buffers of rank 0.  Frozen parameters get no gradient, and tied parameters are reduced
    once.  A parameter without a gradient on some ranks counts as zero there; a parameter without a gradient on all ranks keeps
    `.grad` None.  A single rank does not communicate.

    With `zero` >= 1 optimizers update this rank's shards of the parameters.  The `.grad` of a parameter then represents its averaged
    gradient, of which the rank stores a shard (`optimizers.shards`).  Ranks that share memory have a single copy of the weights.

    Args:
        model: the model; its parameters belong to the engine until `close`.
        comm: the ranks.
        bucket_bytes: the approximate bytes of parameters that are reduced together.
        compression: the compression of gradients between hosts, with `zero=0`.
        zero: the stage of ZeRO: ranks divide 1 optimizer states and master weights, 2 also gradients, 3 also weights.
        hybrid: divide among the ranks of each host only, so that every host has a complete copy.
        dtype: the type in which the model computes (bf16, fp16).  The optimizer updates master weights in the original type, with
            gradients in that type.
        offload: "host" or "disk:FOLDER", where master weights and optimizer states are stored between steps.
        offloaded: also offload "gradients" (with `zero` >= 2), or "parameters" (with `zero=3`).
        initialise: fills a model on the meta device block by block, so that a rank allocates only its shards (`initial_values`).
        watch: check the gradients of this rank before they are averaged, so that `locate_nonfinite` names the rank.  This
            costs one pass over each filled bucket.
        rounding: stochastic rounding of updates to bf16 weights, without master weights.
        scaler: the loss scaler of fp16 (`loss_scaling`).
        diagnose: check the outputs of blocks, so that the report of an overflow names the block.
        report: print a line on rank 0 for each overflow.
        mesh: the mesh of ranks; by default one data axis.
        layouts: the layouts of parameters by name; by default every rank has every parameter.

    Raises:
        TypeError, ValueError: for options that exclude each other, or a model that cannot be compressed.
        PlanError: with `hybrid`, if hosts have different numbers of ranks.
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
        source: WeightSource | None = getattr(model, "weight_source", None) if is_deferred(model) else None
        if is_deferred(model) != (initialise is not None or source is not None):
            raise ValueError(
                "initialise= fills the blocks of a model that is on the meta device: both are needed, or neither"
            )
        self.model, self.comm, self.zero, self.rank = model, comm, zero, comm.rank
        self.rounding = rounding
        self.swapped: Swap | None = None
        self._pending_save: PendingSave | None = None
        self._dtype, self._offload = dtype, Place.parse(offload)
        types: dict[int, torch.dtype] = {}
        in_memory: set[str] | None = None
        if is_deferred(model):
            in_memory = {name for name, p in model.named_parameters() if not p.is_meta}
            types = stand_in(model, torch.get_default_device())
        if mesh is None:
            mesh = data_mesh(comm.size, comm.all_gather_object(endpoint.host_identity()) if hybrid else None)
        self.mesh, self.layouts = mesh, layouts or replicated_layouts(model)
        groups = connect(mesh, comm, self.layouts.values(), zero)
        dividing = {
            ranks_of(mesh, self.layouts[name], comm.rank, zero).shards for name, _ in model.named_parameters()
        }
        if initialise is None:
            broadcast_parameters(model, mesh, self.layouts, groups, in_memory)
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
        elif source is not None:
            allocate(model, built.weights, types)
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
        if source is not None:
            safetensors_files.read_weights(self, source)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model; floating-point inputs are cast to its type."""
        if self._reducer.all_cleared:
            self._reducer.begin_step()  # activations use the memory of gradients
        if self._dtype is not None:
            inputs, named = cast_floating((inputs, named), self._dtype)
        return self.model(*inputs, **named)

    # ---- steps and evaluations ----

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`, with the loss scaled if the precision is fp16.

        The gradients in `.grad` are unscaled after the last backward pass of a step.
        """
        if self._reducer.all_cleared:
            self._reducer.begin_step()
        self._steps.backward(loss)

    def forward_backward(
        self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> StepLoss:
        """Compute the gradients of the mean loss over the micro-batches of all ranks; a collective call, once per step.

            step = engine.forward_backward(batches, lambda logits, batch: (masked_sum(logits, batch), batch.mask.sum()))

        The mean is over the global count, so masks, packed sequences and micro-batches of different sizes have the weight that they have in
        one process.  Ranks may have different numbers of micro-batches, including none.

        Args:
            batches: the micro-batches of this rank.
            loss: `loss(output, batch)` returns the sum of the losses of a micro-batch, and the number of summands: samples,
                or tokens that are not masked.
            inputs: returns the model's arguments for a micro-batch: a tensor, a tuple, or a mapping of named arguments.  By default
                the first element of a tuple or list, or the batch itself.

        Returns:
            The mean loss and the count over all ranks, equal on all ranks.

        Raises:
            ValueError: on all ranks, if the count is 0.
            RuntimeError: if gradients of an earlier call were not cleared.
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
        """Return the mean of `metric` over the batches of all ranks, computed in evaluation mode; a collective call.

        The arguments are those of `forward_backward`.  Ranks may have different numbers of batches.
        """
        return self._mean.evaluate(batches, metric, inputs)

    def join_forward(self) -> None:
        """Take part in the gathers of the other ranks' forward pass, without inputs."""
        if self._gatherer is not None:
            self._gatherer.end_pass("forward")

    def join_backward(self, *, last: bool) -> None:
        """Take part in the reductions of the other ranks' backward pass, without gradients; `last` marks the last one of a step."""
        self._reducer.join_pass(last=last)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in backward passes without reducing them.

        With `zero` >= 2 every backward pass is reduced, because no rank has memory for whole gradients.
        """
        with self._reducer.no_sync():
            yield

    def synchronize(self) -> None:
        """Reduce the remaining buckets, and wait until every gradient is the average over ranks.

        A backward pass outside `no_sync` does this itself.  Call it on ranks that had no backward pass.
        """
        self._reducer.synchronize()

    @property
    def waited_s(self) -> float:
        """The seconds for which this rank has waited for other ranks; may be set to 0."""
        return self._reducer.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._reducer.waited_s = seconds

    # ---- the optimizer ----

    @property
    def skipped(self) -> bool:
        """Whether the last step of the optimizer was skipped because fp16 gradients overflowed."""
        return self.overflow is not None

    @property
    def overflow(self) -> Overflow | None:
        """The overflow for which the last step was skipped, or None."""
        return self._steps.overflow

    @property
    def scaler(self) -> LossScaler:
        """The scale of the loss; 1 unless the precision is fp16."""
        return self._steps.scaler

    def shards(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, shard, start) for this rank's shards; `start` is the offset in the flattened parameter."""
        for shards in self.shards_of_buckets:
            yield from shards.stored()

    def updated_tensors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, tensor, start) for all tensors for which optimizers may have states: shards and whole parameters."""
        return self._updates.tensors()

    def stored_parts(self) -> Iterator[StoredPart]:
        """Yield the parts that this rank stores of trained parameters, and of frozen parameters in flat buffers."""
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
        """Return whether a parameter is stored in a flat buffer, of which this rank may store no part."""
        return any(each is parameter for weights in self._weights for each in weights.parameters)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make `optimizer` update this rank's shards of the model's parameters, and return it.

        If ranks divide parameters, the optimizer must update every element independently, as SGD, Adam and AdamW do, or every parameter, as
        Muon and Adafactor do (`optimizers.owned_parameters`).  If states are offloaded, it must update every element independently.
        Existing states must be equal on all ranks.  `step` waits for the averaged gradients and ends when all ranks have the new
        weights; a closure returns the mean loss over ranks.

        With offload this moves master weights and states, and is a collective call.

        Raises:
            TypeError: `optimizer` is a class, or not an optimizer.
            ValueError: the optimizer would give other results, or has parameters of another model.
            OffloadError: the disk or host memory has no space for the states.
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
        """The optimizers of the engine."""
        return self._updates.optimizers

    @property
    def offloaded(self) -> list[OffloadedUpdate]:
        """The optimizers with offloaded states."""
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
        for ranks in self._sharing:  # all ranks must have stopped reading weights
            ranks.barrier()
        return not self.skipped

    def _after_update(self) -> None:
        if self.skipped:
            return
        self.all_gather_parameters()
        if self._reducer.buffers_changed:
            self._reducer.buffers.average()

    def all_gather_parameters(self, *, frozen: bool = False) -> None:
        """Make all ranks compute with the updated shards, with `frozen` also those of frozen parameters; optimizers call this."""
        self._release_gathered()
        changed = [each for each in self._weights if frozen or each.trained]
        with torch.no_grad():
            for weights in changed:
                weights.all_gather_async()
        for weights in changed:
            weights.wait()
        for ranks in self._sharing:
            ranks.barrier()

    # ---- unsharded parameters ----

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which each rank can compute with the model alone; all ranks enter and leave it together."""
        with self._gatherer.whole() if self._gatherer is not None else nullcontext():
            yield

    def edit_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks may change parameters in place in the same way, under `torch.no_grad()`.

        The parameters are unsharded, and the optimizer continues from the new values.  Each rank needs memory for all parameters.

        Raises:
            RuntimeError: if the master weights are offloaded.
        """
        self._release_gathered()
        return self._whole.edit()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state with unsharded parameters, for `model.load_state_dict`; a collective call.

        Parameters have the type in which the optimizer updates them or, if its state is offloaded, the type in which the model
        computes.
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
        """Write the state of the model and its optimizers to a new folder; a collective call.

        The checkpoint contains parameters, buffers, optimizer states and settings, the loss scale, the random generators and `extra`.  The
        folder gets its final name when it is complete.

        Args:
            folder: a folder that does not exist, on a file system that all ranks share.
            extra: values that JSON can represent, such as the position in the data.
            asynchronous: copy the state to host memory, and write it in a thread while training continues.  `wait` of the returned
                object, the next `save` or `load`, and `close` block until the checkpoint is on the disk.  Offloaded states are not
                copied: they are written before `save` returns.
            on_saved: called on rank 0 when the folder is complete, by the thread that wrote it; an exception makes the save fail.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written; with `asynchronous`, `wait` raises it.
        """
        self._wait_for_save()
        path = Path(folder).expanduser()
        pending = checkpoint.save(self, path, extra or {}, on_saved, background=asynchronous)
        self._pending_save = pending if asynchronous else None
        return pending

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restore a checkpoint that `save` wrote under any plan and with any number of ranks; a collective call.

        Call `optimizer` for every optimizer first.

        Returns:
            The `extra` of the checkpoint.

        Raises:
            CheckpointError: on all ranks, if the checkpoint is damaged or belongs to another model; the engine is unchanged.
        """
        self._wait_for_save()
        return checkpoint.load(self, Path(folder).expanduser())

    def export(self, folder: str | Path, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30) -> None:
        """Write parameters and buffers to safetensors files in a new folder, for other tools; a collective call.

        Args:
            dtype: the type of floating-point tensors; by default the type that the optimizer updates.
            file_bytes: the maximum size of a file; a larger model is divided into several files with an index.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
        """
        safetensors_files.export(self, Path(folder).expanduser(), dtype, file_bytes)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30
    ) -> None:
        """Write a new Hugging Face folder, which `transformers` loads; a collective call.

        Adapters of LoRA are added to the weights that are written.  The files of the tokenizer are copied from the folder from which the
        model was created.  No rank holds the unsharded model.

        Args:
            dtype: the type of floating-point weights; by default the type that the optimizer updates.
            file_bytes: the maximum size of a file; a larger model has several files and an index.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
            ValueError: if the model has no Hugging Face format, or quantized weights.
        """
        safetensors_files.save_pretrained(self, Path(folder).expanduser(), dtype, file_bytes)

    def save_adapter(self, folder: str | Path, base_model: str | None = None) -> None:
        """Write the adapters of LoRA in the format of PEFT; a collective call.

        Args:
            base_model: the name of the base model in the configuration; by default the folder from which the model was created.

        Raises:
            CheckpointError: on all ranks, if the adapter cannot be written.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        values = {names[id(p)]: value.cpu() for p, value in self.whole_parameters() if p.requires_grad}
        path = Path(folder).expanduser()
        with fail_on_all(self.comm, path):
            if self.comm.rank == 0:
                save_adapter(self.model, path, base_model, values)

    def load_weights(self, path: str | Path) -> None:
        """Load parameters and buffers from a safetensors file, or from the files in a folder; a collective call.

        A rank reads only the parts that it stores.  Optimizer states are unchanged.

        Raises:
            CheckpointError: on all ranks, if files are damaged or belong to another model; the engine is unchanged.
        """
        safetensors_files.load_weights(self, Path(path).expanduser())

    def remember_parameters(self) -> None:
        """Record that the parameters and the master weights were changed together."""
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
        """Restore the state that `metadata` returned."""
        scaler = saved["scaler"]
        was_enabled = scaler.get("enabled", scaler["scale"] != 1)  # missing in earlier versions
        if self.scaler.enabled and was_enabled:
            self.scaler.load_state_dict(scaler)
        if self.rounding is not None:
            self.rounding.steps = saved["rounding_steps"]
        self._updates.restore_settings(saved["groups"])
        self._mean.expected = saved.get("count")  # missing in checkpoints of earlier versions

    # ---- gradients ----

    def gradients(self) -> list[Tensor]:
        """Return what this rank has of the averaged gradients; they are then in memory until the next step, where they may be changed."""
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.holds_result:
                _ = bucket.reduced
        return [gradient for shards in self.shards_of_buckets for _, gradient in shards.set()]

    def gradient_norm(self) -> float:
        """Return the global norm of the averaged gradients of all parameters; equal on all ranks.

        With fp16 it is infinite or NaN if the step will be skipped.
        """
        self._steps.norm = self._norms.total()
        return self._steps.norm

    def locate_nonfinite(self, outputs: OutputWatch | None = None) -> OverflowReport:
        """Return the rank and the parameter of non-finite gradients; a collective call, before the update.

        Raises:
            RuntimeError: if the engine was created without `watch`.
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
        """Clip the global norm of the gradients to `max_norm`; return the norm before clipping."""
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
        """Yield the name of each parameter, the norm of this rank's part of its gradient, and the number of ranks with this part."""
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
        """Restore the residuals of this rank from `state`."""
        for number, bucket in enumerate(self.buckets):
            if bucket.compressor is not None:
                own = f"{number}."
                bucket.compressor.load(
                    {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
                )

    def rescale(self, factor: float) -> None:
        """Multiply the residuals of compression by `factor`, after a change of the loss scale."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                bucket.compressor.scale_residuals(factor)

    # ---- other ----

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

    `values()` returns a view of the elements, which may be changed; for offloaded `weights` only while they are in memory.
    """

    parameter: nn.Parameter
    start: int
    values: Callable[[], Tensor]
    weights: FlatWeights | None
    trained: bool


def _part_of(weights: FlatWeights, part: slice) -> Tensor:
    return weights.shard[part]


def _gathers(model: nn.Module, shards: Communicator | None) -> bool:
    """Return whether ranks that divide weights must gather them, because they do not share memory."""
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
