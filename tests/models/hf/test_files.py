"""Damaged safetensors files and indices.  The safetensors library refuses the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from farandole.models.hf import FolderError
from farandole.models.hf.files import INDEX, WEIGHTS, open_folder, read_header

TENSORS = {"a": torch.zeros(2, 3), "b": torch.ones(4)}


def _header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _entry(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda path: _header(path, lambda header: header[name].update(changes))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.write_bytes(b""), "needs 8 bytes for its length, but the file has only 0"),
        (lambda p: p.write_bytes(p.read_bytes()[:60]), "is truncated: its header needs"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is truncated: b ends at byte"),
        (lambda p: p.write_bytes(p.read_bytes() + b"xx"), "2 bytes follow the last tensor"),
        (lambda p: _header(p, lambda header: [1]), "its header is not a JSON object"),
        (_entry("a", data_offsets=[-24, 0]), "a lacks a valid dtype, shape or offset"),
        (_entry("a", data_offsets=["0", "24"]), "a lacks a valid dtype, shape or offset"),
        (_entry("a", shape=[-2, -3]), "a lacks a valid dtype, shape or offset"),
        (_entry("a", shape=["2", 3]), "a lacks a valid dtype, shape or offset"),
        (_entry("a", shape=None), "a lacks a valid dtype, shape or offset"),
        (_entry("a", dtype="F4"), "a has dtype F4, which is not supported"),
        (_entry("a", shape=[2, 4]), "a has 24 bytes, but F32 with shape .2, 4. requires 32"),
        (_entry("b", data_offsets=[8, 24]), "b overlaps another tensor"),
        (lambda p: _header(p, lambda header: header.pop("a") and header), "b follows unused bytes"),
    ],
)
def test_damaged_files_are_refused(damage: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    save_file(TENSORS, path)
    assert {name: entry.shape for name, entry in read_header(path).items()} == {"a": (2, 3), "b": (4,)}
    damage(path)
    with pytest.raises(FolderError, match=says):
        open_folder(tmp_path)
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is damaged: it is not JSON"),
        ("[]", "is damaged: expected an object 'weight_map'"),
        ('{"weight_map": 3}', "is damaged: expected an object 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "is damaged: expected an object 'weight_map'"),
        ('{"weight_map": {"a": "../x"}}', "expected file names without directories, got '../x'"),
        ('{"weight_map": {"a": "x", "b": "y"}}', "1 of 2 weight files are missing: y;"),
        ('{"weight_map": {"c": "x"}}', "lists c, but x does not contain this tensor"),
    ],
)
def test_damaged_indices_are_refused(index: str, says: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "folder"):
        folder.mkdir(exist_ok=True)
        save_file(TENSORS, folder / "x")
    (tmp_path / "folder" / INDEX).write_text(index)
    with pytest.raises(FolderError, match=says):
        open_folder(tmp_path / "folder")


def test_one_file_takes_precedence_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / WEIGHTS)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "missing"}}')
    assert set(open_folder(tmp_path)) == {"a", "b"}
