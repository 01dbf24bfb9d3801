"""`farandole train` with pipeline stages: the division of batches, refused plans, and models of Hugging Face
folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from farandole.models.generate import generate
from farandole.train.config import ConfigError, load_config
from farandole.train.memory import check_memory
from farandole.train.start import CHANGEABLE, default_ranks
from tests.models.hf.families import rope, transformers
from tests.models.hf.folders import conversations, model_with_tokenizer, write_jsonl
from tests.train.command import losses
from tests.train.small import make_trainer, overrides, train_here


def test_stages_share_the_samples_of_a_replica() -> None:
    config = load_config("tiny", ["plan.pipeline=2", "plan.micro_batches=4"])
    assert config.micro_batches(2) == (4, 2)
    assert config.micro_batches(4) == (4, 1)
    assert load_config("tiny", ["plan.pipeline=2"]).micro_batches(2) == (8, 1)
    assert load_config("tiny", ["plan.pipeline=2", "batch=20"]).micro_batches(2) == (5, 4)
    assert load_config("tiny", ["plan.pipeline=2", "micro_batch=2"]).micro_batches(2) == (4, 2)
    assert default_ranks(load_config("tiny", ["plan.pipeline=4", "plan.data=2"])) == 8
    assert load_config("tiny", ["plan.pipeline=2", "plan.stage_bytes=9"]).plan.plan("fp32").stage_bytes == 9
    for key in ("plan.pipeline", "plan.schedule", "plan.micro_batches", "plan.stage_bytes"):
        assert key.startswith(CHANGEABLE)


def _check(words: list[str]) -> None:
    config = load_config("tiny", words)
    config.micro_batches(2)
    check_memory(config, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan.micro_batches=3"],
            "plan.micro_batches=3 must divide 8, .*; try plan.micro_batches=2",
        ),
        (["plan.micro_batches=2", "micro_batch=4"], "are mutually exclusive"),
        (["plan.schedule=1f1"], "plan.schedule='1f1' .*did you mean 1f1b"),
        (["plan.zero=3"], "plan.zero=3 with pipeline=2: .*nearest plan: zero=2"),
        (
            ["plan.recompute=auto", "plan.activation_bytes=9", "plan.schedule=gpipe"],
            "peak memory grows with the number of micro-batches.*nearest plan: schedule='1f1b'",
        ),
        (
            ["model.layers=1", "plan.schedule=zb-v"],
            "plan.pipeline=2, .*blocks cannot be divided into 4 stages",
        ),
    ],
)
def test_plans_without_stages_are_refused_before_training(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check(["plan.pipeline=2", *words])


Steps = tuple[list[float], dict[str, float], float, list[dict[str, float]]]
"""The losses of 3 steps, the metrics of an evaluation, the time for which a rank has waited, and the imbalance of
routers."""


def _steps(rank: int, size: int, preset: str, words: list[str], out: Path) -> Steps:
    trainer = make_trainer(words, preset=preset)
    results = [trainer.step() for _ in range(3)]
    imbalances = [{name: load.imbalance for name, load in r.loads.items()} for r in results]
    found = [r.loss for r in results], trainer.evaluate(), results[-1].waited_s, imbalances
    trainer.engine.save_pretrained(out)
    trainer.engine.close()
    return found


@pytest.mark.parametrize(
    ("family", "changes", "plan", "routers"),
    [
        ("llama", {}, ["plan.pipeline=2", "plan.recompute=attention"], 0),
        ("mixtral", {"num_hidden_layers": 4}, ["plan.pipeline=2", "plan.expert=2", "plan.zero=1"], 4),
        (
            "deepseek_v3",
            {"num_hidden_layers": 4, "first_k_dense_replace": 1, "rope_parameters": rope("default", 8)},
            ["plan.pipeline=2", "plan.expert=2", "plan.schedule=zb-h1"],
            3,
        ),
    ],
)
def test_conversations_train_in_stages_as_in_one_process(
    ranks: Any, tmp_path: Path, family: str, changes: dict[str, Any], plan: list[str], routers: int
) -> None:
    model_with_tokenizer(tmp_path / "base", family, **changes)
    write_jsonl(tmp_path / "chat.jsonl", conversations(40, 2))
    words = [f"model={tmp_path / 'base'}", f"data.path={tmp_path / 'chat.jsonl'}", f"data.cache={tmp_path}"]
    words += [
        "model.context=64",
        "batch=4",
        "evaluate.samples=3",
        *["model.balance_loss=0.1"] * bool(routers),
    ]
    ((losses, metrics, _, imbalances),) = ranks(1).run(_steps, "sft", words, tmp_path / "alone")
    assert len(imbalances[0]) == routers
    size = 2 ** len([word for word in plan if word.endswith("=2")])
    results = ranks(size).run(_steps, "sft", [*words, *plan, "plan.micro_batches=2"], tmp_path / "stages")
    for found, own_metrics, waited_s, own_imbalances in results:
        assert found == pytest.approx(losses, rel=1e-4)
        assert own_metrics == pytest.approx(metrics, rel=1e-4)
        assert waited_s > 0
        assert own_imbalances[0] == pytest.approx(imbalances[0])
        assert all(own.keys() == imbalances[0].keys() for own in own_imbalances)
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected, written = (load(tmp_path / folder).state_dict() for folder in ("alone", "stages"))
    assert written.keys() == expected.keys()
    for name, value in written.items():
        # AdamW divides small gradients by their own size, which enlarges rounding errors
        assert (value - expected[name]).abs().mean() < 1e-5, name


def test_padded_texts_train_in_stages_as_in_one_process(ranks: Any, tmp_path: Path) -> None:
    model_with_tokenizer(tmp_path / "base", "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    texts = [{"text": "say" + n % 5 * " red", "label": n % 2} for n in range(40)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    words = [f"model={tmp_path / 'base'}", f"data.path={tmp_path / 'texts.jsonl'}", f"data.cache={tmp_path}"]
    words += ["batch=8", "data.validation_share=0.2"]
    staged = [*words, "plan.pipeline=2", "plan.micro_batches=2"]
    ((expected, metrics, *_),) = ranks(1).run(_steps, "classify", words, tmp_path / "alone")
    for found, own_metrics, *_ in ranks(2).run(_steps, "classify", staged, tmp_path / "stages"):
        assert found == pytest.approx(expected, rel=1e-4)
        assert own_metrics == pytest.approx(metrics, rel=1e-4)


def test_adapters_train_in_stages_as_in_one_process_and_resume_in_any_layout(
    ranks: Any, tmp_path: Path
) -> None:
    model_with_tokenizer(tmp_path / "llama")
    write_jsonl(tmp_path / "chat.jsonl", conversations(40, 2))
    words = ["sft", f"model={tmp_path / 'llama'}", f"data.path={tmp_path / 'chat.jsonl'}"]
    words += [f"data.cache={tmp_path}", "model.context=64", "batch=4", "steps=4", "checkpoint.every=2"]
    words += ["plan.precision=fp32", "plan.lora_rank=4", "optimizer.learning_rate=1e-2"]
    staged = [*words, "plan.pipeline=2", "plan.micro_batches=2"]
    alone, whole, resumed, moved = (tmp_path / name for name in ("alone", "whole", "resumed", "moved"))
    ranks(1).run(train_here, words, alone)
    ranks(2).run(train_here, staged, whole)
    checkpoint = whole / "checkpoints" / "step-000002"
    ranks(2).run(train_here, staged, resumed, checkpoint)
    ranks(1).run(train_here, words, moved, checkpoint)
    expected = losses(whole)
    assert expected == pytest.approx(losses(alone), rel=1e-4)
    assert losses(resumed) == {step: expected[step] for step in (3, 4)}
    assert losses(moved) == pytest.approx(losses(resumed), rel=1e-4)
    adapter = Path("checkpoints/step-000004/adapter")
    for file in (adapter / "adapter_model.safetensors", adapter / "adapter_config.json"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    tokens = torch.randint(0, 300, (2, 9))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, whole / adapter).eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(whole / "model").eval()(tokens).logits
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-3)


def _generated(rank: int, size: int, words: list[str]) -> tuple[list[int], str]:
    model = make_trainer(words).model
    assert isinstance(model, torch.nn.Sequential)
    tokens = list(generate(model, [1, 2, 3], 8, context=32, temperature=0))
    with pytest.raises(RuntimeError) as error, torch.enable_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    return tokens, str(error.value)


def test_stages_generate_the_tokens_of_one_process(ranks: Any, tmp_path: Path) -> None:
    words = [*overrides(tmp_path), "model.layers=4"]
    expected = ranks(2).run(_alone, words)[0]
    for schedule in ("1f1b", "zb-v", "gems"):
        for tokens, message in ranks(2).run(
            _generated, [*words, "plan.pipeline=2", f"plan.schedule={schedule}"]
        ):
            assert tokens == expected
            assert "only in evaluation mode" in message


def _alone(rank: int, size: int, words: list[str]) -> list[int]:
    model = make_trainer(words).model
    assert isinstance(model, torch.nn.Sequential)
    return list(generate(model, [1, 2, 3], 8, context=32, temperature=0))
