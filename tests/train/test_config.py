"""Configurations: presets, files and overrides, and errors with suggestions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.train.config import (
    ConfigError,
    known_keys,
    load_config,
    parse_config,
    presets,
    with_overrides,
)


@pytest.mark.parametrize("name", list(presets()))
def test_preset_round_trips_through_toml(name: str) -> None:
    config = load_config(name)
    assert parse_config(tomllib.loads(config.to_toml())) == config
    assert parse_config(config.model_dump()) == config
    config.micro_batches(2)


def test_unusual_values_round_trip_through_toml() -> None:
    words = [
        'sample.prompt=\U0001f600 \x7f\u2028"\\',
        "options.limit=inf",
        'options.names=["\U0001f600", "b"]',
    ]
    config = load_config("tiny", words)
    assert parse_config(tomllib.loads(config.to_toml())) == config


def test_options_round_trip_through_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'preset = "tiny"\n[options]\nplain = 1\n"a.b" = 2\n"" = 3\n"\\n\\"" = [[], [true, 1.0, -inf]]\n'
        'layers = [{size = 3, "x y" = {names = ["a\\nb"], "c.d" = {}}}, {}]\n'
    )
    config = load_config(str(path))
    assert config.options["layers"] == [{"size": 3, "x y": {"names": ["a\nb"], "c.d": {}}}, {}]
    assert config.options["a.b"] == 2
    assert parse_config(tomllib.loads(config.to_toml())) == config
    assert parse_config(json.loads(json.dumps(config.model_dump()))) == config


def test_default_preset_has_every_key() -> None:
    values = tomllib.loads(presets()["default"])
    named = [k for k, v in values.items() if not isinstance(v, dict)]
    named += [f"{section}.{k}" for section, v in values.items() if isinstance(v, dict) for k in v]
    assert sorted(named) == sorted(known_keys())


def test_files_override_presets_and_arguments_override_both(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "tiny"\nsteps = 7\n[model]\nwidth = 64\n')
    config = load_config(str(path), ["steps=8", "optimizer.learning_rate=1e-4", "data.path=/a b/ü.txt"])
    assert (config.steps, config.model.width, config.model.layers) == (8, 64, 2)
    assert (config.optimizer.learning_rate, config.data.path) == (1e-4, "/a b/ü.txt")
    assert with_overrides(config, ["steps=9"]).steps == 9


def test_incomplete_configurations_are_refused() -> None:
    values = load_config("tiny").model_dump()
    del values["batch"]
    with pytest.raises(
        ConfigError, match="^batch is missing: expected an integer, at least 1\nplan=3: expected a section"
    ):
        parse_config({**values, "plan": 3})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stps=3", "unknown key stps; did you mean steps?"),
        ("modle.width=3", "unknown key modle.width; did you mean model.width?"),
        ("learning_rate=1", "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("model=3", "model.folder=3: expected a string; see 'farandole explain configerror'"),
        ("lr=1", "unknown key lr; did you mean optimizer.learning_rate?"),
        ("optimizer.name=lion", "unknown key optimizer.name; optimizer has learning_rate, "),
        ("data.zero=1", "unknown key data.zero; did you mean plan.zero?"),
        ("n_layer=3", "unknown key n_layer; did you mean model.layers?"),
        (
            "steps=many",
            "steps='many': expected an integer, at least 1; see 'farandole explain configerror'",
        ),
        ("steps=0", "steps=0: expected an integer, at least 1; see"),
        ("plan.swap=tape", "plan.swap='tape': expected 'none', 'host' or 'disk:FOLDER'"),
        ("plan.zero=5", "plan.zero=5: expected stage 0, 1, 2 or 3"),
        (
            "plan.data_shard=2",
            "plan.data_shard=2 with zero=0: no states are sharded; nearest plan: zero=1",
        ),
        (
            "plan.data_shard=hosts",
            "plan.data_shard='hosts': expected 'all', 'host', or at least 1 rank",
        ),
        ("plan.hybrid=true", "unknown key plan.hybrid; did you mean plan.data_shard?"),
        ("parallel.hybrid=true", "unknown key parallel.hybrid; did you mean plan.data_shard?"),
        (
            "plan.rounding=stochastic",
            "plan.rounding='stochastic' with precision='fp32': stochastic rounding needs bf16",
        ),
        ("plan.recompute=auto", "recompute='auto' needs activation_bytes"),
        ("parallel.zero=2", "unknown key parallel.zero; did you mean plan.zero?"),
        ("precision=bf16", "unknown key precision; did you mean plan.precision?"),
        ("options=3", "unknown key options"),
        ("options.date=2026-01-02", ": expected a boolean or integer or number or string or array"),
        ("options.days=[2026-01-02]", "number or string or array, with dates as strings; see"),
        ("options.days=[{day=2026-01-02}]", "number or string or array, with dates as strings; see"),
        ("log.wandb=maybe", "log.wandb='maybe': expected a boolean"),
        ("plan.lora_targets=[3]", "plan.lora_targets=[3]: expected a string or array"),
        (
            "log.diagnose=true",
            "log.diagnose=true requires plan.precision=fp16, got 'auto'",
        ),
        (
            "plan.precision=int8",
            "plan.precision='int8': expected one of auto, fp32, bf16, fp16, fp8",
        ),
        ("optimizer.clip=-1", "optimizer.clip=-1: expected a number, greater than 0"),
        ("optimizer.clip=nan", "optimizer.clip=nan: expected a finite number, greater than 0"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf: expected a finite number, at least 0"),
        ("sample.temperature=inf", "sample.temperature=inf: expected a finite number, at least 0"),
        ("model.heads=3", "model: width=32 is not a multiple of 2 * heads = 6; try heads=2"),
        ("model.vocabulary=100", "model.vocabulary=100: expected an integer, at least 257"),
        ("name=../up", "name='../up': expected a string, matching "),
        ("steps", "'steps' is not an override: expected key=value, such as steps=100"),
    ],
)
def test_invalid_overrides_are_refused_with_a_suggestion(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config("tiny", [override])


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("tiny", ["steps=0", "batch=0", "model.layers=0"])
    *mistakes, link = str(error.value).splitlines()
    assert len(mistakes) == 3 and link == "See 'farandole explain configerror'"


def test_missing_and_invalid_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tinny is not a preset or file; did you mean tiny?"):
        load_config("tinny")
    with pytest.raises(ConfigError, match="presets are classify, default, gpt2-small, pretrain, sft, tiny"):
        load_config("nothing-like-it")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: .*line 1"):
        load_config(str(tmp_path / "bad.toml"))
    (tmp_path / "odd.toml").write_text("[model]\nwidht = 3\n")
    with pytest.raises(ConfigError, match="unknown key model.widht; did you mean model.width?"):
        load_config(str(tmp_path / "odd.toml"))
    (tmp_path / "preset.toml").write_text('preset = "nope"')
    with pytest.raises(ConfigError, match="presets are classify, default, gpt2-small, pretrain, sft, tiny"):
        load_config(str(tmp_path / "preset.toml"))


@settings(deadline=None, max_examples=50)
@given(batch=st.integers(1, 64), micro=st.integers(0, 64), ranks=st.integers(1, 9))
def test_micro_batches_divide_the_batch_or_the_suggestion_does(batch: int, micro: int, ranks: int) -> None:
    config = load_config("tiny", [f"batch={batch}", f"micro_batch={micro}"])
    try:
        count, size = config.micro_batches(ranks)
    except ConfigError as error:
        message = str(error).partition("; see ")[0]
        key, _, value = message.rpartition(" ")[2].partition("=")
        near = int(value) if key == "micro_batch" else int(message.rpartition(" ")[2].split("=")[-1])
        setting = "micro_batch" if "micro_batch=" in message else "batch"
        if setting == "micro_batch":
            with_overrides(config, [f"micro_batch={near}"]).micro_batches(ranks)
        else:
            with_overrides(config, [f"batch={near}", "micro_batch=0"]).micro_batches(ranks)
    else:
        assert count * size * ranks == batch
