"""Conversations as samples: the tokens and the trained tokens of transformers, packed, cached, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest

from farandole.data import chat
from farandole.data.chat import IGNORED, Chat, pack, prepare_chat
from farandole.data.errors import DataError
from tests.data.datasets import save_to_disk
from tests.data.templates import (
    TEMPLATES,
    TOOL_CALLS,
    conversations_for,
    rendered_by_transformers,
    tokenizer_of,
)
from tests.models.hf.folders import add_tokenizer, conversations, write_jsonl

CONTEXT = 96


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_tokenizer(tmp_path, 300)
    return tmp_path


def _prepare(folder: Path, path: Path, context: int = CONTEXT, **options: Any) -> Chat:
    return prepare_chat(str(path), folder, context=context, vocabulary=300, cache=folder / "cache", **options)


def _documents(prepared: Chat) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the inputs and the targets of all conversations, sorted."""
    found = []
    for part in (prepared.train, prepared.validation):
        for number in range(len(part)):
            tokens, documents, targets = part[number]
            assert (tokens[documents < 0] == 0).all()
            assert (targets[documents < 0] == IGNORED).all()
            for document in range(documents.max() + 1):
                own = documents == document
                found.append((tuple(tokens[own].tolist()), tuple(targets[own].tolist())))
    return sorted(found)


