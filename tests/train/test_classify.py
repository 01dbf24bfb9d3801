"""Classifiers: adapters with a new head, and texts that are tokenized once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.hf.families import folder_of, reference, transformers
from tests.models.hf.folders import WORDS, model_with_tokenizer, write_jsonl
from tests.train.small import train_here

PLAIN = ["plan.precision=fp32", "log.tensorboard=false", "data.validation_share=0.2"]


def _texts(folder: Path) -> Path:
    records = [
        {"text": f"say {word}", "label": "color" if n < 3 else "other"} for n, word in enumerate(WORDS)
    ] * 4
    return write_jsonl(folder / "texts.jsonl", records)


def _images(folder: Path) -> Path:
    for name, value in (("dark", 30), ("light", 220)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.full((8, 8, 3), value + number, np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    return folder / "photos"


@pytest.mark.parametrize("family", ["bert", "bert-classifier", "vit"])
def test_adapters_with_a_new_head_are_loaded_by_peft(ranks: Any, tmp_path: Path, family: str) -> None:
    import peft

    if family == "vit":
        folder_of(reference("vit", 1, num_channels=3, image_size=8, patch_size=4), tmp_path / "base")
        data, auto = _images(tmp_path), transformers.AutoModelForImageClassification
        inputs = torch.randn(2, 3, 8, 8)
    else:
        model_with_tokenizer(tmp_path / "base", family)
        data, auto = _texts(tmp_path), transformers.AutoModelForSequenceClassification
        inputs = torch.randint(5, 300, (2, 9))
    words = [
        "classify",
        f"model={tmp_path / 'base'}",
        f"data.path={data}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    words += ["steps=3", "batch=4", "optimizer.learning_rate=1e-2", "plan.lora_rank=2", "plan.zero=3", *PLAIN]
    run = tmp_path / "run"
    ranks(2, "gloo").run(train_here, words, run)
    merged = auto.from_pretrained(run / "model").eval()
    torch.manual_seed(7)  # the head that transformers draws does not matter
    base = auto.from_pretrained(tmp_path / "base", num_labels=2, ignore_mismatched_sizes=True)
    adapted = peft.PeftModel.from_pretrained(base, run / "checkpoints" / "step-000003" / "adapter").eval()
    torch.testing.assert_close(adapted(inputs).logits, merged(inputs).logits, atol=1e-5, rtol=1e-4)
    again = auto.from_pretrained(tmp_path / "base", num_labels=2, ignore_mismatched_sizes=True).eval()
    assert (again(inputs).logits - merged(inputs).logits).abs().max() > 1e-3
    weights = dict(adapted.named_parameters())
    assert any("classifier" in name and "modules_to_save" in name for name in weights)
