"""Converted weights: the error of int8, the memory, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from farandole.cli.main import app
from farandole.native import WeightType
from farandole.serve.engine import GenerationEngine
from farandole.serve.llm import LLM
from farandole.serve.request import RequestError, Sampling
from farandole.serve.rows import IndependentRows
from farandole.serve.runner import Runner
from tests.serve.models import CONTEXT, LAYERS, models, run, vocabulary
from tests.serve.server import command, write_folder

DENSE = ("gpt2", "gptj", "llama", "mistral", "qwen3")


def quantized(family: str, dtype: torch.dtype = torch.float32) -> GenerationEngine:
    model = copy.deepcopy(models(family)[1]).to(dtype)
    return GenerationEngine(Runner(model, weights="int8", owned=True), context=CONTEXT, max_running=4)


def prompt_logprobs(engine: GenerationEngine, prompt: list[int]) -> torch.Tensor:
    number = engine.add(prompt, Sampling(max_tokens=1, temperature=0, prompt_logprobs=True))
    (output,) = run(engine)[number, 0]
    return torch.tensor([each.logprob for each in output.prompt_logprobs])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_int8_weights(rows: int, dtype: torch.dtype) -> None:
    """The error of a weight is at most half a step, the largest weight of its output / 127."""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(50, 70), torch.randn(rows, 70).to(dtype), torch.randn(50).to(dtype)
    parameter = torch.nn.Parameter(weight.clone().to(dtype), requires_grad=False)
    context = IndependentRows()
    context.convert(parameter, WeightType.INT8, release=True)
    with torch.inference_mode(), context:
        result = F.linear(x, parameter, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    step = weight.abs().amax(1) / 127 / 2
    rounding = 0.0 if dtype == torch.float32 else 2**-8
    bound = (
        x.double().abs().sum(1)[:, None] * (step + rounding * weight.abs().amax(1)) + rounding * exact.abs()
    )
    assert bool(((result.double() - exact).abs() <= bound + 1e-4).all())
    assert parameter.untyped_storage().nbytes() == parameter.element_size()
    assert bool(parameter.isnan().all())


@pytest.mark.parametrize("family", DENSE)
def test_the_log_probabilities_are_close_to_those_in_fp32(family: str) -> None:
    prompt = [(7 * i + 3) % vocabulary(family) for i in range(40)]
    exact = prompt_logprobs(GenerationEngine(models(family)[1], context=CONTEXT), prompt)
    found = prompt_logprobs(quantized(family), prompt)
    assert not torch.equal(found, exact)
    assert float((found - exact).abs().max()) < 0.25
    assert math.exp(float((exact - found).mean())) == pytest.approx(
        1, abs=0.03
    )  # the ratio of the perplexities
    rounded = prompt_logprobs(quantized(family, torch.bfloat16), prompt)
    assert float((rounded - exact).abs().max()) < 1.0


def test_the_logits_of_a_request_do_not_depend_on_the_batch() -> None:
    prompt = list(range(1, 30))
    expected = prompt_logprobs(quantized("llama"), prompt)
    engine = quantized("llama")
    for other in range(3):
        engine.add([other + 1] * (5 * other + 1), Sampling(max_tokens=4, temperature=0))
    assert torch.equal(prompt_logprobs(engine, prompt), expected)


def test_the_memory_of_the_weights_is_freed() -> None:
    model = copy.deepcopy(models("llama")[1])
    runner = Runner(model, weights="int8", owned=True)
    kept = sum(each.untyped_storage().nbytes() for each in model.parameters())
    embedding = model.get_parameter("0.tokens.weight").nbytes
    norms = sum(each.nbytes for each in model.parameters() if each.dim() == 1)
    assert kept <= embedding + norms + 4 * len(list(model.parameters()))
    packed = sum(each.values.nbytes for each in runner._rows._packed.values())
    assert packed < 1.6 * sum(each.numel() for each in model.parameters() if each.dim() == 2)  # padded to 32


@pytest.mark.parametrize("family", LAYERS)
def test_weights_in_fp32_are_stored_once(family: str) -> None:
    """The results are those of a runner that keeps the weights."""
    prompt = [(7 * i + 3) % vocabulary(family) for i in range(40)]
    model = copy.deepcopy(models(family)[1])
    size = sum(each.numel() for each in model.parameters())
    found = prompt_logprobs(GenerationEngine(Runner(model, owned=True), context=CONTEXT), prompt)
    assert torch.equal(found, prompt_logprobs(GenerationEngine(models(family)[1], context=CONTEXT), prompt))
    assert sum(each.untyped_storage().nbytes() for each in model.parameters()) < 4 * size


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_mixtures_of_experts_are_refused(family: str) -> None:
    with pytest.raises(RequestError, match="weights: int8 is not supported for mixtures of experts"):
        quantized(family)


def test_other_combinations_are_refused(tmp_path: Path) -> None:
    model = models("llama")[1]
    with pytest.raises(RequestError, match="weights: expected one of int8, got 'int4'"):
        Runner(model, weights="int4")
    with pytest.raises(RequestError, match="weights: int8 requires the C core"):
        Runner(model, use_core=False, weights="int8")
    folder = write_folder(tmp_path)
    with pytest.raises(RequestError, match="weights: int8 is not supported with tensor=2"):
        LLM(folder, tensor=2, weights="int8")
    result = CliRunner().invoke(
        app, ["serve", str(folder), "--port", "0", "--weights", "int8", "--tensor", "2"]
    )
    assert result.exit_code == 2
    assert "--weights: int8 is not supported with --tensor or --replicas" in result.output


def test_the_command(tmp_path: Path) -> None:
    with command(write_folder(tmp_path), "--weights", "int8") as (_, process):
        assert "(fp32, int8 weights, context" in process.read_stderr()