def _expected(ids: list[int], flags: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(ids[:-1]), tuple(t if f else IGNORED for t, f in zip(ids[1:], flags[1:], strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_samples_have_the_tokens_and_the_assistants_tokens_of_transformers(folder: Path, name: str) -> None:
    records = list(conversations_for(name).values())
    (folder / "own.jinja").write_text(TEMPLATES[name])
    path = write_jsonl(folder / "chat.jsonl", records)
    longest = 400
    prepared = _prepare(folder, path, longest, template=str(folder / "own.jinja"), validation_share=0.2)
    theirs = tokenizer_of(folder, TEMPLATES[name])
    expected = [_expected(*rendered_by_transformers(theirs, record)) for record in records]
    assert _documents(prepared) == sorted(expected)


def test_a_datasets_folder_has_the_samples_of_json_lines(folder: Path) -> None:
    (folder / "own.jinja").write_text(TEMPLATES["tools"])
    lines = [*conversations(12, 2), TOOL_CALLS]
    records = [{**line, "tools": json.dumps(line["tools"]) if "tools" in line else None} for line in lines]
    text = [{**record, "messages": json.dumps(record["messages"])} for record in records]
    options = {"template": str(folder / "own.jinja"), "context": 400}
    expected = _documents(_prepare(folder, write_jsonl(folder / "chat.jsonl", lines), **options))
    for kind, rows in (("structs", records), ("text", text)):
        save_to_disk(folder / kind, arrow.Table.from_pylist(rows), shards=2)
        assert _documents(_prepare(folder, folder / kind, **options)) == expected, kind


def test_prompts_and_completions(folder: Path) -> None:
    records = [{"prompt": f"say {n} ", "completion": f"{n} {n}"} for n in range(10)]
    prepared = _prepare(folder, write_jsonl(folder / "pairs.jsonl", records))
    theirs = tokenizer_of(folder, "")
    for tokens, targets in _documents(prepared):
        text = theirs.decode([*tokens, targets[-1]])
        prompt, answer = text[:6], text[6:]
        assert prompt.startswith("say ") and answer == f"{prompt[4]} {prompt[4]}</s>"
        assert theirs.decode([t for t in targets if t != IGNORED]) == answer


def test_conversations_are_tokenized_once_and_mapped_into_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(folder / "chat.jsonl", conversations(20))
    first = _documents(_prepare(folder, path))

    def refuse(*arguments: Any) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(chat._Encoder, "encode", refuse)
    again = _prepare(folder, path)
    assert _documents(again) == first
    assert isinstance(again.train._tokens, np.memmap)
    with path.open("a") as file:
        file.write(json.dumps(conversations(1)[0]) + "\n")
    with pytest.raises(AssertionError, match="tokenized again"):
        _prepare(folder, path)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_changed_end_token_is_not_read_from_the_cache(folder: Path, pairs: bool) -> None:
    records = [{"prompt": f"say {n} ", "completion": f"{n}"} for n in range(6)] if pairs else conversations(6)
    path = write_jsonl(folder / "chat.jsonl", records)
    (folder / "own.jinja").write_text(
        "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    )
    options = {} if pairs else {"template": str(folder / "own.jinja")}
    for end in ("</s>", "<|im_end|>"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        prepared = _prepare(folder, path, **options)
        for _, targets in _documents(prepared):
            answer = prepared.tokenizer.decode(
                [t for t in targets if t != IGNORED], skip_special_tokens=False
            )
            assert answer.endswith(end)


def test_windows_are_packed_without_splitting_conversations(folder: Path) -> None:
    prepared = _prepare(folder, write_jsonl(folder / "chat.jsonl", conversations(40)), validation_share=0.1)
    lengths = sorted(len(tokens) for tokens, _ in _documents(prepared))
    assert len(lengths) == 40
    for part in (prepared.train, prepared.validation):
        assert all(sum(b - a - 1 for a, b in window) <= CONTEXT for window in part.windows)
    assert len(prepared.train) < 40


def test_packing_uses_few_bins() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 100, 200).tolist()
    bins = pack(lengths, 100)
    assert sorted(number for window in bins for number in window) == list(range(200))
    assert all(sum(lengths[number] for number in window) <= 100 for window in bins)
    assert len(bins) <= 11 / 9 * sum(lengths) / 100 + 6 / 9 + 2


def test_long_conversations_are_truncated_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {
        "messages": [
            {"role": "user", "content": "say red"},
            {"role": "assistant", "content": "red " * 200},
        ]
    }
    path = write_jsonl(folder / "chat.jsonl", [*conversations(6), long])
    prepared = _prepare(folder, path)
    assert "truncated 1 of 7 conversations to model.context=96 tokens" in " ".join(caplog.messages)
    assert max(len(tokens) for tokens, _ in _documents(prepared)) == CONTEXT


GOOD = json.dumps(conversations(1)[0])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: expected JSON"),
        ('["messages"]', "line 3: expected a JSON object, found list"),
        ('{"text": "x"}', 'line 3: expected a field "messages" with messages, or the fields "prompt" and'),
        ('{"messages": 3}', 'line 3: expected a list of messages in "messages", found int'),
        ('{"messages": "[{"}', 'line 3: expected JSON in "messages"'),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            'line 3: expected a message with role "assistant"',
        ),
        (
            '{"messages": [{"role": "user"}]}',
            'line 3: expected "role" and "content" in message 0, found role',
        ),
        ('{"messages": [{"role": 3, "content": "x"}]}', "in message 0, found role=3"),
        ('{"messages": [{"content": "x"}]}', 'line 3: expected "role" and "content" in message 0'),
        ('{"prompt": "x"}', "line 3: expected a field"),
        (
            '{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "x"}]}',
            "line 3: the chat template cannot render the messages",
        ),
    ],
)
def test_damaged_lines_are_refused_by_number(folder: Path, line: str, says: str) -> None:
    (folder / "chat.jsonl").write_text(f"{GOOD}\n{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(DataError) as error:
        _prepare(folder, folder / "chat.jsonl")
    assert says in str(error.value)
    assert str(folder / "chat.jsonl") in str(error.value)
    assert not list((folder / "cache").glob("chats/*/tokens.bin"))


def test_data_with_only_empty_texts_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()  # without an end token, the texts are empty
    path = write_jsonl(folder / "chat.jsonl", [{"prompt": "", "completion": ""}] * 4)
    with pytest.raises(DataError, match=r"chat.jsonl: expected conversations, found only empty texts"):
        _prepare(folder, path)
    assert not [entry for entry in (folder / "cache" / "chats").iterdir() if entry.is_dir()]


def test_tokens_outside_the_vocabulary_are_refused(folder: Path) -> None:
    path = write_jsonl(folder / "chat.jsonl", conversations(6))
    with pytest.raises(DataError, match="but the model's vocabulary has only 20 tokens"):
        prepare_chat(str(path), folder, context=CONTEXT, vocabulary=20, cache=folder / "cache")
