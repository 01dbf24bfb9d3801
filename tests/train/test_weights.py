"""Initial weights of a run, and LoRA adapters that are trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farandole.models.gpt import build_gpt
from farandole.parallel.lora.peft_adapter import load_adapter
from farandole.train.config import ConfigError, load_config
from farandole.train.run_folder import CheckpointError, newest_checkpoint
from farandole.train.weights import load_initial_weights, load_model, read_weights
from tests.train.command import Command, losses, only_run
from tests.train.small import overrides

TINY = ("tiny", "checkpoint.every=5", "evaluate.every=5", "plan.precision=fp32", "log.tensorboard=false")


def _run(folder: Path, name: str, *words: str) -> Path:
    """Train in `folder/name`, and return the newest checkpoint."""
    command = Command(folder, "train", *TINY, f"out={name}", "--ranks", "2", *words)
    assert command.end() == 0, command.output
    return newest_checkpoint(only_run(folder / name))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Return overrides for a small text, and a checkpoint after 10 steps."""
    folder = tmp_path_factory.mktemp("base")
    words = overrides(folder)
    return words, _run(folder, "runs", *words, "steps=10")


@pytest.mark.parametrize("zero", [0, 3])
def test_lora_trains_adapters_on_the_weights_of_another_run(
    base: tuple[list[str], Path], tmp_path: Path, zero: int
) -> None:
    words, start = base
    lora = (f"weights={start}", "plan.lora_rank=4", "plan.lora_alpha=8", "optimizer.learning_rate=1e-2")
    checkpoint = _run(tmp_path, "runs", *words, *lora, f"plan.zero={zero}", "steps=10")
    before, after = read_weights(start / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    adapted = [name for name in after if ".lora_" in name]
    assert len(adapted) == 16
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name  # the base is frozen
    assert all(after[name].any() for name in adapted)

    tokens = torch.arange(32)[None] % 256
    merged, _, config = load_model(checkpoint)
    adapter = build_gpt(config.model.gpt())
    load_initial_weights(adapter, load_config("tiny", [f"weights={start}"]))
    plain = adapter(tokens)
    load_adapter(adapter, checkpoint / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens), adapter(tokens), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(merged(tokens), plain)


def test_a_resumed_lora_run_does_not_need_the_initial_weights(
    base: tuple[list[str], Path], tmp_path: Path
) -> None:
    words, start = base
    copy = tmp_path / "base.safetensors"
    save_file(load_file(start / "model.safetensors"), copy)
    (tmp_path / "tokenizer.json").write_bytes((start / "tokenizer.json").read_bytes())
    words = [*words, f"weights={copy}", "plan.lora_rank=2", "seed=7"]
    whole = _run(tmp_path, "whole", *words, "steps=10").parent.parent
    half = _run(tmp_path, "half", *words, "steps=10", "checkpoint.keep=9").parent.parent
    copy.unlink()
    for path in (half / "checkpoints" / "step-000010").iterdir():
        assert path.name in ("adapter", "model.safetensors", "state", "tokenizer.json", "train.json")
    checkpoint = half / "checkpoints" / "step-000005"
    command = Command(tmp_path, "train", "--resume", str(checkpoint))
    assert command.end() == 0, command.output
    assert losses(half) == losses(whole)


def test_another_text_is_encoded_with_the_tokenizer_of_the_weights(
    base: tuple[list[str], Path], tmp_path: Path
) -> None:
    _, start = base
    (tmp_path / "other.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    words = (f"data.path={tmp_path / 'other.txt'}", f"data.cache={tmp_path / 'cache'}", f"weights={start}")
    checkpoint = _run(tmp_path, "runs", *words, "steps=2")
    assert (checkpoint / "tokenizer.json").read_text() == (start / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.width=64"],
            "has shape (512, 32) in .*, but (512, 64) in the model; use the [model] section",
        ),
        (["model.layers=1"], "belongs to another model: missing or unexpected tensors"),
        (["weights=nowhere"], "nowhere does not exist: expected a checkpoint"),
        (["weights=" + "x" * 300], "x does not exist: expected a checkpoint"),
        (["weights=" + "x" * 300 + "/y.safetensors"], "y.safetensors does not exist: expected a checkpoint"),
    ],
)
def test_weights_of_another_model_are_refused(
    base: tuple[list[str], Path], words: list[str], says: str
) -> None:
    config = load_config("tiny", [f"weights={base[1]}", *words])
    pattern = says.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises((ConfigError, CheckpointError), match=pattern):
        load_initial_weights(build_gpt(config.model.gpt()), config)


def test_a_missing_checkpoint_is_refused_before_ranks_start(tmp_path: Path) -> None:
    command: Any = Command(tmp_path, "train", *TINY, *overrides(tmp_path), "weights=rnus/base")
    assert command.end() == 2
    assert "rnus/base does not exist: expected a checkpoint, a run, or a folder of runs" in command.output
    assert not (tmp_path / "runs").exists()
