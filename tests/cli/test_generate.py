"""`farandole generate` names what it cannot read.  tests/train/test_resume.py tests that it generates text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from farandole.cli.main import app
from farandole.data.tokenizer import train_tokenizer
from farandole.models.gpt import build_gpt
from farandole.serve.text import TextStream
from farandole.train.config import load_config
from tests.serve.sentencepiece import sentencepiece


def _generate(*words: str) -> Result:
    return CliRunner().invoke(app, ["generate", *words])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    config = load_config("tiny")
    facts = {"step": 1, "consumed": 8, "ranks": 2, "precision": "fp32", "loss_scale": 1.0, "good_steps": 0}
    facts |= {"elapsed_s": 1.0, "config": config.model_dump()}
    (folder / "train.json").write_text(json.dumps(facts))
    weights = {n: p.detach() for n, p in build_gpt(config.model.gpt()).named_parameters()}
    save_file(weights, folder / "model.safetensors")
    train_tokenizer(["import os\n"], config.model.vocabulary).save(str(folder / "tokenizer.json"))
    return folder


def test_a_seed_gives_the_same_text(checkpoint: Path) -> None:
    options = ("--prompt", "import ", "--tokens", "30")
    texts = [_generate(str(checkpoint), *options, "--seed", seed).output for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("import ") for text in texts)


def test_the_text_is_that_of_the_serving_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = sentencepiece()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    tokens = [tokenizer.token_to_id(name) for name in ("▁b", "<0xE4>")]
    monkeypatch.setattr("farandole.models.generate.generate", lambda *_, **__: iter(tokens))
    text = TextStream(tokenizer, prompt=tokenizer.encode("a  c").ids)
    expected = "".join(text.add(token) for token in tokens) + text.finish()
    assert expected == " b�"
    assert _generate(str(checkpoint), "--prompt", "a  c").output == f"a  c{expected}\n"


@pytest.mark.parametrize("up", [0, 2, 3])
def test_a_checkpoint_a_run_or_a_folder_of_runs(checkpoint: Path, up: int) -> None:
    path = [checkpoint, *checkpoint.parents][up]
    result = _generate(str(path), "--tokens", "1", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stderr == (f"from {checkpoint}\n" if up else "")


def test_missing_checkpoints_are_named(checkpoint: Path, tmp_path: Path) -> None:
    assert "nowhere does not exist: expected a checkpoint" in _generate(str(tmp_path / "nowhere")).output
    assert f"did you mean {tmp_path / 'run'}?" in _generate(str(tmp_path / "rum")).output
    assert "tokenizer.json is not a folder" in _generate(str(checkpoint / "tokenizer.json")).output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    result = _generate(str(tmp_path / "other"))
    assert result.exit_code == 2
    assert "found: notes.txt" in result.output
    (checkpoint / "model.safetensors").write_bytes(b"damaged")
    result = _generate(str(checkpoint))
    assert result.exit_code == 2
    assert "is damaged" in result.output


def test_a_missing_model_configuration_is_reported(checkpoint: Path) -> None:
    saved = json.loads((checkpoint / "train.json").read_text())
    saved["config"]["model"]["folder"] = "base"
    (checkpoint / "train.json").write_text(json.dumps(saved))
    result = _generate(str(checkpoint))
    assert result.exit_code == 2
    assert f"farandole generate: {checkpoint} has no config.json" in result.output


def test_seeds_have_a_maximum(checkpoint: Path) -> None:
    assert _generate(str(checkpoint), "--tokens", "1", "--seed", str(2**64 - 1)).exit_code == 0
    result = _generate(str(checkpoint), "--seed", str(2**64))
    assert result.exit_code == 2
    assert f"expected an integer between 0 and {2**64 - 1}, got '{2**64}'" in result.output


@pytest.mark.parametrize("options", [(), ("--weights", "int8")])
def test_a_prompt_that_is_not_utf_8_is_refused(checkpoint: Path, options: tuple[str, ...]) -> None:
    result = _generate(str(checkpoint), "--prompt", os.fsdecode(b"caf\xe9"), *options)
    assert result.exit_code == 2
    assert r"expected a prompt in UTF-8, found '\udce9' at character 4; correct the prompt" in result.output


def test_an_empty_prompt_is_refused(checkpoint: Path) -> None:
    result = _generate(str(checkpoint), "--prompt", "")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.output
