"""Reports and samples: failures, the model's context, and bit-for-bit resumption."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.train.config import ConfigError, load_config
from farandole.train.metrics import read_metrics
from farandole.train.tasks import make_task
from farandole.train.workload import workload_of
from tests.models.hf.folders import WORDS, conversations, model_with_tokenizer, write_jsonl
from tests.train.command import losses
from tests.train.small import make_trainer, overrides, train_here

PLAIN = ["plan.precision=fp32", "log.tensorboard=false"]

FAILING = """
import torch
from farandole.train.text import TextTask

class Failing(TextTask):
    def report(self, model):
        model[:3](torch.zeros(1, 4, dtype=torch.int64))
        raise RuntimeError(f"out of ideas {self._config.plan.zero}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with 64 positions, conversations and text."""
    folder = tmp_path_factory.mktemp("reports")
    model_with_tokenizer(folder / "gpt2", "gpt2")
    write_jsonl(folder / "chat.jsonl", conversations(40, 2))
    (folder / "notes.txt").write_text("\n".join(" ".join(WORDS) for _ in range(200)))
    (folder / "failing_task.py").write_text(FAILING)
    return folder


def _words(folder: Path, preset: str, *words: str) -> list[str]:
    data = {"sft": "chat.jsonl", "pretrain": "notes.txt"}[preset]
    common = [f"model={folder / 'gpt2'}", f"data.path={folder / data}", f"data.cache={folder / 'cache'}"]
    return [preset, *common, "model.context=64", "batch=4", *PLAIN, *words]


@pytest.mark.parametrize("preset", ["sft", "pretrain"])
def test_context_beyond_the_learned_positions_is_refused(folder: Path, preset: str) -> None:
    name, *words = _words(folder, preset, "model.context=65")
    message = "model.context=65 exceeds the 64 positions of model=.*gpt2; use model.context=64"
    with pytest.raises(ConfigError, match=message):
        make_task(load_config(name, words))
    with pytest.raises(ConfigError, match=message):
        workload_of(load_config(name, words), 2)
    make_task(load_config(name, [*words, "model.context=64"]))


def _answer(rank: int, size: int, words: list[str]) -> str:
    return make_trainer(words[1:], preset=words[0]).report()


def test_a_sample_is_longer_than_the_learned_positions(ranks: Any, folder: Path) -> None:
    (text,) = ranks(1).run(_answer, _words(folder, "sft", "sample.tokens=80", "sample.temperature=2"))
    prompt, _, answer = text.partition("\n\n")
    assert prompt == "Who are you?"
    assert answer


def _train(rank: int, size: int, folder: Path, words: list[str], run: Path, resume: Path | None) -> list[str]:
    """Train, and return the logged warnings."""
    logs = BufferingHandler(1000)
    logging.getLogger("farandole").addHandler(logs)
    sys.path.insert(0, str(folder))
    try:
        train_here(rank, size, words, run, resume)
    finally:
        sys.path.remove(str(folder))
        logging.getLogger("farandole").removeHandler(logs)
    return [record.getMessage() for record in logs.buffer]


Train = Callable[..., list[list[str]]]


@pytest.fixture(scope="module")
def train(ranks: Any, folder: Path) -> Train:
    """Return a function that trains a tiny GPT on two ranks, and returns each rank's warnings."""

    def run(backend: str, name: str, *words: str, resume: Path | None = None) -> list[list[str]]:
        settings = ["tiny", *overrides(folder), "plan.precision=fp32", "model.dropout=0.1", "steps=6", *words]
        return ranks(2, backend).run(_train, folder, settings, folder / name, resume)

    return run


@pytest.mark.parametrize(("backend", "zero"), [("farandole", 0), ("gloo", 3)])  # Gloo gathers block by block
def test_samples_do_not_change_the_training(folder: Path, train: Train, backend: str, zero: int) -> None:
    names = [f"{kind}-{zero}" for kind in ("plain", "sampled", "failing")]
    words = [f"plan.zero={zero}", "checkpoint.every=2", "checkpoint.keep=3", "evaluate.every=3"]
    train(backend, names[0], *words)
    train(backend, names[1], *words, "sample.every=2")
    warnings = train(backend, names[2], *words, "sample.every=2", "task=failing_task:Failing")
    message = f"farandole: the report failed: RuntimeError: out of ideas {zero} (failing_task.py, line 8)"
    assert warnings == [[message], []]
    runs = [folder / name for name in names]
    assert losses(runs[1]) == losses(runs[2]) == losses(runs[0])
    assert not (runs[2] / "samples.jsonl").exists()
    assert (runs[2] / "checkpoints" / "step-000006").is_dir()
    samples = read_metrics(runs[1] / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [2, 4, 6]
    assert all(sample["text"].startswith("def") for sample in samples)
    assert (runs[1] / "sample.txt").read_text() == samples[-1]["text"]
    events = EventAccumulator(str(runs[1] / "tensorboard"))
    events.Reload()
    texts = [each.tensor_proto.string_val[0].decode() for each in events.Tensors("sample/text_summary")]
    assert texts == [indent(sample["text"], "    ") for sample in samples]

    train(backend, names[1], *words, "sample.every=2", resume=runs[1] / "checkpoints" / "step-000002")
    assert read_metrics(runs[1] / "samples.jsonl") == samples
    assert losses(runs[1]) == losses(runs[0])
