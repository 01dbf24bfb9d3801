"""`farandole config`: show, keys and explain."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from farandole.cli.config import complete_keys, complete_words
from farandole.cli.main import app
from farandole.train.config import known_keys, load_config
from farandole.train.keys import all_keys


def _config(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def test_show_prints_a_file_that_loads_as_the_same_configuration(tmp_path: Path) -> None:
    words = ["tiny", "steps=3", "plan.zero=2", 'options.note="a"']
    result = _config("show", *words)
    assert result.exit_code == 0, result.output
    file = tmp_path / "my.toml"
    file.write_text(result.stdout)
    assert load_config(str(file)) == load_config(words[0], words[1:])


def test_show_changed_prints_only_changes() -> None:
    assert tomllib.loads(_config("show", "plan.zero=2", "batch=32", "--changed").stdout) == {
        "batch": 32,
        "plan": {"zero": 2},
    }
    assert _config("show", "--changed").stdout.strip() == ""


def test_every_key_has_its_default_and_a_description() -> None:
    keys = all_keys()
    assert list(keys) and set(keys) == set(known_keys())
    defaults = load_config().flat()
    for name, key in keys.items():
        assert key.default == defaults[name]
        assert len(key.description) > 10, f"describe {name} in presets/default.toml"
    listed = _config("keys").stdout
    assert all(name in listed for name in keys)
    assert all(line == line.rstrip() for line in listed.splitlines())
    assert _config("keys", "optimizer").stdout.count("\n") == 7


def test_explain_names_type_limits_presets_and_resume() -> None:
    text = _config("explain", "learning_rate").stdout
    assert "optimizer.learning_rate" in text and "number, greater than 0" in text
    assert (
        "0.003; 5e-05 in classify, 0.0006 in gpt2-small, 0.0003 in pretrain" in text
        and "cannot change it" in text
    )
    text = _config("explain", "plan.recompute").stdout
    assert "one of none, block, selective, attention, auto" in text and "--resume      can change it" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("explain", "every"), "every is ambiguous; use one of checkpoint.every, evaluate.every, log.every"),
        (("explain", "lr"), "unknown key lr; did you mean optimizer.learning_rate?"),
        (("keys", "optimiser"), "unknown section optimiser; sections are model, "),
        (("show", "tinny"), "did you mean tiny?"),
        (("show", "steps=0"), "steps=0: expected an integer, at least 1"),
        (("show", "--chnged"), "did you mean --changed?"),
    ],
)
def test_mistakes_are_refused_with_a_suggestion(words: tuple[str, ...], says: str) -> None:
    result = _config(*words)
    assert result.exit_code == 2
    assert says in result.output


def test_the_shell_completes_presets_and_keys() -> None:
    assert complete_words("ti") == ["tiny"]
    assert complete_words("plan.z") == ["plan.zero="]
    assert complete_keys("optimizer.beta") == ["optimizer.beta1", "optimizer.beta2"]
    environment = {
        "_FARANDOLE_COMPLETE": "complete_bash",
        "COMP_WORDS": "farandole train plan.z",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(app, [], prog_name="farandole", env=environment)
    assert result.output.strip() == "plan.zero="
