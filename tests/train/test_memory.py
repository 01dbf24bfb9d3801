"""The memory check before training: configurations that do not fit are refused with advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farandole.launch.control_groups import available_memory
from farandole.train import start
from farandole.train.config import ConfigError, load_config
from farandole.train.memory import check_memory, check_step, summary
from farandole.train.start import Start, default_ranks
from tests.models.hf.folders import SCALED, config_folder

EACH = 16 + 12


def test_error_names_a_zero_stage_that_fits() -> None:
    """The model fits once on the host, but not once per rank."""
    width = 64
    while 50 * load_config("tiny", [f"model.width={width}"]).model.gpt().parameters < available_memory():
        width += 64
    words = [f"model.width={width}", "model.heads=2"]
    with pytest.raises(ConfigError, match=r"56 bytes per parameter\), .*; plan.zero=1 fits; try"):
        check_memory(load_config("tiny", words), 2)
    check_memory(load_config("tiny", [*words, "plan.zero=1"]), 2)


def test_accepts_a_model_that_fits() -> None:
    check_memory(load_config("default"), 2)


def test_error_names_the_widest_model_that_fits() -> None:
    config = load_config("tiny", ["model.width=1000000", "model.heads=4"])
    with pytest.raises(ConfigError) as error:
        check_memory(config, 3)
    assert "has 24.0 T parameters, which need 1.8 PiB on 3 ranks (" in str(error.value)
    found = re.search(
        r"this host's free memory is [\d.]+ [MGT]iB; try model.width=(\d+); see 'farandole explain does-not-fit'$",
        str(error.value),
    )
    assert found
    width = int(found[1])
    near = load_config("tiny", [f"model.width={width}", "model.heads=4"])
    check_memory(near, 3)
    assert EACH * 3 * near.model.gpt().parameters == pytest.approx(0.8 * available_memory(), rel=0.2)


def test_error_advises_other_changes_if_no_width_fits() -> None:
    with pytest.raises(ConfigError, match="use fewer ranks, or reduce model.layers or model.vocabulary"):
        check_memory(load_config("tiny", ["model.layers=10000000000"]), 2)


def test_error_names_a_micro_batch_that_fits() -> None:
    config = load_config(
        "default", ["batch=64", "plan.precision=fp32", "model.layers=4", "model.context=512"]
    )
    with pytest.raises(ConfigError, match=r"micro-batches of 32 samples needs .* on 2 ranks") as error:
        check_step(config, 2, 2 << 30)
    found = re.search(r"try micro_batch=(\d+), or run farandole plan", str(error.value))
    assert found and 32 % int(found[1]) == 0
    check_step(config.model_copy(update={"micro_batch": int(found[1])}), 2, 2 << 30)
    with pytest.raises(ConfigError, match="use fewer ranks or a smaller model.context"):
        check_step(config, 2, 1 << 28)


@pytest.mark.parametrize("scaling", SCALED)
def test_folders_whose_positions_depend_on_the_length(scaling: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "base", scaling)
    words = ["task=sft", f"model.folder={folder}", "model.pretrained=false", "model.context=32"]
    config = load_config(None, words)
    check_memory(config, 1)
    assert summary(Start(config, 1))["parameters"]


def test_a_dry_run_names_the_groups_that_share_samples() -> None:
    config = load_config("tiny", ["batch=8", "plan.tensor=2", "plan.precision=fp32"])
    lines = summary(Start(config, 4))
    assert lines["batch"] == "8 samples = 2 groups of 2 ranks x 1 micro-batch x 4"
    one, two = (summary(Start(config, ranks))["parameters"] for ranks in (2, 4))
    assert one == two


def test_a_split_model_is_not_counted_once_per_rank() -> None:
    """The states of all tensor-parallel ranks together are those of one rank."""
    width = 64
    while 40 * load_config("tiny", [f"model.width={width}"]).model.gpt().parameters < available_memory():
        width += 64
    words = [f"model.width={width}", "model.heads=2", "plan.precision=fp32"]
    with pytest.raises(ConfigError, match="56 bytes per parameter"):
        check_memory(load_config("tiny", words), 2)
    check_memory(load_config("tiny", [*words, "plan.tensor=2"]), 2)


def test_the_default_number_of_ranks_suits_the_expert_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "offered_ranks", lambda: 6)
    for words, ranks in (("plan.expert=2", 4), ("plan.tensor=2 plan.expert=2", 4), ("plan.expert=8", 8)):
        assert default_ranks(load_config("tiny", ["batch=8", *words.split()])) == ranks
    assert default_ranks(load_config("tiny", ["batch=6", "plan.expert=2"])) == 6


def test_the_memory_of_pipelines_is_predicted() -> None:
    """A rank holds the activations of several micro-batches; a refusal suggests more and smaller micro-batches."""
    words = ["batch=64", "plan.precision=fp32", "model.layers=4", "model.context=512", "plan.pipeline=2"]
    config = load_config("default", [*words, "plan.micro_batches=2"])
    lines = summary(Start(config, 2))
    assert re.search(r"predicted on 2 ranks", lines["memory"])
    assert re.fullmatch(r"ranks are idle for \d+ % of a step \(predicted\)", lines["pipeline"])
    with pytest.raises(ConfigError, match=r"micro-batches of 32 samples needs .* on 2 ranks") as error:
        check_step(config, 2, 2 << 30)
    found = re.search(r"try plan.micro_batches=(\d+), or run farandole plan", str(error.value))
    assert found and int(found[1]) == 4
    check_step(load_config("default", [*words, f"plan.micro_batches={found[1]}"]), 2, 2 << 30)


def test_schedules_that_the_number_of_stages_does_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan.schedule='chimera' with pipeline=3: .*even number"):
        check_memory(load_config("tiny", ["plan.pipeline=3", "plan.schedule=chimera"]), 3)
