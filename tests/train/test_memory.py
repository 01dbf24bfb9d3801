"""What does not fit is refused with what would."""

from __future__ import annotations

import re

import pytest

from farandole.launch.control_groups import available_memory
from farandole.train.config import ConfigError, load_config
from farandole.train.memory import check_memory, check_step

EACH = 16 + 12


def test_a_stage_that_fits_is_named() -> None:
    """A model that two ranks can hold together, and not one each."""
    width = 64
    while 50 * load_config("tiny", [f"model.width={width}"]).model.gpt().parameters < available_memory():
        width += 64
    words = [f"model.width={width}", "model.heads=2"]
    with pytest.raises(ConfigError, match=r"56 bytes per parameter\), .*; plan.zero=1 fits; nearest"):
        check_memory(load_config("tiny", words), 2)
    check_memory(load_config("tiny", [*words, "plan.zero=1"]), 2)


def test_a_model_that_fits_is_not_refused() -> None:
    check_memory(load_config("default"), 2)


def test_the_widest_that_fits_is_named() -> None:
    config = load_config("tiny", ["model.width=1000000", "model.heads=4"])
    with pytest.raises(ConfigError) as error:
        check_memory(config, 3)
    assert "makes 24.0 T parameters, which need 1.8 PiB on 3 ranks (" in str(error.value)
    found = re.search(
        r"this host has [\d.]+ [MGT]iB; nearest that fits: model.width=(\d+)$", str(error.value)
    )
    assert found
    width = int(found[1])
    near = load_config("tiny", [f"model.width={width}", "model.heads=4"])
    check_memory(near, 3)
    assert EACH * 3 * near.model.gpt().parameters == pytest.approx(0.8 * available_memory(), rel=0.2)


def test_where_no_width_fits_something_else_is_advised() -> None:
    with pytest.raises(ConfigError, match="fewer ranks, model.layers or model.vocabulary need less"):
        check_memory(load_config("tiny", ["model.layers=10000000000"]), 2)


def test_a_step_that_does_not_fit_names_a_smaller_one() -> None:
    config = load_config(
        "default", ["batch=64", "plan.precision=fp32", "model.layers=1", "model.context=512"]
    )
    with pytest.raises(ConfigError, match=r"32 samples at a time needs .* on 2 ranks") as error:
        check_step(config, 2, 2 << 30)
    found = re.search(r"nearest that fits: micro_batch=(\d+), and farandole plan", str(error.value))
    assert found and 32 % int(found[1]) == 0
    check_step(config.model_copy(update={"micro_batch": int(found[1])}), 2, 2 << 30)
    with pytest.raises(ConfigError, match="fewer ranks or a smaller model.context need less"):
        check_step(config, 2, 1 << 28)
