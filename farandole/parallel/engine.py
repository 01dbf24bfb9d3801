"""Train a model under a parallelism plan.

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
    loss(engine(second)).backward()         # reduces each bucket when it is filled

In a plain loop, each rank's loss is the mean over its own samples.  If all ranks have the same number of samples, the
averaged gradient equals the gradient that one process computes from all samples.  Gradients accumulate over backward
passes, as in PyTorch.

The `Layout` of a tensor determines which ranks reduce its gradient and which ranks shard it (`zero.sharding`).  One
engine implements all ZeRO stages (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models").

With a pipeline, a schedule replaces the loop over micro-batches in `global_mean`.  Gradients are reduced after the last
backward pass of the step (`GradientReducer.end_pass`), or earlier if the schedule uses `completing`.  The ranks of
the last stage provide the loss sums and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.layout import Layout
from farandole.memory.swap import Swap
from farandole.mesh import Mesh
from farandole.models.moe import RouterLoad, take_loads
from farandole.parallel.buffers import ReplicatedBuffers, with_buffers
from farandole.parallel.checkpoint import folder as checkpoint
from farandole.parallel.checkpoint import safetensors_files
from farandole.parallel.checkpoint.folder import PendingSave, fail_on_all
from farandole.parallel.data import GradientReducer
from farandole.parallel.global_mean import GlobalMean, Loss, Step, first_of
from farandole.parallel.lora.description import Adapter, describe_adapter, trained_tensors
from farandole.parallel.lora.gather import gather_adapter
from farandole.parallel.loss_parameters import LossParameters
from farandole.parallel.loss_scaling import LossScaler, Overflow, ScaledSteps
from farandole.parallel.optimizers.offloading import OffloadedUpdate
from farandole.parallel.optimizers.rounding import StochasticRounding
from farandole.parallel.optimizers.shards import GradientNorms
from farandole.parallel.optimizers.updates import Updates
from farandole.parallel.overflow import GradientWatch, OutputWatch, OverflowReport
from farandole.parallel.pipeline.mean import PipelineMean
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.precision import cast_floating
from farandole.parallel.whole_parameters import WholeParameters, check_gradients, check_model
from farandole.parallel.zero.building import connect
from farandole.parallel.zero.hidden_parameters import unchecked
from farandole.parallel.zero.initial_values import Initialize
from farandole.parallel.zero.sharding import BUCKET_BYTES, box_mesh, moves_parameters, replicated_layouts
from farandole.parallel.zero.states import StateOptions, shard_states
from farandole.plan import Offloaded, Place


class Engine:
    """Trains `model` on the ranks of `comm`; created by `farandole.parallelize`.

    The constructor broadcasts parameters and buffers from rank 0.  Frozen parameters receive no gradients.  The
    gradient of a tied parameter is reduced once.  If a parameter has a gradient on some ranks only, the other ranks
    contribute zeros.  If no rank has a gradient, `.grad` remains None.  An engine on a single rank does not
    communicate.

    With `zero` >= 1, or if an axis shards parameters, optimizers update this rank's shards of the parameters.  The
    `.grad` of a parameter is then a placeholder, because each rank stores only a shard of the averaged gradient
    (`optimizers.shards`).  Ranks that share memory use one copy of the weights.

    Args:
        model: the model; the engine owns its parameters until `close`.
        comm: the communicator.
        bucket_bytes: the approximate size of a gradient bucket in bytes.
        compression: the compression for gradients between hosts; requires `zero=0`.
        zero: the ZeRO stage: 1 shards optimizer states and master weights, 2 also gradients, 3 also weights.
        dtype: the dtype in which the model computes (bf16, fp16).  Master weights and their gradients have the original
            dtype of the parameters, at least fp32.
        offload: where master weights and optimizer states are stored between steps: "none" (in the device's memory),
            "host" or "disk:FOLDER".
        offloaded: the data to offload.  "optimizer" selects master weights and optimizer states, "gradients" (with
            `zero` >= 2) also gradients, and "parameters" (with `zero=3`) also gradients and parameters.
        initialize: for a model on the meta device, a function that initializes one block at a time, so that each rank
            allocates only its shards (`zero.initial_values`).
        watch: whether to check each rank's gradients before they are averaged, so that `locate_nonfinite` can name the
            rank.
        rounding: stochastic rounding for updates of bf16 weights, instead of master weights.
        scaler: the loss scaler for fp16 (`loss_scaling`).
        diagnose: whether to check the outputs of blocks, so that an overflow report names the block.
        report: whether rank 0 logs one line per overflow.
        mesh: the device mesh; by default a single data axis.
        layouts: the parameter layouts by name; by default every rank has every parameter.
        pipeline: the stages of this rank, if the model is divided into stages.

    Raises:
        TypeError, ValueError: if an option is invalid, options conflict, or the model's gradients cannot be compressed.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        *,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        offload: str = "none",
        offloaded: Offloaded = "optimizer",
        initialize: Initialize | None = None,
        watch: bool = False,
        rounding: StochasticRounding | None = None,
        scaler: LossScaler | None = None,
        diagnose: bool = False,
        report: bool = True,
        mesh: Mesh | None = None,
        layouts: Mapping[str, Layout] | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        _check_options(zero, compression, rounding, offload, dtype)
        flat = moves_parameters(zero, dtype, offload, layouts or {})
        check_model(model, moved=flat)
        self.model, self.comm, self.zero, self.rank = model, comm, zero, comm.rank
        self.rounding = rounding
        self.swapped: Swap | None = None
        self._pending_save: PendingSave | None = None
        self._dtype, self._offload = dtype, Place.parse(offload)
        self.mesh = mesh = mesh or box_mesh(comm.size)
        self.layouts = with_buffers(model, layouts or replicated_layouts(model))
        groups = connect(mesh, comm, self.layouts.values(), zero)
        if pipeline is not None:
            comm.set_roles(pipeline.roles(mesh))
        options = StateOptions(
            zero=zero,
            dtype=dtype,
            flat=flat,
            bucket_bytes=bucket_bytes,
            stages=None if pipeline is None else pipeline.stages_of,
            masters="none" if rounding is not None else "memory" if offload == "none" else "offloaded",
            place=self._offload,
            offloaded=offloaded,
            compression=compression,
        )
        complete = model if pipeline is None or pipeline.complete is None else pipeline.complete
        states = shard_states(model, complete, groups, self.layouts, options, initialize)
        built, self._stores = states.built, states.stores
        self.buckets, self.shards_of_buckets = built.buckets, built.shards
        self.weights, self._gatherer = built.weights, built.gatherer
        self._trained = {id(p) for bucket in built.buckets for p in bucket.parameters}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        shared = {id(weights.comm): weights.comm for weights in built.weights if weights.shared}
        self._sharing = [each for each in shared.values() if each is not None]
        # true in every pipeline, because ranks without trained parameters also join the collectives
        self._divides = pipeline is not None or any(
            bucket.plan.ranks.holders != comm.size for bucket in built.buckets
        )
        self._whole = WholeParameters(model, built.weights, groups, built.gatherer, self.layouts)
        self._norms = GradientNorms(self.layouts, built.shards, self.device, comm if self._divides else None)
        scaler = scaler or LossScaler(enabled=False)
        gradient_watch = GradientWatch(self.layouts, built.shards) if watch or scaler.enabled else None
        self.loss_parameters = LossParameters(
            model, mesh, self.layouts, comm.rank, staged=pipeline is not None
        )
        self._steps = ScaledSteps(self, scaler, gradient_watch, diagnose=diagnose, report=report)
        self._reducer = GradientReducer(
            model,
            built.buckets,
            built.shards,
            ReplicatedBuffers(model, mesh, self.layouts, groups),
            comm,
            self._norms,
            every_pass=zero >= 2 and pipeline is None,
            by_stage=pipeline is not None,
            events=self._steps,
            gatherer=built.gatherer,
            loss_parameters=self.loss_parameters,
        )
        self.pipeline = pipeline
        self._mean = GlobalMean(self, mesh) if pipeline is None else PipelineMean(self, mesh, pipeline, dtype)
        self._updates = Updates(
            built.shards,
            comm,
            self.layouts,
            zero=zero,
            place=self._offload,
            rounding=rounding,
            before=self._before_update,
            after=self._after_update,
            discard=self._reducer.discard,
        )
        del complete
        if pipeline is not None:
            pipeline.complete = None
        if states.source is not None:
            safetensors_files.read_weights(self, states.source)
        for weights in built.weights:
            weights.use_weights()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output; floating-point inputs are cast to the model's dtype."""
        if self._reducer.all_cleared:
            self._reducer.begin_step()  # frees gradient memory for activations
        if self._dtype is not None:
            inputs, named = cast_floating((inputs, named), self._dtype)
        return self.model(*inputs, **named)

    # ---- steps and evaluations ----

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`, with a scaled loss if the precision is fp16.

        The gradients are unscaled after the last backward pass of a step.
        """
        if self._reducer.all_cleared:
            self._reducer.begin_step()
        self._steps.backward(loss)

    @contextmanager
    def scaled_backward(self) -> Iterator[float]:
        """Return a context manager that yields the loss scale.

        The caller multiplies each loss by the scale before its backward pass.
        """
        if self._reducer.all_cleared:
            self._reducer.begin_step()
        with self._steps.scaled() as scale:
            yield scale

    def forward_backward(
        self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> Step:
        """Compute the gradients of the global mean loss over all micro-batches; call this on all ranks, once per step.

            step = engine.forward_backward(batches, lambda logits, batch: (masked_sum(logits, batch), batch.mask.sum()))

        The sum of all losses is divided by the global count.  Therefore each sample or unmasked token has the same
        weight as in a single process, even if micro-batches have different sizes.  The number of micro-batches may
        differ between ranks and may be zero.

        Args:
            batches: this rank's micro-batches.
            loss: `loss(output, batch)` returns the sum of the losses in a micro-batch and their count: the number of
                samples or unmasked tokens.
            inputs: a function that returns the model's arguments for a micro-batch: a tensor, a tuple, or a mapping of
                keyword arguments.  The default returns the first element of a tuple or list, or else the batch itself.

        Returns:
            The global mean loss, the global count, and whether the update will be skipped; equal on all ranks.

        Raises:
            ValueError: on all ranks, if the global count is 0.
            RuntimeError: if gradients from an earlier call were not cleared.
            StageError: on all ranks, if a pipeline stage raises an exception.  The gradients are then cleared.
        """
        if self._reducer.reduced and not self._reducer.all_cleared:
            raise RuntimeError(
                "forward_backward computes the gradients of a whole step, but gradients from an earlier call exist: call "
                "optimizer.zero_grad() before each step, and pass all micro-batches of the step in one call"
                f"{see('gradients-from-an-earlier-call-exist')}"
            )
        return self._mean.forward_backward(batches, loss, inputs)

    def evaluate(
        self, batches: Iterable[Any], metric: Loss, inputs: Callable[[Any], Any] = first_of
    ) -> float:
        """Return the mean of `metric` over all batches on all ranks, in evaluation mode.  This is a collective call.

        See `forward_backward` for the arguments.  The number of batches may differ between ranks.

        Raises:
            StageError: on all ranks, if a pipeline stage raises an exception.
        """
        return self._mean.evaluate(batches, metric, inputs)

    @property
    def counts_loss(self) -> bool:
        """Return whether this rank's loss counts toward the mean loss over all ranks.

        If several ranks compute the same loss, this is true for exactly one of them.
        """
        return self._mean.counts

    def join_forward(self) -> None:
        """Join the other ranks in gathering weights for a forward pass; call this on a rank without inputs."""
        if self._gatherer is not None:
            self._gatherer.end_pass("forward")

    def join_backward(self, *, last: bool) -> None:
        """Join the other ranks' reductions for a backward pass; call this on a rank without gradients.

        Args:
            last: whether this is the last backward pass of the step.
        """
        self._reducer.join_pass(last=last)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager in which backward passes accumulate gradients without reducing them.

        With `zero` >= 2, gradients are still reduced in every backward pass, because unsharded gradients are not
        kept.
        """
        with self._reducer.no_sync(marks=True):
            yield

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context manager like `no_sync`; gradients must not be cleared between passes."""
        return self._reducer.no_sync()

    def completing(self, parameters: Collection[int]) -> AbstractContextManager[None]:
        """Return a context manager for backward passes within `no_sync` that complete the gradients of `parameters`.

        Buckets are reduced as soon as all their gradients are complete, while this rank computes other gradients.

        Args:
            parameters: the `id` of each parameter.  Parameters in `reduced_in_every_pass` may be completed once for
                each micro-batch, other parameters once per step.
        """
        return self._reducer.completing(parameters)

    @property
    def reduced_in_every_pass(self) -> frozenset[int]:
        """Return the `id` of each parameter whose unsharded gradient is not kept between passes (`zero` 2 and 3)."""
        return frozenset(
            id(p) for bucket in self.buckets if bucket.plan.every_pass for p in bucket.parameters
        )

    def synchronize(self) -> None:
        """Reduce the remaining buckets, and wait until all gradients are averaged.

        A backward pass outside `no_sync` calls this method.  Ranks without a backward pass must call it explicitly.
        """
        self._reducer.synchronize()

    @property
    def waited_s(self) -> float:
        """Return the total time in seconds that this rank has waited for other ranks; assign 0 to reset it."""
        return self._reducer.waited_s + (0.0 if self.pipeline is None else self.pipeline.waited_s)

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self._reducer.waited_s = seconds
        if self.pipeline is not None:
            self.pipeline.waited_s = 0.0

    @property
    def waits(self) -> Sequence[tuple[float, float]]:
        """Return (start, end) of each wait for averaged gradients in this step, in seconds of `time.perf_counter`."""
        return self._reducer.waits

    # ---- the optimizer ----

    @property
    def skipped(self) -> bool:
        """Return whether the last optimizer step was skipped because fp16 gradients overflowed."""
        return self.overflow is not None

    def will_skip(self) -> bool:
        """Return whether the next optimizer step will be skipped.  With fp16, this is a collective call."""
        if self.scaler.enabled:
            self.gradient_norm()
        return not self._steps.finite

    @property
    def overflow(self) -> Overflow | None:
        """Return the overflow that caused the last step to be skipped, or None."""
        return self._steps.overflow

    @property
    def scaler(self) -> LossScaler:
        """Return the loss scaler.  Its scale is 1 unless the precision is fp16."""
        return self._steps.scaler

    def shards(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, shard, start) for this rank's shards; `start` is the offset in the flattened parameter."""
        for shards in self.shards_of_buckets:
            yield from shards.stored()

    def updated_tensors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, tensor, start) for tensors that can have optimizer states: shards or whole parameters."""
        return self._updates.tensors()

    def optimizer(
        self, optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Make `optimizer` update this rank's shards of the model's parameters, and return `optimizer`.

            optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
            optimizer = engine.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))

        If the plan shards parameters, the optimizer must update every element independently (SGD, Adam, AdamW) or every
        parameter independently (Muon, Adafactor; see `optimizers.owned_parameters`).  If states are offloaded, the
        optimizer must update every element independently.  Existing optimizer states must be equal on all ranks.

        `optimizer.step()` waits for the averaged gradients and returns when all ranks have the updated weights.  If
        `step` receives a closure, `step` returns the mean loss over all ranks.

        With offloading, this method moves master weights and states to the offload store.  It is then a collective call.

        Args:
            optimizer: an optimizer of the model's parameters, or a function that creates one from the list of all
                parameters that the engine trains.

        Raises:
            TypeError: if `optimizer` is a class, or neither an optimizer nor a function that returns one.
            ValueError: if the optimizer would compute different results with shards, or has parameters of another
                model.
            OffloadError: if the disk or the host memory has too little space for the states.
        """
        optimizer = self._updates.add(optimizer, self.model)
        if any(update.state.weights for update in self.offloaded):
            self._whole.masters_are_elsewhere()
        return optimizer

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers passed to `optimizer`."""
        return self._updates.optimizers

    @property
    def offloaded(self) -> list[OffloadedUpdate]:
        """Return the `OffloadedUpdate` of each optimizer whose states are offloaded."""
        return self._updates.offloaded

    def _before_update(self) -> bool:
        """Finish averaging the gradients of a step; return False if the update is skipped."""
        self.synchronize()
        self._end_pass()
        with unchecked():
            self._whole.check()
            check_gradients(self.model, self._trained)
            for shards in self.shards_of_buckets:
                shards.before_update()
        self._steps.decide()
        for ranks in self._sharing:  # all ranks must finish reading weights before the update
            ranks.barrier()
        return not self.skipped

    def _after_update(self) -> None:
        if self.skipped:
            return
        self.all_gather_parameters()
        if self._reducer.buffers_changed:
            self._reducer.buffers.average()

    def all_gather_parameters(self, *, frozen: bool = False) -> None:
        """All-gather the updated shards of parameters; `optimizer.step` calls this method.

        Args:
            frozen: also gather the shards of frozen parameters.
        """
        self._end_pass()
        changed = [each for each in self.weights if frozen or each.trained]
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
        """Return a context manager within which data-parallel ranks can run the model independently.

        All ranks must enter and exit the context together.  Ranks along other axes must run the model together,
        because the model and its sequences remain split over these axes.
        """
        with self._whole.gathered():
            yield

    def edit_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager for changing the unsharded parameters in place, under `torch.no_grad()`.

        All ranks must make the same changes.  The optimizer continues from the new values.  Each rank needs memory for
        all parameters.

        Raises:
            RuntimeError: if the master weights are offloaded.
        """
        self._end_pass()
        return self._whole.edit()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state with unsharded parameters, for `model.load_state_dict`.

        This is a collective call.

        If the model is divided into stages, the state contains the stages of this rank.  Parameters have the dtype of
        the master weights or, if optimizer states are offloaded, the dtype in which the model computes.
        """
        self._end_pass()
        return self._whole.state_dict()

    def whole_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, unsharded value), gathering one bucket or parameter at a time.

        All ranks must iterate together.
        """
        self.loss_parameters.show()
        yield from self._whole.values()

    def _end_pass(self) -> None:
        """Release gathered weights, and show the parameters that are hidden from the loss."""
        self.loss_parameters.show()
        self._whole.release()

    # ---- checkpoints ----

    def save(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        on_saved: Callable[[], None] | None = None,
    ) -> PendingSave:
        """Write the state of the model and its optimizers to a new folder.  This is a collective call.

        The checkpoint contains parameters, buffers, optimizer states and settings, the loss scale, the states of the
        random number generators, the extra states of modules (`get_extra_state`), and `extra`.  It omits buffers that
        a forward pass has created or resized, and extra states that `torch.load(weights_only=True)` could not read;
        warnings name these buffers and modules.  The folder receives its final name when it is complete.

        Args:
            folder: a folder that does not exist yet, on a file system that all ranks share.
            extra: values that can be serialized as JSON, such as the position in the data.
            asynchronous: copy the state to host memory, and write the copy in a thread while training continues.  The
                checkpoint is on disk when the returned object's `wait`, the next `save` or `load`, or `close` returns.
                Offloaded states are not copied but written before `save` returns.
            on_saved: a function that the writing thread calls on rank 0 when the folder is complete.  If the function
                raises an exception, the save fails.

        Returns:
            The pending save; it is already complete unless `asynchronous` is set.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.  With `asynchronous`, `wait`
                raises the error.
        """
        self._wait_for_save()
        self.loss_parameters.show()
        path = Path(folder).expanduser()
        pending = checkpoint.save(self, path, extra or {}, on_saved, background=asynchronous)
        self._pending_save = pending if asynchronous else None
        return pending

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restore a checkpoint that was saved under any plan and with any number of ranks.  This is a collective call.

        Call `optimizer` for every optimizer before `load`.

        Args:
            folder: the folder of the checkpoint.

        Returns:
            The `extra` values passed to `save`.

        Raises:
            CheckpointError: on all ranks, if the checkpoint cannot be read or belongs to another model, or if LoRA
                adapters are merged only in the checkpoint or only in the model.  The error is an `UnreadableError` if
                files are missing or damaged; in this case, the engine is unchanged.
        """
        self._wait_for_save()
        self.loss_parameters.show()
        return checkpoint.load(self, Path(folder).expanduser())

    def export(self, folder: str | Path, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30) -> None:
        """Write parameters and buffers to safetensors files in a new folder, for other programs.

        Buffers that a forward pass has created or resized are not written.  This is a collective call.

        Args:
            dtype: the dtype of floating-point tensors, except router biases; by default the dtype of the master
                weights.
            file_bytes: the maximum file size in bytes; a larger model is written to several files with an index.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
        """
        safetensors_files.export(self, Path(folder).expanduser(), dtype, file_bytes)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30
    ) -> None:
        """Write a new Hugging Face folder that `transformers` can load.  This is a collective call.

        LoRA adapters are merged into the written weights.  The tokenizer files are copied from the folder from which
        the model was created.  No rank holds the unsharded model.

        Args:
            dtype: the dtype of floating-point weights, except router biases; by default the dtype of the master
                weights.
            file_bytes: the maximum file size in bytes; a larger model is written to several files with an index.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written.
            ValueError: if the model has no Hugging Face format, or has quantized weights.
        """
        safetensors_files.save_pretrained(self, Path(folder).expanduser(), dtype, file_bytes)

    def save_adapter(self, folder: str | Path, base_model: str | None = None) -> None:
        """Write the LoRA adapters in PEFT format.  This is a collective call.

        Args:
            base_model: the base model's name in the PEFT configuration; by default the folder from which the model was
                created.

        Raises:
            CheckpointError: on all ranks, if the adapter cannot be written.
            ValueError: if the model has no LoRA adapter.
        """
        from farandole.parallel.lora.peft_adapter import write_adapter  # requires the extra `train`

        adapter = self.adapter
        values = trained_tensors(self.model, adapter)
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.loss_parameters.show()
        for parameter, value in self._whole.values(lambda p: p.requires_grad):
            complete = value.clone()
            values |= {name: complete for name in names[id(parameter)] if name in values}
        path = Path(folder).expanduser()
        with fail_on_all(self.comm, path):
            values = gather_adapter(adapter, values, self.comm, self.device)
            if self.comm.rank == 0:
                write_adapter(adapter, values, path, base_model)

    @property
    def adapter(self) -> Adapter:
        """Return the description of the model's LoRA adapter.

        Raises:
            ValueError: if the model has no LoRA adapter.
        """
        found = describe_adapter(self.model) if self.pipeline is None else self.pipeline.adapter
        if found is None:
            raise ValueError("the model has no LoRA adapters: use a plan with lora=LoRA(...)")
        return found

    def load_weights(self, path: str | Path) -> None:
        """Load parameters and buffers from a safetensors file, or from the files in a folder.

        This is a collective call.

        Each rank reads only its own shards.  Optimizer states are unchanged.

        Raises:
            CheckpointError: on all ranks, if files are damaged or belong to another model.  The engine is then
                unchanged.
        """
        self.loss_parameters.show()
        safetensors_files.load_weights(self, Path(path).expanduser())

    def remember_parameters(self) -> None:
        """Accept changed parameters; the same changes must already have been made to the master weights.

        Without this call, the next update would raise an error about changed parameters.
        """
        self._whole.remember()

    def _wait_for_save(self) -> None:
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.wait()

    def metadata(self) -> dict[str, Any]:
        """Return the non-tensor contents of a checkpoint, for `restore_metadata`."""
        return {
            "scaler": {"enabled": self.scaler.enabled, **self.scaler.state_dict()},
            "rounding_steps": self.rounding.steps if self.rounding is not None else 0,
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "groups": self._updates.settings(),
            "count": self._mean.expected,
        }

    def restore_metadata(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `metadata`."""
        scaler = saved["scaler"]
        was_enabled = scaler.get("enabled", scaler["scale"] != 1)  # missing in earlier versions
        if self.scaler.enabled and was_enabled:
            self.scaler.load_state_dict(scaler)
        if self.rounding is not None:
            self.rounding.steps = saved["rounding_steps"]
        self._updates.restore_settings(saved["groups"])
        self._mean.expected = saved.get("count")  # missing in checkpoints of earlier versions

    def has_layout(self, name: str, buffer: Tensor) -> bool:
        """Return whether a layout describes `buffer`; False if a step has created or resized the buffer."""
        return self._reducer.buffers.has_layout(name, buffer)

    def accept_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Mark the current values of `buffers` as averaged; all ranks must have made the same changes."""
        self._reducer.buffers.accept(buffers)

    # ---- gradients ----

    def gradients(self) -> list[Tensor]:
        """Return the averaged gradients or, if gradients are sharded, this rank's shards.

        Offloaded gradients are read into memory.  The gradients stay in memory until the next step and can be changed
        in place.

        Raises:
            RuntimeError: if the last backward pass ran within `no_sync`, so that gradients are not averaged.
        """
        self._check_averaged("gradients")
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.holds_result:
                _ = bucket.reduced
        return [gradient for shards in self.shards_of_buckets for _, gradient in shards.set()]

    def gradient_norm(self) -> float:
        """Return the global norm of all averaged gradients, equal on all ranks.  This is a collective call.

        Gradients of passes within `no_sync` are averaged first.  With fp16, the norm is infinite or NaN if the step
        will be skipped.
        """
        if self._reducer.any_unfinished():
            self.synchronize()
        self._steps.norm = self._norms.total()
        return self._steps.norm

    def locate_nonfinite(self, outputs: OutputWatch | None = None) -> OverflowReport:
        """Return a report that names the rank and the parameter with non-finite gradients.  This is a collective call.

        Call this method before the update.

        Raises:
            RuntimeError: if the engine was created without `watch`.
        """
        if self._steps.watch is None:
            raise RuntimeError(
                "locate_nonfinite requires an engine that checks gradients: create the engine with watch=True"
            )
        return self._steps.watch.locate(self.comm, outputs)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`, unless an overflow was found and the step will be skipped.

        Raises:
            RuntimeError: if the last backward pass ran within `no_sync`, so that gradients are not averaged.
        """
        self._check_averaged("scale_gradients")
        if self._steps.finite:
            self.scale_all(factor)

    def scale_all(self, factor: float) -> None:
        """Multiply all gradients by `factor`, even after an overflow."""
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.holds_result:
                bucket.scale(factor)

    def _check_averaged(self, name: str) -> None:
        if self._reducer.is_unfinished:
            raise RuntimeError(
                f"engine.{name}: gradients are not averaged yet, because the last backward pass ran within no_sync; call "
                "engine.synchronize() on all ranks first"
            )

    def clip(self, max_norm: float) -> float:
        """Clip the global norm of the gradients to `max_norm`; return the norm before clipping."""
        norm = self.gradient_norm()
        if norm > max_norm:
            self.scale_gradients(max_norm / norm)
        return norm

    def zero_grad(self) -> None:
        """Set all gradients to None to start the next step; equivalent to `optimizer.zero_grad()`."""
        self._reducer.begin_step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None; the gradient memory is released in the next step."""
        for shards in self.shards_of_buckets:
            shards.clear_gradients()

    # ---- mixtures of experts ----

    def take_router_loads(self) -> dict[str, RouterLoad]:
        """Return all router loads since the last call, and balance the experts of grouped routers.

        Call this method once per step, on all ranks.  The result is equal on all ranks, and includes the routers of
        other pipeline stages.  See `models.moe.take_loads`.
        """
        experts = None if self.pipeline is None else self.pipeline.experts
        return take_loads(self.model, self.comm.all_reduce if self.comm.size > 1 else None, experts)

    # ---- compression ----

    def compression_state(self) -> dict[str, Tensor]:
        """Return this rank's compression state by name, for `load_compression`."""
        return {
            f"{number}.{name}": value
            for number, bucket in enumerate(self.buckets)
            if bucket.compressor is not None
            for name, value in bucket.compressor.state.items()
        }

    def load_compression(self, state: Mapping[str, Tensor]) -> None:
        """Restore this rank's compression state."""
        for number, bucket in enumerate(self.buckets):
            if bucket.compressor is not None:
                own = f"{number}."
                bucket.compressor.load(
                    {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
                )

    def rescale(self, factor: float) -> None:
        """Multiply the compression residuals by `factor`, after the loss scale has changed."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                bucket.compressor.scale_residuals(factor)

    # ---- other ----

    def swap(self, swap: Swap) -> None:
        """Attach an activation swap to the engine; `close` also closes the swap."""
        self.swapped = swap
        if self._gatherer is not None:
            self._gatherer.keep_others(swap.pack, swap.unpack)

    def close(self) -> None:
        """Finish saving, remove the engine's hooks and gradients from the model, and close the offload stores."""
        self._wait_for_save()
        self._steps.close()
        self._reducer.close()
        if self.pipeline is not None:
            self.pipeline.close()
            self.comm.set_roles([""] * self.comm.size)
        if self.swapped is not None:
            self.swapped.close()
        if self._gatherer is not None:
            self._gatherer.close()
        self.loss_parameters.close()
        self._whole.close()
        self._updates.close()
        self.zero_grad()
        self._stores.close()


def _check_options(
    zero: int,
    compression: Compression | None,
    rounding: StochasticRounding | None,
    offload: str,
    dtype: torch.dtype | None,
) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"expected zero=0, 1, 2 or 3, got {zero}")
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression={compression!r}: expected a Compression (Cast, Int8, TopK, PowerSGD) or None"
        )
    if compression is not None and zero:
        raise ValueError(f"compression cannot be combined with zero={zero}: use zero=0, or omit compression")
    if rounding is not None and offload != "none":
        raise ValueError(
            f"offload={offload!r} cannot be combined with stochastic rounding, which has no master weights to offload: "
            "use offload='none'"
        )
    if rounding is not None and dtype is not torch.bfloat16:
        raise ValueError(f"stochastic rounding requires dtype=torch.bfloat16, got dtype={dtype}")
