"""Classifiers: adapters with a new head, and texts that are tokenized once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from PIL import Image

from farandole.data import labeled
from farandole.data.errors import DataError
from farandole.data.labeled import Labeled, prepare_labeled
from tests.data.datasets import save_to_disk
from tests.models.hf.families import folder_of, reference, transformers
from tests.models.hf.folders import WORDS, add_tokenizer, model_with_tokenizer, write_jsonl
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


def _prepare(folder: Path, path: Path, **options: Any) -> Labeled:
    values: dict[str, Any] = {"context": 8, "vocabulary": 300, "validation_share": 0.25, **options}
    return prepare_labeled(str(path), folder / "tokenizer.json", cache=folder / "cache", **values)


def _samples(found: Labeled) -> list[tuple[tuple[int, ...], str | int]]:
    return sorted(
        (tuple(tokens.tolist()), found.classes[label])
        for part in (found.train, found.validation)
        for tokens, label in (part[number] for number in range(len(part)))
    )


def test_texts_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    add_tokenizer(tmp_path, 300, bert=True)
    records = [{"text": f"{word} " * (n % 5 + 1), "label": n % 3} for n, word in enumerate(WORDS)]
    found = _prepare(tmp_path, write_jsonl(tmp_path / "texts.jsonl", records))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = [
        (tuple(theirs(each["text"], truncation=True, max_length=8)["input_ids"]), each["label"])
        for each in records
    ]
    assert _samples(found) == sorted(expected)
    assert len(found.validation) == round(0.25 * len(records))
    assert found.train.lengths.tolist() == [len(found.train[n][0]) for n in range(len(found.train))]
    tokens, labels = found.train.read(np.array([0, 1, 2]))
    padded = theirs.pad({"input_ids": [found.train[n][0].tolist() for n in range(3)]})["input_ids"]
    assert tokens.tolist() == padded
    assert labels.tolist() == [found.train[n][1] for n in range(3)]


def test_texts_are_tokenized_once_and_mapped_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tokenizer(tmp_path, 300, bert=True)
    path = _texts(tmp_path)
    first = _prepare(tmp_path, path)
    table = arrow.Table.from_pylist([json.loads(line) for line in path.read_text().splitlines()])
    assert _samples(_prepare(tmp_path, save_to_disk(tmp_path / "set", table, shards=2))) == _samples(first)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(labeled, "_build", refuse)
    again = _prepare(tmp_path, path)
    assert _samples(again) == _samples(first)
    assert isinstance(again.train.tokens, np.memmap)
    for changed in ({"context": 7}, {"label": "text"}):
        with pytest.raises(AssertionError, match="tokenized again"):
            _prepare(tmp_path, path, **changed)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            '{"text": 3, "label": "a"}',
            'line 2: expected text in "text" and a class in "label"; the record has',
        ),
        ('{"text": "x"}', 'line 2: expected text in "text" and a class in "label"'),
        ('{"text": "x", "label": 0.5}', 'line 2: expected text in "text" and a class in "label"'),
        ("{", "line 2: expected JSON"),
        ('{"text": "x", "label": "a"}', "expected two or more classes, found 1"),
    ],
)
def test_damaged_records_are_refused_by_line(tmp_path: Path, line: str, says: str) -> None:
    add_tokenizer(tmp_path, 300, bert=True)
    (tmp_path / "texts.jsonl").write_text('{"text": "x", "label": "a"}\n' + line + "\n")
    with pytest.raises(DataError) as error:
        _prepare(tmp_path, tmp_path / "texts.jsonl")
    assert says in str(error.value)
