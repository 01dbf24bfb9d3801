"""Fine-tuning of models from Hugging Face folders with `farandole train`: conversations, text, classification, and
resuming."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from farandole.models.hf import from_pretrained
from tests.models.hf.families import folder_of, reference, transformers
from tests.models.hf.folders import WORDS, conversations, model_with_tokenizer, write_jsonl
from tests.train.command import Command, losses, only_run

COMMON = (
    "data.cache=cache",
    "model.context=48",
    "batch=4",
    "log.tensorboard=false",
    "plan.precision=fp32",
    "optimizer.learning_rate=1e-2",
    "sample.tokens=8",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_with_tokenizer(tmp_path / "base")
    write_jsonl(tmp_path / "chat.jsonl", conversations(60, 2))
    return tmp_path


def _sft(folder: Path, *words: str) -> Command:
    return Command(
        folder, "train", "sft", "model=base", "data.path=chat.jsonl", "--ranks", "2", *COMMON, *words
    )


def test_conversations_are_learned_and_saved_for_transformers(folder: Path) -> None:
    command = _sft(folder, "steps=24", "plan.zero=3", "evaluate.every=12")
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    found = list(losses(run).values())
    assert np.mean(found[-4:]) < 0.5 * found[0]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {
        "loss",
        "gradient_norm",
        "learning_rate",
        "tokens_per_s",
        "memory_bytes",
        "model_flops_utilization",
    } <= records[0].keys()
    assert "validation_loss" in records[-1]
    assert "Who are you?" in (run / "sample.txt").read_text()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "model").eval()
    ours = from_pretrained(run / "model").eval()
    tokens = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-3)
    assert transformers.AutoTokenizer.from_pretrained(run / "model").chat_template
    generated = Command(folder, "generate", str(run), "--prompt", "say", "--tokens", "3")
    assert generated.end() == 0, generated.output


def test_lora_under_zero_2_is_merged_and_saved_for_peft(folder: Path) -> None:
    import peft

    words = ("steps=8", "plan.zero=2", "plan.lora_rank=4", 'plan.lora_targets=["*.qkv","*.out"]')
    command = _sft(folder, *words)
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    adapter = run / "checkpoints" / "step-000008" / "adapter"
    adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    tokens = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=1e-4, rtol=1e-3)


def _kill_after(command: Command, file: str, folder: Path) -> Path:
    """Kill the launcher and all ranks once `file` exists in the run, and return the run."""
    command.wait_until(lambda: bool(list(folder.glob(f"*/{file}"))))
    for pid in (command.process.pid, *command.ranks()):
        os.kill(pid, signal.SIGKILL)
    command.process.wait(10)
    return only_run(folder)


@pytest.mark.parametrize(
    "kind", [(), ("plan.lora_rank=4", "plan.lora_dropout=0.1", 'plan.lora_targets=["*.qkv","*.out"]')]
)
def test_a_killed_run_resumes_bit_for_bit_without_the_original_folder(
    folder: Path, kind: tuple[str, ...]
) -> None:
    words = ("steps=12", "checkpoint.every=4", "evaluate.every=3", "plan.zero=2", *kind)
    command = _sft(folder, "out=whole", *words)
    assert command.end() == 0, command.output
    whole = only_run(folder / "whole")
    run = _kill_after(
        _sft(folder, "out=killed", *words), "checkpoints/step-000004/train.json", folder / "killed"
    )
    assert not (run / "checkpoints" / "step-000012").exists()
    (folder / "base").rename(folder / "moved")
    command = Command(folder, "train", "--resume", str(run))
    assert command.end() == 0, command.output
    assert losses(run) == losses(whole)
    assert _validation(run) == _validation(whole)
    files = ["model/model.safetensors", "checkpoints/step-000012/model.safetensors", "model/tokenizer.json"]
    for file in files + ["checkpoints/step-000012/adapter/adapter_model.safetensors"] * bool(kind):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file
    assert transformers.AutoTokenizer.from_pretrained(run / "model").chat_template


def _validation(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["validation_loss"] for record in records if "validation_loss" in record]


def test_resuming_repeats_a_failed_export(folder: Path) -> None:
    command = _sft(folder, "steps=2")
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    weights = run / "model" / "model.safetensors"
    before = weights.read_bytes()
    (run / "model.new").touch()  # a file, which cannot be removed as a folder
    command = Command(folder, "train", "--resume", str(run), "steps=3")
    assert command.end() != 0
    assert "step-000003 is saved; to resume: farandole train --resume" in command.output
    assert "Traceback" not in command.output
    assert weights.read_bytes() == before
    (run / "model.new").unlink()
    command = Command(folder, "train", "--resume", str(run), "steps=3")
    assert command.end() == 0, command.output
    assert "resuming after step 3" in command.output
    assert weights.read_bytes() != before
    assert list(losses(run)) == [1, 2, 3]
    command = Command(folder, "train", "--resume", str(run), "steps=3")
    assert command.end() == 2
    assert "the run is complete" in command.output
    shutil.rmtree(run / "model")
    command = Command(folder, "train", "--resume", str(run), "steps=3")
    assert command.end() == 0, command.output
    assert weights.exists()


def test_resuming_a_run_without_its_model_files_is_refused(folder: Path) -> None:
    command = _sft(folder, "steps=2", "checkpoint.every=1")
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    shutil.rmtree(run / "base")  # as in runs of earlier versions
    (folder / "base").rename(folder / "moved")
    command = Command(folder, "train", "--resume", str(run), "steps=4")
    assert command.end() == 2, command.output
    assert "model=base: base does not exist: expected a Hugging Face model folder" in command.output
    (folder / "moved").rename(folder / "base")
    command = Command(folder, "train", "--resume", str(run), "steps=4")
    assert command.end() == 0, command.output


def test_text_is_learned_from_the_weights_of_a_folder(folder: Path) -> None:
    (folder / "notes.txt").write_text("\n".join(" ".join(np.roll(WORDS, n)) for n in range(300)))
    common = (*COMMON, "data.path=notes.txt", "steps=6", "--ranks", "2")
    command = Command(folder, "train", "pretrain", "model=base", "out=warm", *common)
    assert command.end() == 0, command.output
    assert (only_run(folder / "warm") / "model" / "model.safetensors").exists()
    command = Command(
        folder, "train", "pretrain", "model=base", "model.pretrained=false", "out=cold", *common
    )
    assert command.end() == 0, command.output
    assert losses(only_run(folder / "cold"))[1] == pytest.approx(np.log(300), rel=0.1)
    assert losses(only_run(folder / "warm"))[1] != losses(only_run(folder / "cold"))[1]


def test_texts_are_classified(folder: Path) -> None:
    model_with_tokenizer(folder / "bert", "bert", num_hidden_layers=2)
    records = [
        {"text": f"say {word}", "label": "color" if n < 3 else "other"} for n, word in enumerate(WORDS)
    ] * 24
    write_jsonl(folder / "texts.jsonl", records)
    words = ("model=bert", "data.path=texts.jsonl", "steps=80", "batch=16", "optimizer.learning_rate=3e-3")
    command = Command(
        folder,
        "train",
        "classify",
        *words,
        "--ranks",
        "2",
        "plan.precision=fp32",
        "log.tensorboard=false",
        "data.validation_share=0.2",
    )
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_accuracy"] > 0.9
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    ours = from_pretrained(run / "model").eval()
    tokens = torch.randint(5, 300, (2, 9))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-3)


def test_images_are_classified(folder: Path) -> None:
    folder_of(reference("vit", 1, num_channels=3, image_size=8, patch_size=4), folder / "vit")
    for name, value in (("dark", 30), ("light", 220)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.full((8, 8, 3), value + number % 5, np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    words = (
        "model=vit",
        "data.path=photos",
        "steps=20",
        "batch=8",
        "optimizer.learning_rate=5e-3",
        "--ranks",
        "1",
    )
    command = Command(
        folder,
        "train",
        "classify",
        *words,
        "plan.precision=fp32",
        "log.tensorboard=false",
        "data.validation_share=0.2",
    )
    assert command.end() == 0, command.output
    run = only_run(folder / "runs")
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_accuracy"] == 1
    assert transformers.AutoModelForImageClassification.from_pretrained(run / "model").config.num_labels == 2


def _remove(folder: Path) -> None:
    (folder / "base" / "model.safetensors").unlink()


def _remove_shard(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    (folder / "base" / "model.safetensors").unlink()
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    sorted((folder / "base").glob("model-*.safetensors"))[1].unlink()


def _truncate(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _change(folder: Path, **values: Any) -> None:
    file = folder / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _conversations(folder: Path, *records: dict[str, Any]) -> None:
    write_jsonl(folder / "chat.jsonl", list(records))


def _no_template(folder: Path) -> None:
    (folder / "base" / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove, "expected model.safetensors or model.safetensors.index.json, found neither"),
        (_remove_shard, "model-00002-of-"),
        (_truncate, "model.safetensors is truncated"),
        (lambda f: _change(f, model_type="new"), "model_type='new', which is not supported"),
        (lambda f: _change(f, hidden_size=64), "has shape"),
        (lambda f: (f / "base" / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (_no_template, "has no chat template; use data.template=FILE or data.template=chatml"),
        (lambda f: _conversations(f, {"text": "x"}), 'chat.jsonl, line 1: expected a field "messages"'),
        (
            lambda f: _conversations(f, {"messages": [{"role": "user", "content": "x"}]}),
            "expected a message with role",
        ),
        (
            lambda f: _conversations(f, {"messages": [{"text": "x"}]}),
            'expected "role" and "content" in message 0, found text',
        ),
        (lambda f: (f / "chat.jsonl").write_text("{"), "chat.jsonl, line 1: expected JSON"),
    ],
)
def test_damaged_folders_and_data_are_refused_before_training(
    folder: Path, damage: Any, message: str
) -> None:
    damage(folder)
    command = _sft(folder, "steps=4")
    assert command.end() == 2, command.output
    assert message in " ".join(command.output.split())
    assert not (folder / "runs").exists()


def test_invalid_keys_are_refused(folder: Path) -> None:
    command = _sft(folder, "model.width=384")
    assert command.end() == 2
    assert "the folder determines the model's sizes" in command.output
    command = Command(folder, "train", "sft", "data.path=chat.jsonl")
    assert command.end() == 2
    assert "task='sft' requires a model to fine-tune" in command.output


def test_plans_for_a_folder(folder: Path) -> None:
    words = (
        "-n",
        "64",
        "--nodes",
        "8",
        "--accelerators",
        "--memory",
        "8GiB",
        "--flops",
        "100T",
        "--bandwidth",
        "10G",
    )
    _remove(folder)  # only config.json is needed
    command = Command(folder, "plan", "hf:base", *words, "model.context=128", "--json", "plans.json")
    assert command.end() == 0, command.output
    assert json.loads((folder / "plans.json").read_text())["plans"]
