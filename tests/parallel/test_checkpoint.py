"""A checkpoint that is saved under any plan loads under every other plan, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import shutil
import zlib
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import farandole
from farandole import Plan
from farandole.comm.communicator import Communicator
from farandole.memory.disk import OffloadError
from farandole.parallel.checkpoint import folder as checkpoint
from farandole.parallel.checkpoint import state as engine_state
from farandole.parallel.checkpoint import storage
from farandole.parallel.checkpoint.errors import CheckpointError, UnreadableError
from farandole.parallel.checkpoint.ranges import Range, TensorBoxes
from farandole.parallel.engine import Engine
from tests.comm.hosts import hierarchical_group, on_hosts

STEPS = 3
Way = tuple[int, str, int, str, str]
"""The number of ranks; the backend with an optional `data_shard`, or the host of each rank (for `data_shard="host"`);
the ZeRO stage; the precision; and the place of offloading, followed by what is offloaded in addition to optimizer
states."""


class Net(nn.Module):
    """A channels_last convolution, a BatchNorm, a frozen layer, a tied weight, a scalar and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.frozen = nn.Linear(6, 7)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(7, 9, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.convolution(x))).mean((2, 3))
        hidden = torch.tanh(self.first(torch.tanh(self.frozen(x)))) * self.scale
        return F.linear(hidden, self.first.weight.t())


def _make(way: Way, seed: int) -> tuple[Engine, torch.optim.Optimizer]:
    _, backend, zero, precision, offload = way
    _, _, data_shard = backend.partition(" data_shard=")
    torch.manual_seed(seed)
    model = Net()
    place, _, offloaded = offload.partition(" ")
    hosts = [int(host) for host in backend.split()] if _on_hosts(way) else []
    plan = Plan(
        zero=zero,
        data_shard=int(data_shard) if data_shard else "host" if hosts else "all",
        precision=precision,  # type: ignore[arg-type]
        offload=place,
        offloaded=offloaded or "optimizer",  # type: ignore[arg-type]
    )
    if hosts:
        rank = dist.get_rank()
        comm = Communicator(hierarchical_group(hosts, rank))
        with on_hosts(hosts, rank):
            engine = farandole.parallelize(model, plan, comm)
    else:
        engine = farandole.parallelize(model, plan)
    assert bool(engine.mesh.sub_axes) == bool(hosts or data_shard)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return engine, engine.optimizer(torch.optim.AdamW(trained, 0.01 * seed, fused=offload == "none"))


def _on_hosts(way: Way) -> bool:
    return way[1][:1].isdigit()


def _backend(way: Way) -> str:
    return "farandole" if _on_hosts(way) else way[1].partition(" ")[0]


