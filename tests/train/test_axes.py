"""`farandole train` with tensor, context and expert parallelism: the losses of one process, for every part of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from farandole.cli.main import app
from farandole.train.config import load_config
from farandole.train.start import default_ranks
from tests.models.hf.folders import WORDS, model_with_tokenizer
from tests.train.command import Command, losses, only_run

COMMON = (
    *("data.path=text.txt", "data.cache=cache", "data.validation_share=0.1", "plan.precision=fp32"),
    *("steps=4", "batch=4", "micro_batch=1", "checkpoint.every=2", "log.tensorboard=false"),
    *("evaluate.every=2", "evaluate.samples=5", "sample.every=2", "sample.prompt=s", "sample.tokens=12"),
    *("model.context=8", "optimizer.learning_rate=1e-2", "sample.temperature=0"),
)
GPT = ("tiny", "model.vocabulary=300", "model.dropout=0.0")
EXPERTS = ("pretrain", "model=mixtral", "model.balance_loss=0.1", "model.z_loss=0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    (folder / "text.txt").write_text("\n".join(f"say {WORDS[n % 11]} {WORDS[n * n % 7]}" for n in range(300)))
    model_with_tokenizer(folder / "mixtral", "mixtral")
    for words, out in ((GPT, "gpt"), (EXPERTS, "experts")):
        command = Command(folder, "train", *words, *COMMON, f"out={out}", "--ranks", "1")
        assert command.end() == 0, command.output
        (folder / f"{out}.txt").write_text(_generate(only_run(folder / out)))
    return folder


def _generate(run: Path) -> str:
    result = CliRunner().invoke(
        app, ["generate", str(run), "--prompt", "s", "--tokens", "12", "--temperature", "0"]
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("from ")
    return result.stdout


def _validation(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["validation_loss"] for r in records if "validation_loss" in r]


def _samples(run: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]


def _compare(run: Path, alone: Path) -> None:
    assert losses(run) == pytest.approx(losses(alone), rel=2e-5)
    assert _validation(run) == pytest.approx(_validation(alone), rel=2e-5)
    assert _samples(run) == _samples(alone)
    weights, expected = (
        load_file(path / "checkpoints" / "step-000004" / "model.safetensors") for path in (run, alone)
    )
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.shape == expected[name].shape
        # AdamW divides small gradients by their own size, which enlarges rounding errors
        assert (value - expected[name]).abs().mean() < 1e-4, name


@pytest.mark.parametrize(
    ("model", "ranks", "plan", "then"),
    [
        ("gpt", 2, "plan.context=2", "plan.context=1"),
        ("gpt", 4, "plan.zero=3 plan.data_shard=2", "plan.zero=2 plan.data_shard=host"),
        (
            *("gpt", 4, "plan.tensor=2 plan.sequence=true plan.zero=2"),
            "plan.tensor=1 plan.sequence=false plan.context=2 plan.zero=1",
        ),
        (
            *("gpt", 4, "plan.pipeline=2 plan.tensor=2 plan.sequence=true"),
            "plan.pipeline=1 plan.tensor=1 plan.sequence=false",
        ),
        ("gpt", 2, "plan.pipeline=2 plan.schedule=gems", "plan.pipeline=1 plan.schedule=1f1b plan.data=2"),
        ("gpt", 4, "plan.data=2 plan.pipeline=2 plan.schedule=zb-h1", "plan.data=1 plan.schedule=1f1b"),
        ("gpt", 2, "plan.data=2", "plan.data=1 plan.pipeline=2 plan.schedule=gems"),
        ("experts", 2, "plan.expert=2", "plan.expert=1"),
        ("experts", 4, "plan.expert=2 plan.tensor=2 plan.zero=3", "plan.tensor=1 plan.zero=1"),
        ("experts", 4, "plan.expert=2 plan.pipeline=2 plan.zero=1", "plan.expert=1 plan.zero=0"),
    ],
)
def test_a_mesh_trains_evaluates_samples_and_resumes_as_one_process(
    folder: Path, tmp_path: Path, model: str, ranks: int, plan: str, then: str
) -> None:
    words, alone = {"gpt": GPT, "experts": EXPERTS}[model], only_run(folder / model)
    out = tmp_path / "runs"
    options = (*COMMON, f"out={out}", *plan.split(), "--ranks", str(ranks))
    command = Command(folder, "train", *words, *options)
    assert command.end() == 0, command.output
    assert "the report failed" not in command.output
    run = only_run(out)
    _compare(run, alone)

    assert _generate(run) == (folder / f"{model}.txt").read_text()

    command = Command(
        folder, "train", "--resume", str(run / "checkpoints" / "step-000002"), *then.split(), "--ranks", "2"
    )
    assert command.end() == 0, command.output
    _compare(run, alone)


def test_plans_that_the_model_does_not_support_are_refused_before_training(folder: Path) -> None:
    command = Command(folder, "train", *GPT, *COMMON, "plan.expert=2", "out=refused", "--ranks", "2")
    assert command.end() == 2, command.output
    assert "plan.expert=2: Transformer has no mixture of experts; nearest plan: expert=1" in command.output
    assert not (folder / "refused").exists()


def test_groups_that_do_not_divide_the_ranks_are_refused_before_training(folder: Path) -> None:
    plan = ("plan.zero=1", "plan.data_shard=3")
    command = Command(folder, "train", *GPT, *COMMON, *plan, "out=refused", "--ranks", "2")
    assert command.end() == 2, command.output
    assert "plan.data_shard=3 does not divide data=2; nearest plan: data_shard=2" in command.output
    assert not (folder / "refused").exists()


def test_router_keys_are_refused_for_models_without_experts(folder: Path) -> None:
    model_with_tokenizer(folder / "llama")
    for words, says in (
        (GPT, "model: balance_loss=0.1 requires a mixture of experts: use model=FOLDER"),
        (
            ("pretrain", "model=llama"),
            "model=llama is a llama model without experts; use model.balance_loss=0",
        ),
    ):
        command = Command(folder, "train", *words, *COMMON, "model.balance_loss=0.1", "out=routers")
        assert command.end() == 2, command.output
        assert says in " ".join(command.output.split())
        assert not (folder / "routers").exists()


def test_a_capacity_drops_tokens_and_the_load_of_routers_is_recorded(folder: Path) -> None:
    command = Command(
        folder,
        "train",
        *EXPERTS,
        *COMMON,
        "model.capacity=0.5",
        "out=dropped",
        "plan.expert=2",
        "--ranks",
        "2",
    )
    assert command.end() == 0, command.output
    record = json.loads((only_run(folder / "dropped") / "metrics.jsonl").read_text().splitlines()[0])
    routers = sorted({name.partition("/")[0] for name in record if "/" in name})
    assert routers
    for router in routers:
        assert sum(record[f"{router}/load/{expert}"] for expert in range(4)) == pytest.approx(1)
        assert record[f"{router}/imbalance"] >= 1
        assert record[f"{router}/dropped"] >= 0.5
    alone = json.loads((only_run(folder / "experts") / "metrics.jsonl").read_text().splitlines()[0])
    assert all(alone[f"{router}/dropped"] == 0 for router in routers)
    assert alone["loss"] != pytest.approx(record["loss"], rel=1e-3)


def test_the_default_number_of_ranks_fits_the_mesh() -> None:
    for plan, ranks in ((("plan.data=2", "plan.expert=2"), 4), (("plan.tensor=4", "plan.context=2"), 8)):
        assert default_ranks(load_config("tiny", list(plan))) == ranks
    assert default_ranks(load_config("tiny", ["plan.expert=4", "plan.tensor=2"])) == 8
