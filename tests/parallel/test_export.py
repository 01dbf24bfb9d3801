"""Safetensors files of an engine, and checkpoints that are written while training goes on."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farandole.parallel.checkpoint import folder as checkpoint
from farandole.parallel.checkpoint import storage
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.engine import Engine
from tests.parallel.test_checkpoint import STEPS, Net, Way, _contents, _make, _output, _train

WAYS: list[Way] = [
    (1, "farandole", 0, "fp32", "none"),
    (2, "farandole", 0, "bf16", "none"),
    (2, "farandole", 3, "fp32", "none"),
    (2, "gloo", 1, "bf16", "none"),
    (3, "gloo", 3, "fp32", "none"),
]


def _export(
    rank: int, size: int, way: Way, folder: Path, file_bytes: int
) -> tuple[dict[str, Tensor], Tensor]:
    engine, optimizer = _make(way, seed=1)
    _train(engine, optimizer, 0, STEPS)
    engine.export(folder, file_bytes=file_bytes)
    state, output = engine.state_dict(), _output(engine)
    engine.close()
    return state, output


def _import(rank: int, size: int, way: Way, path: Path) -> tuple[dict[str, Tensor], Tensor]:
    engine, optimizer = _make(way, seed=2)
    _train(engine, optimizer, 7, 1)
    engine.load_weights(path)
    state, output = engine.state_dict(), _output(engine)
    _train(engine, optimizer, 8, 1)
    engine.close()
    return state, output


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("file_bytes", [1 << 30, 300])
def test_other_tools_read_exported_files(ranks: Any, tmp_path: Path, way: Way, file_bytes: int) -> None:
    folder = tmp_path / "exported"
    (state, output), *_ = ranks(way[0], way[1]).run(_export, way, folder, file_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.tmp"))
    assert not (folder / "state").exists()
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if file_bytes == 300:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(tensors)
        assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    model = Net()
    model.load_state_dict(tensors)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    model.eval()
    batch = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(99))
    torch.testing.assert_close(
        model(batch).detach(), output, rtol=0.1, atol=0.1 if way[3] == "bf16" else 1e-5
    )
    for other in WAYS:
        for found, computed in ranks(other[0], other[1]).run(_import, other, folder):
            for name, value in model.state_dict().items():
                assert torch.equal(found[name], value.to(found[name].dtype)), name
            torch.testing.assert_close(
                computed, output, rtol=0.1, atol=0.1 if "bf16" in (way[3], other[3]) else 1e-5
            )


def _refused(rank: int, size: int, folder: Path) -> None:
    way: Way = (2, "gloo", 3, "fp32", "none")
    engine, _ = _make(way, seed=1)
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"expected a safetensors file, or a folder with"):
        engine.load_weights(folder / "nothing")
    engine.comm.barrier()
    state = {name: value.contiguous() for name, value in Net().state_dict().items()}
    if rank == 0:
        save_file({**state, "first.weight": torch.zeros(3, 3)}, folder / "shape.safetensors")
        save_file({**state, "second.weight": torch.zeros(3)}, folder / "more.safetensors")
        save_file({"first.weight": state["first.weight"]}, folder / "less.safetensors")
        (folder / "cut.safetensors").write_bytes((folder / "more.safetensors").read_bytes()[:-100])
        (folder / "taken").mkdir()
    engine.comm.barrier()
    for name, match in {
        "shape": r"first.weight has shape \(3, 3\) in shape.safetensors, but \(9, 7\)",
        "more": "belongs to another model: second.weight unexpected",
        "less": "belongs to another model: scale, convolution.weight.* missing",
        "cut": "cut.safetensors: truncated: norm.bias ends at byte",
    }.items():
        with pytest.raises(CheckpointError, match=match):
            engine.load_weights(folder / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="the folder exists; choose another name"):
        engine.export(folder / "taken")
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name]), name
    engine.close()


def test_files_of_another_model_are_refused_without_changes(ranks: Any, tmp_path: Path) -> None:
    ranks(2, "gloo").run(_refused, tmp_path)


def _asynchronous(rank: int, size: int, way: Way, folder: Path) -> None:
    engine, optimizer = _make(way, seed=1)
    _train(engine, optimizer, 0, STEPS)
    expected = _contents(engine)
    pending = engine.save(folder / "first", {"position": 3}, asynchronous=True)
    losses = _train(engine, optimizer, STEPS, 2)
    pending.wait()
    assert pending.done
    engine.save(folder / "second", asynchronous=True)
    assert engine.load(folder / "first") == {"position": 3}  # waits for the second checkpoint
    assert (folder / "second" / "engine.json").exists()
    for name, value in _contents(engine).items():
        assert torch.equal(value, expected[name]), name
    assert _train(engine, optimizer, STEPS, 2) == losses
    full = OSError(28, "No space left on device")
    with mock.patch.object(storage.dcp, "save", side_effect=full):
        message = _failure(engine, folder)
    assert message.endswith(
        "full: [Errno 28] No space left on device (rank 0); see 'farandole explain checkpointerror'"
    )
    engine.save(folder / "third", asynchronous=True)
    engine.close()
    assert (folder / "third" / "engine.json").exists()


def _alternating(rank: int, size: int, way: Way, folder: Path) -> None:
    engines = [_make(way, seed=seed)[0] for seed in (1, 2)]
    expected = [_contents(engine) for engine in engines]
    pending = [engines[n % 2].save(folder / str(n), {"n": n}, asynchronous=True) for n in range(6)]
    for each in pending:
        each.wait()
    for n in range(6):
        engine = engines[1 - n % 2]  # the other engine, which has other weights
        assert engine.load(folder / str(n)) == {"n": n}
        for name, value in _contents(engine).items():
            assert torch.equal(value, expected[n % 2][name]), name
    for engine in engines:
        engine.close()


def test_two_engines_save_at_the_same_time(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_alternating, WAYS[2], tmp_path)


def _failure(engine: Engine, folder: Path) -> str:
    """Return the error of a checkpoint that cannot be written, which its own call or the next call raises."""
    try:
        engine.save(folder / "full", asynchronous=True)
        engine.save(folder / "next")
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("way", [WAYS[2], WAYS[3], (2, "farandole", 2, "fp32", "disk:")], ids=str)
def test_a_checkpoint_is_written_while_training_continues(ranks: Any, tmp_path: Path, way: Way) -> None:
    if way[4] == "disk:":
        way = (*way[:4], f"disk:{tmp_path}")
    ranks(way[0], way[1]).run(_asynchronous, way, tmp_path)


def _copies(rank: int, size: int, way: Way, folder: Path) -> int:
    """Return the bytes that were copied for a checkpoint, after checking that no copy exists when it is complete."""
    engine, optimizer = _make(way, seed=1)
    _train(engine, optimizer, 0, 1)
    copies: list[weakref.ref[Tensor]] = []
    nbytes = 0
    plain = checkpoint._copy

    def recorded(value: Any) -> Any:
        nonlocal nbytes
        found = plain(value)
        copy = found if isinstance(found, Tensor) else found.held
        if copy is not None:
            copies.append(weakref.ref(copy))
            nbytes += copy.nbytes
        return found

    at_the_end: list[int] = []

    def on_saved() -> None:
        gc.collect()
        at_the_end.append(sum(each() is not None for each in copies))

    with mock.patch.object(checkpoint, "_copy", recorded):
        pending = engine.save(folder / "copied", asynchronous=True, on_saved=on_saved)
    pending.wait()
    gc.collect()
    assert not any(each() is not None for each in copies)
    assert at_the_end == [0] * (rank == 0)
    engine.close()
    return nbytes


@pytest.mark.parametrize("way", [WAYS[2], WAYS[3]], ids=str)
def test_copies_for_a_checkpoint_are_freed(ranks: Any, tmp_path: Path, way: Way) -> None:
    assert all(nbytes > 0 for nbytes in ranks(way[0], way[1]).run(_copies, way, tmp_path))