def _train(engine: Engine, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    """Train on the same samples on every rank, so that gradients depend on the number of ranks only by rounding."""
    losses = []
    for step in range(first, first + steps):
        batch = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _contents(engine: Engine) -> dict[str, Tensor]:
    """Return the complete contents of the checkpoint, assembled from the parts of all ranks."""
    state = {
        name: value
        for name, value in engine_state.state_of(engine, engine.rank).items()
        if not name.startswith("random")
    }
    mine: dict[str, Any] = {
        name: (found.place.shape, found.start, found.values.clone())
        if isinstance(found, Range)
        else found.clone()
        for name, found in state.items()
    }
    whole: dict[str, Tensor] = {}
    for part in engine.comm.all_gather_object(mine):
        for name, found in part.items():
            if isinstance(found, Tensor):
                whole[name] = found
            else:
                shape, start, values = found
                room = whole.setdefault(
                    name,
                    torch.full(shape, -1 if values.dtype is torch.int64 else torch.nan, dtype=values.dtype),
                )
                room.view(-1)[start : start + len(values)] = values
    return whole


def _save(rank: int, size: int, way: Way, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    engine, optimizer = _make(way, seed=1)
    _train(engine, optimizer, 0, STEPS)
    engine.save(folder / "state", {"position": 17, "note": "after three steps"})
    contents = _contents(engine)
    losses = _train(engine, optimizer, STEPS, 2)
    dist.barrier()
    engine.close()
    return contents, losses


def _output(engine: Engine) -> Tensor:
    """Return an output of the model, which depends on all weights."""
    batch = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(99))
    engine.model.eval()
    with torch.no_grad():
        output: Tensor = engine(batch).float()
    engine.model.train()
    return output


Loaded = tuple[dict[str, Tensor], list[float]]
"""The contents of an engine after a checkpoint was loaded, and the losses of the next steps."""


def _load(rank: int, size: int, way: Way, *folders: Path) -> list[Loaded]:
    """Load checkpoints one after another into an engine that has other states."""
    engine, optimizer = _make(way, seed=2)
    results = []
    for folder in folders:
        _train(engine, optimizer, 7, 1)
        assert engine.load(folder / "state") == {"position": 17, "note": "after three steps"}
        assert optimizer.param_groups[0]["lr"] == 0.01
        contents = _contents(engine)
        results.append((contents, _train(engine, optimizer, STEPS, 2)))
    dist.barrier()
    engine.close()
    return results


PLAIN: list[Way] = [(1, "farandole", 0, "fp32", "none"), (2, "farandole", 0, "fp32", "none")]
WAYS: list[Way] = [
    *PLAIN,
    (2, "farandole", 1, "fp32", "none"),
    (4, "farandole", 2, "fp32", "none"),
    (3, "gloo", 3, "fp32", "none"),
    (2, "farandole", 2, "bf16", "none"),
    (2, "gloo", 3, "bf16", "none"),
    (2, "farandole", 2, "fp16", "none"),
    (2, "farandole", 2, "fp32", "host"),
    (4, "0 0 1 1", 1, "fp32", "none"),
    (4, "0 1 1 0", 3, "fp32", "none"),
    (4, "0 0 1 1", 2, "bf16", "none"),
    (4, "farandole data_shard=2", 2, "fp32", "none"),
    (4, "gloo data_shard=2", 3, "fp32", "none"),
    (2, "farandole", 2, "fp32", "host gradients"),
    (1, "farandole", 3, "fp32", "host parameters"),
    (2, "gloo", 3, "bf16", "host parameters"),
]


@pytest.fixture(scope="module")
def checkpoints(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, tuple[Path, Loaded]]:
    """Return a checkpoint of every plan, with its contents and the losses of the next steps."""
    saved = {}
    for way in WAYS:
        folder = tmp_path_factory.mktemp("checkpoint")
        saved[way] = folder, ranks(way[0], _backend(way)).run(_save, way, folder)[0]
    return saved


@pytest.mark.parametrize(
    "shifts", [(0, 1, 4), pytest.param(range(len(WAYS)), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("after", WAYS, ids=str)
def test_a_checkpoint_of_any_plan_loads_under_any_other_plan(
    ranks: Any, checkpoints: dict[Way, tuple[Path, Loaded]], after: Way, shifts: Sequence[int]
) -> None:
    """Each plan loads the checkpoints of three plans, and in the slow test those of all plans."""
    sources = [WAYS[(WAYS.index(after) + shift) % len(WAYS)] for shift in shifts]
    folders = [checkpoints[before][0] for before in sources]
    for results in ranks(after[0], _backend(after)).run(_load, after, *folders):
        for before, (contents, found) in zip(sources, results, strict=True):
            _, (expected, losses) = checkpoints[before]
            assert contents.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(contents[name], value.to(contents[name].dtype)), f"{before}: {name}"
            if "fp32" in before and "fp32" in after:
                assert found == pytest.approx(losses, rel=1e-4), before


def test_offloaded_states_in_files(ranks: Any, tmp_path: Path) -> None:
    disk: Way = (2, "farandole", 2, "fp32", f"disk:{tmp_path}")
    for before, after in (
        (disk, PLAIN[0]),
        (PLAIN[1], disk),
        (disk, (4, "farandole", 1, "bf16", f"disk:{tmp_path}")),
        (disk, (2, "farandole", 3, "fp32", f"disk:{tmp_path} parameters")),
        ((4, "farandole", 3, "fp32", f"disk:{tmp_path} parameters"), PLAIN[1]),
        ((2, "gloo", 3, "bf16", f"disk:{tmp_path} parameters"), disk),
    ):
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        (expected, losses), *_ = ranks(before[0]).run(_save, before, tmp_path)
        for ((contents, found),) in ranks(after[0]).run(_load, after, tmp_path):
            assert contents.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(contents[name], value.to(contents[name].dtype)), name
            assert found == pytest.approx(losses, rel=1e-4 if "fp32" in before and "fp32" in after else 5e-2)


def _flat(engine: Engine, rank: int) -> engine_state.State:
    """Return the state as versions up to 2026-11 saved it: flat tensors, and neither buffers nor frozen parameters."""
    state: engine_state.State = {}
    left_out = {f"model.{name}" for name, _ in engine.model.named_buffers()}
    left_out |= {f"model.{n}" for n, p in engine.model.named_parameters() if not p.requires_grad}
    for name, found in _STATE_OF(engine, rank).items():
        if name in left_out:
            continue
        if isinstance(found, Range):
            count = int(torch.Size(found.place.shape).numel())
            found = dataclasses.replace(found, place=TensorBoxes.whole((count,)))
        state[name] = found
    return state


_STATE_OF = engine_state.state_of


def _save_flat(rank: int, size: int, way: Way, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    engine, optimizer = _make(way, seed=1)
    _train(engine, optimizer, 0, STEPS)
    with mock.patch.object(checkpoint, "state_of", _flat):
        engine.save(folder / "state", {"position": 17, "note": "after three steps"})
    contents = _contents(engine)
    dist.barrier()
    engine.close()
    return contents, []


def test_flat_tensors_of_earlier_versions_are_read(ranks: Any, tmp_path: Path) -> None:
    (expected, _), *_ = ranks(2).run(_save_flat, (2, "farandole", 2, "fp32", "none"), tmp_path)
    for way in (PLAIN[0], (4, "farandole", 3, "fp32", "none"), (2, "gloo", 3, "fp32", "none")):
        for ((contents, _),) in ranks(way[0], way[1]).run(_load, way, tmp_path):
            for name, value in expected.items():
                if name.startswith("optimizer") or "first" in name or "convolution" in name:
                    assert torch.equal(contents[name], value), name


def _refusals(rank: int, size: int, folder: Path) -> None:
    engine, optimizer = _make((2, "", 2, "fp32", "none"), seed=1)
    _train(engine, optimizer, 0, 1)
    engine.save(folder / "state")
    with pytest.raises(
        CheckpointError,
        match=r"state: the folder exists; choose another name, or remove the folder first \(rank 0\)",
    ):
        engine.save(folder / "state")
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        engine.save(folder / "other", {"generator": torch.Generator()})
    with pytest.raises(
        CheckpointError, match="the folder does not exist, or is not a complete engine checkpoint"
    ):
        engine.load(folder / "nowhere")
    (folder / "file").touch()
    dist.barrier()
    with pytest.raises(CheckpointError, match="file is not a folder"):
        engine.save(folder / "file" / "state")
    before = _contents(engine)
    other = farandole.parallelize(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="has no parameter (weight|bias): it belongs to another model"):
        other.load(folder / "state")
    momentum = farandole.parallelize(Net())
    momentum.optimizer(torch.optim.SGD(momentum.model.parameters(), 0.1))
    with pytest.raises(
        CheckpointError,
        match=r"the state of AdamW with \[1\] parameter groups, but the engine has SGD with \[1\]",
    ):
        momentum.load(folder / "state")
    larger = Net()
    larger.first = nn.Linear(7, 10, bias=False)
    with pytest.raises(
        CheckpointError,
        match=r"model.first.weight has shape \(9, 7\) in the checkpoint, but \(10, 7\) in this model",
    ):
        farandole.parallelize(larger).load(folder / "state")
    dist.barrier()
    metadata = folder / "state" / "engine.json"
    text = metadata.read_text()
    dist.barrier()
    if rank == 0:
        metadata.write_text(text.replace('"version": 1', '"version": 2'))
    dist.barrier()
    with pytest.raises(CheckpointError, match="expected format version 1 or lower, got version 2"):
        engine.load(folder / "state")
    dist.barrier()
    if rank == 0:
        metadata.write_text(text)
        largest = max((folder / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:500])
    dist.barrier()
    _train(engine, optimizer, 5, 1)
    changed = _contents(engine)
    with pytest.raises(CheckpointError, match="state: "):
        engine.load(folder / "state")
    after = _contents(engine)
    assert all(torch.equal(changed[name], after[name]) for name in changed)  # nothing was partially loaded
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "state"]


def test_invalid_saves_and_loads_are_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_refusals, tmp_path)


FAILURES: list[tuple[BaseException, type[CheckpointError]]] = [
    (PermissionError(13, "Permission denied"), CheckpointError),
    (OSError(5, "Input/output error"), CheckpointError),
    (MemoryError("no memory"), CheckpointError),
    (FileNotFoundError(2, "No such file"), UnreadableError),
    (zlib.error("invalid block type"), UnreadableError),
    (pickle.UnpicklingError("invalid load key"), UnreadableError),
]


def _fail_to_read(rank: int, size: int, folder: Path) -> None:
    engine, optimizer = _make((2, "", 1, "fp32", "none"), seed=1)
    _train(engine, optimizer, 0, 1)
    engine.save(folder / "state")
    before = _contents(engine)
    for failure, kind in FAILURES:
        with (
            mock.patch.object(FileSystemReader, "read_data", side_effect=failure)
            if rank == 1
            else nullcontext(),
            pytest.raises(CheckpointError, match="state: ") as found,
        ):
            engine.load(folder / "state")
        assert type(found.value) is kind, (failure, found.value)
    for name, value in _contents(engine).items():
        assert torch.equal(value, before[name]), name


def test_failures_to_read(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_fail_to_read, tmp_path)


def _fail_to_read_offloaded(rank: int, size: int, folder: Path) -> None:
    engine, optimizer = _make((2, "", 1, "fp32", "none"), seed=1)
    _train(engine, optimizer, 0, 1)
    engine.save(folder / "state")
    expected = _contents(engine)
    engine.close()
    engine, optimizer = _make((2, "", 1, "fp32", f"disk:{folder}"), seed=2)
    _train(engine, optimizer, 0, 1)
    before = _contents(engine)
    read, calls = storage.read_state, len(engine.offloaded[0].state.units)
    failure = OSError(5, "Input/output error")
    for good in (0, calls):  # the first failure is found by the check, the second one while states change
        fail_later = mock.Mock(side_effect=[*[None] * good, failure])
        with (
            mock.patch.object(storage, "read_state", lambda *args, fail=fail_later: fail() or read(*args))
            if rank == 1
            else nullcontext(),
            pytest.raises(
                CheckpointError, match=r"state: \[Errno 5\] Input/output error \(rank 1\)"
            ) as found,
        ):
            engine.load(folder / "state")
        assert type(found.value) is CheckpointError
        if not good:
            for name, value in _contents(engine).items():
                assert torch.equal(value, before[name]), name
    with pytest.raises(OffloadError, match="load was interrupted"):
        _train(engine, optimizer, 1, 1)
    optimizer.zero_grad()
    engine.load(folder / "state")
    for name, value in _contents(engine).items():
        assert torch.equal(value, expected[name]), name


def test_failures_to_read_offloaded_states(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_fail_to_read_offloaded, tmp_path)


def _save_and_load_empty(rank: int, size: int, folder: Path) -> None:
    """Save and load a model with a parameter and a buffer without elements, under other plans."""

    def make(zero: int) -> tuple[Engine, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        model[0].register_buffer("nothing", torch.empty(2, 0))
        engine = farandole.parallelize(model, Plan(zero=zero))
        return engine, engine.optimizer(torch.optim.AdamW(model.parameters()))

    def train(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        (engine(torch.ones(2, 3)).sum() + engine.model[0].empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for before, after in ((0, 0), (0, 2), (1, 0)):
        engine, optimizer = make(before)
        train(engine, optimizer)
        engine.save(folder / f"state{before}{after}")
        engine.export(folder / f"weights{before}{after}")
        expected = engine.state_dict()
        engine.close()
        assert set(load_file(folder / f"weights{before}{after}" / "model.safetensors")) == set(expected)
        engine, optimizer = make(after)
        for load, name in ((engine.load, "state"), (engine.load_weights, "weights")):
            load(folder / f"{name}{before}{after}")
            found = engine.state_dict()
            assert all(torch.equal(value, found[name]) for name, value in expected.items())
            train(engine, optimizer)
        engine.close()


def test_parameters_without_elements(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_save_and_load_empty, tmp_path)


def _load_into_new_engine(rank: int, size: int, folder: Path) -> None:
    ways: list[Way] = [
        (size, "farandole", zero, "fp32", place) for zero in (0, 2) for place in ("none", "host")
    ]
    for number, (before, after) in enumerate(itertools.product(ways, ways)):
        engine, optimizer = _make(before, seed=1)
        _train(engine, optimizer, 0, 2)
        engine.save(folder / str(number))
        expected = _train(engine, optimizer, 2, 2)
        engine.close()
        engine, optimizer = _make(after, seed=2)  # without steps, which would create the optimizer states
        engine.load(folder / str(number))
        assert _train(engine, optimizer, 2, 2) == pytest.approx(expected, rel=1e-4), (before, after)
        engine.close()


def test_a_new_engine_loads_the_states_of_a_scalar(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_load_into_new_engine, tmp_path)


def _save_and_load_settings(rank: int, size: int, folder: Path) -> None:
    def make(rate: float, beta: float) -> tuple[Engine, torch.optim.Optimizer]:
        model = nn.Linear(3, 1)
        engine = farandole.parallelize(model)
        betas = torch.tensor(beta), torch.tensor(beta)
        rates = torch.tensor(rate)
        return engine, engine.optimizer(torch.optim.AdamW(model.parameters(), rates, betas, foreach=False))

    make(0.25, 0.5)[0].save(folder / "state")
    engine, optimizer = make(0.75, 0.125)
    [group] = optimizer.param_groups
    before = group["lr"], *group["betas"]
    engine.load(folder / "state")
    after = group["lr"], *group["betas"]
    assert [value.item() for value in after] == [0.25, 0.5, 0.5]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_settings_that_are_tensors(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(_save_and_load_settings, tmp_path)


class _Fixed(nn.Linear):
    """A layer whose extra state can be read, but not set."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.0}


class _Scaled(_Fixed):
    """A layer with a state that is neither a parameter nor a buffer."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _extra_states(rank: int, size: int, folder: Path, plan: Plan, values: list[Any] | None) -> Any:
    """Save `values` as the extra states of layers, or load and return the extra states; also return warnings."""
    model = nn.Sequential(_Fixed(4, 4), *(_Scaled(4, 4) for _ in range(3)))
    scaled = {str(number + 1): layer for number, layer in enumerate(list(model)[1:])}
    with (
        mock.patch.object(checkpoint, "warn_once") as warned,
        closing(farandole.parallelize(model, plan)) as engine,
    ):
        if values is None:
            engine.load(folder)
        else:
            for layer, value in zip(scaled.values(), values, strict=True):
                layer.extra = value
            engine.save(folder)
        kept = {id(module) for module in model.modules()}
        states = {path: layer.extra for path, layer in scaled.items() if id(layer) in kept}
    return states, [call.args[0] for call in warned.call_args_list]


def test_extra_states_of_modules_are_saved(ranks: Any, tmp_path: Path) -> None:
    values = [{"scale": torch.arange(3.0), "steps": [1, 2]}, "text", object]  # `object` is a class, not data
    plans = [(2, Plan(pipeline=2)), (2, Plan(zero=2)), (1, Plan())]
    for number, (size, plan) in enumerate(plans):
        for _, warnings in ranks(size).run(_extra_states, tmp_path / str(number), plan, values):
            for text in warnings:
                assert text.startswith("the checkpoint does not contain the extra state of ")
            assert warnings or plan.pipeline == 2
        for other, plan in plans:
            loaded = ranks(other).run(_extra_states, tmp_path / str(number), plan, None)
            found = {path: value for states, _ in loaded for path, value in states.items()}
            torch.testing.assert_close(found["1"], values[0])
            assert (found["2"], found["3"]) == ("text", None)


class _Caching(nn.Module):
    """A layer, and persistent buffers that the forward pass creates or extends to the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("unset", None)
        self.register_buffer("longer", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.unset, self.longer = torch.ones(len(x)), torch.ones(len(x))
        output: Tensor = self.layer(x) * self.longer[:, None]
        return output


def _saves_caches(rank: int, size: int, folder: Path) -> None:
    """Check that the ranks can save, and that both the same engine and a new engine can load."""
    model = _Caching()
    engine = farandole.parallelize(model, Plan(zero=2))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    engine(torch.ones(2 + rank, 3)).sum().backward()
    optimizer.step()
    with mock.patch.object(checkpoint, "warn_once") as warned:
        engine.save(folder / "state")
    engine.export(folder / "exported")
    engine.load(folder / "state")
    engine.load_weights(folder / "exported")
    assert len(model.unset) == len(model.longer) == 2 + rank
    ((text,), _) = warned.call_args
    assert text.startswith(
        "the checkpoint does not contain the buffers unset, longer, because the forward pass"
    )
    again = _Caching()
    resumed = farandole.parallelize(again, Plan(zero=2))
    resumed.load(folder / "state")
    resumed.load_weights(folder / "exported")
    assert again.unset is None
    assert again.longer.tolist() == [0.0]
    with engine.whole(), resumed.whole():
        assert torch.equal(again.layer.weight, model.layer.weight)
    engine.close()
    resumed.close()


def test_buffers_that_a_step_creates_or_resizes_are_not_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_saves_caches, tmp_path)
