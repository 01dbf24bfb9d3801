"""Offline generation: `farandole.LLM`, and `farandole generate --input`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import farandole
from farandole.cli.main import app
from farandole.data.errors import DataError
from farandole.models.hf.fields import FolderError
from farandole.serve.batch import generate_file
from farandole.serve.folder import read_model
from farandole.serve.request import RequestError, Sampling
from tests.cli.test_generate import checkpoint  # noqa: F401 - a fixture
from tests.serve.server import CONTEXT, write_folder, write_sentencepiece


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, words)])


def test_prompts_are_completed_in_order(folder: Path) -> None:
    llm = farandole.LLM(folder, max_running=3)
    prompts = ["say red", [5, 6, 7], "two dog " * 9, "a", "cat"]
    found = llm.generate(prompts, max_tokens=9, temperature=0)
    alone = [llm.generate([prompt], max_tokens=9, temperature=0)[0] for prompt in prompts]
    assert [each.text for each in found] == [each.text for each in alone]
    assert [each.prompt_tokens for each in found] == [llm.encode(prompt) for prompt in prompts]
    assert len(llm.generate(["a"], max_tokens=3, n=4)[0].completions) == 4
    with pytest.raises(RequestError, match=r"prompts\[1\], max_tokens: a prompt of 2 tokens"):
        llm.generate([[1], [1, 1]], max_tokens=CONTEXT - 1)
    assert not llm.engine.has_work


def test_several_streams_can_be_open(folder: Path) -> None:
    llm = farandole.LLM(folder, max_running=2)
    prompts, options = [[number, 5, 6] for number in range(1, 8)], {"temperature": 0}
    expected = [llm.generate([prompt], max_tokens=4 + prompt[0], **options)[0].text for prompt in prompts]
    sampling = [Sampling(max_tokens=4 + prompt[0], temperature=0) for prompt in prompts]
    outer, nested = [], []
    first, second = llm.stream(prompts, sampling), llm.stream(prompts[::-1], sampling[::-1])
    for one, other in zip(first, second, strict=True):
        outer.append((one.text, other.text))
        nested.append(llm.generate([prompts[0]], max_tokens=5, **options)[0].text)
    assert outer == list(zip(expected, expected[::-1], strict=True))
    assert nested == [expected[0]] * len(prompts)
    left = llm.stream(prompts, sampling)
    next(left)
    left.close()
    assert not llm.engine.has_work


def test_the_core_and_torch_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for available in (True, False):
        monkeypatch.setattr("farandole.native.available", lambda found=available: found)
        llm = farandole.LLM(folder)
        texts.append([each.text for each in llm.generate(["say red", "two"], max_tokens=9, temperature=0)])
    assert texts[0] == texts[1]


def test_a_run_of_farandole_train(checkpoint: Path) -> None:  # noqa: F811
    run = checkpoint.parents[1]
    llm = farandole.LLM(run)
    text = llm.generate(["import "], max_tokens=8, temperature=0)[0].text
    alone = CliRunner().invoke(
        app, ["generate", str(run), "--prompt", "import ", "--tokens", "8", "--temperature", "0"]
    )
    assert alone.output.endswith(f"import {text}\n")
    with pytest.raises(RequestError, match="precision: expected one of fp32, bf16, got 'fp8'"):
        farandole.LLM(run, precision="fp8")
    with pytest.raises(RequestError, match="context: expected a value from 1 to"):
        farandole.LLM(run, context=10**6)
    with pytest.raises(DataError, match="no chat template"):
        llm.render([{"role": "user", "content": "a"}])
    assert farandole.LLM(run, precision="bf16").generate(["import "], max_tokens=8)[0].text


def test_a_continuation_keeps_the_space_at_its_start(tmp_path: Path) -> None:
    fields = write_sentencepiece(tmp_path)
    llm = farandole.LLM(tmp_path)
    sampling = fields | {"logit_bias": {int(token): bias for token, bias in fields["logit_bias"].items()}}
    messages = [{"role": "user", "content": "a c"}]
    assert llm.generate(["a c"], **sampling)[0].text == " b b b"
    assert llm.generate([llm.render(messages)], continues=False, **sampling)[0].text == "b b b"
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    records = [fields | {"prompt": "a c"}, fields | {"messages": messages}]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    generate_file(llm, prompts, out, Sampling())
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [" b b b", "b b b"]


def test_the_tokens_of_a_prompt_are_integers(folder: Path) -> None:
    llm = farandole.LLM(folder)
    tokens = list(range(5, 45))
    for prompt in (np.array(tokens), torch.tensor(tokens), tuple(tokens), list(np.array(tokens))):
        assert llm.encode(prompt) == tokens  # type: ignore[arg-type]
        assert llm.generate([prompt], max_tokens=2)[0].prompt_tokens == tokens  # type: ignore[list-item]
    for wrong in ([5.5, 6], np.array([5.0]), ["a"], None):
        with pytest.raises(
            RequestError, match=r"^prompts\[1\], prompt: expected text or a list of tokens, got"
        ):
            llm.generate([[5], wrong])  # type: ignore[list-item]
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop_token_ids": 5},
        {"stop_token_ids": ["5"]},
        {"stop_token_ids": [5.0]},
        {"logit_bias": [1]},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {5: "1"}},
    ],
)
def test_tokens_in_parameters_are_integers(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(RequestError, match=f"^{name}: expected a (list|dict) of .*, got "):
        Sampling(**parameters)


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3]])
def test_one_prompt_is_no_list_of_prompts(folder: Path, prompt: Any) -> None:
    llm = farandole.LLM(folder)
    with pytest.raises(RequestError, match=r"^prompts: expected a list of prompts, got .*; write \[prompt\]"):
        llm.generate(prompt)
    assert not llm.engine.has_work
    assert len(llm.generate([prompt], max_tokens=1)) == 1


def test_folders_that_cannot_be_served_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FolderError, match=r"has no tokenizer.json"):
        read_model(tmp_path)


def test_a_file_is_completed_in_order_and_resumed(folder: Path, tmp_path: Path) -> None:
    prompts, out, again = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "again.jsonl"))
    records = [{"prompt": f"say {word}", "id": word} for word in ("red", "green", "blue", "one", "two")]
    records[2] = {"messages": [{"role": "user", "content": "say red"}], "max_tokens": 3, "n": 2}
    records[3]["prompt"] = [5, 6, 7]  # type: ignore[assignment]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--input", prompts, "--tokens", 6)
    result = command(folder, *options, "--output", out)
    assert result.exit_code == 0, result.output
    assert "wrote 5 results" in result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("id") for line in lines] == ["red", "green", None, "one", "two"]
    assert [line["completion_tokens"] for line in lines] == [6, 6, 6, 6, 6]
    assert len(lines[2]["choices"]) == 2
    complete = out.read_bytes()
    cut = complete[: complete.index(b"\n") + 30]
    again.write_bytes(cut)
    assert "wrote 4 results" in command(folder, *options, "--output", again).output
    assert again.read_bytes() == complete
    assert "wrote 0 results" in command(folder, *options, "--output", again).output


@pytest.mark.parametrize(
    ("record", "tokens"),
    [
        ({"id": "q", "prompt": "say red"}, 6),  # another option
        ({"id": "q", "prompt": "say two"}, 4),
        ({"id": "p", "prompt": "say red"}, 4),
        ({"id": "q", "prompt": "say red", "top_p": 0.5}, 4),
    ],
)
def test_results_of_another_request_are_not_kept(
    folder: Path, tmp_path: Path, record: dict[str, object], tokens: int
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"id": "q", "prompt": "say red"}\n')
    assert command(folder, "--input", file, "--output", out, "--tokens", 4).exit_code == 0
    first = out.read_bytes()
    file.write_text(json.dumps(record) + "\n")
    for content in (first, first[:-5]):
        out.write_bytes(content)
        result = command(folder, "--input", file, "--output", out, "--tokens", tokens)
        assert result.exit_code == 2
        assert "line 1: expected the result of line 1 of the input (1 lines)" in result.output
        assert out.read_bytes() == content


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_line_ends_divide_a_file(folder: Path, tmp_path: Path, separator: str) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    records = [{"prompt": "a", "id": f"b{separator}c"}, {"prompt": "d", "stop": f"e{separator}"}]
    lines = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    file.write_bytes(b"\r\n".join(lines))
    assert "wrote 2 results" in command(folder, "--input", file, "--output", out, "--tokens", 2).output
    assert json.loads(out.read_bytes().split(b"\n")[0])["id"] == f"b{separator}c"


def test_one_string_is_no_list_of_stop_strings() -> None:
    with pytest.raises(RequestError, match="stop: expected a list of strings, got 'END'"):
        Sampling(stop="END")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "max_token": 1}', "unknown field max_token; nearest: max_tokens"),
        ('{"text": "a"}', "unknown field text"),
        ("{}", "expected either prompt or messages"),
        ('{"prompt": 3}', "prompt: expected text or a list of tokens"),
        ('{"prompt": "a", "top_p": 7}', "top_p: expected a value above 0"),
        ('{"prompt": "a", "max_tokens": 100000}', "does not fit in the context"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: expected a number"),
        ('{"messages": "a"}', "messages"),
        ('{"prompt": "a", "stop": [1]}', "stop: expected a list of strings, got [1]"),
        ('{"prompt": "a", "stop": ["b", ""]}', "stop: expected non-empty strings"),
        ('{"prompt": "a", "id": "\\ud83d"}', "expected Unicode text, got an unpaired surrogate"),
        ("[1]", "expected a JSON object, got list"),
        ("{", "expected a JSON object"),
    ],
)
def test_invalid_lines_are_named_before_any_is_computed(
    folder: Path, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    result = command(folder, "--input", file, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "line 2" in result.output
    assert message in result.output
    assert not (tmp_path / "out.jsonl").exists()


def test_other_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert "--input and --output together" in command(folder, "--input", file).output
    both = command(folder, "--input", file, "--output", out, "--prompt", "x")
    assert "mutually exclusive" in both.output
    assert "cannot read" in command(folder, "--input", tmp_path / "none", "--output", out).output
    for text in ('{"index": 3}\n', "a note without a line end", '{"index": 0}'):
        out.write_text(text)
        assert "expected the result of line 1" in command(folder, "--input", file, "--output", out).output
        assert out.read_text() == text


def test_the_output_file_is_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "none" / "out.jsonl"
    file.write_text('{"prompt": "a"}')
    for output, message in (
        (out, f"cannot write {out}: No such file or directory; choose another file with --output"),
        (tmp_path, f"cannot write {tmp_path}: Is a directory"),
        (file, f"{file} is both the input and the output; choose another file with --output"),
        (tmp_path / "new.jsonl", "no model"),
    ):
        result = command(tmp_path / "no model", "--input", file, "--output", output)
        assert result.exit_code == 2
        assert message in result.output
    assert file.read_text() == '{"prompt": "a"}'
    assert list(tmp_path.iterdir()) == [file]
