"""Converted weights: the error of int8, the memory, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from farandole.cli.main import app
from farandole.comm.communicator import Communicator
from farandole.models.hf import from_pretrained
from farandole.models.layers import Head
from farandole.models.moe import StackedLinear
from farandole.models.sequence import Transformer
from farandole.native import WeightType
from farandole.serve.engine import GenerationEngine
from farandole.serve.llm import LLM
from farandole.serve.lora import read_adapters
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.shards import shard_model
from farandole.serve.request import RequestError, Sampling
from farandole.serve.rows import IndependentRows, weight_key
from farandole.serve.runner import Runner
from tests.serve.models import CONTEXT, LAYERS, models, run, vocabulary
from tests.serve.server import NAME, command, write_folder
from tests.serve.test_lora import adapters_of, results
from tests.serve.test_ranks import CASES, Case

INPUT_ROUNDING = 5e-3
"""The largest difference of log-probabilities that results from rounding the inputs of products with int8 weights.

A row of inputs is rounded to multiples of its largest value / 32767. Each rank has a part of a row with its own largest
value. Rounding the inputs of exact products of the small Llama in the same way changes log-probabilities by 7e-4.
"""
DENSE = ("gpt2", "gptj", "llama", "mistral", "qwen3")


def quantized(family: str, dtype: torch.dtype = torch.float32) -> GenerationEngine:
    model = copy.deepcopy(models(family)[1]).to(dtype)
    return GenerationEngine(Runner(model, weights="int8", owned=True), context=CONTEXT, max_running=4)


def prompt_logprobs(engine: GenerationEngine, prompt: list[int], lora: str | None = None) -> torch.Tensor:
    number = engine.add(prompt, Sampling(max_tokens=1, temperature=0, prompt_logprobs=True, lora=lora))
    (output,) = run(engine)[number, 0]
    return torch.tensor([each.logprob for each in output.prompt_logprobs])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_int8_weights(rows: int, dtype: torch.dtype) -> None:
    """The error of a weight is at most half a step; a step is the largest weight of the output divided by 127."""
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


def test_weights_that_a_step_computes_are_not_kept() -> None:
    """The memory of such a weight is reused for the next weight."""
    torch.manual_seed(0)
    context, x = IndependentRows(), torch.randn(5, 70)
    with torch.inference_mode(), context:
        for weight in torch.randn(4, 50, 70).bfloat16():
            assert torch.allclose(F.linear(x, weight.float()), x @ weight.float().T, atol=1e-4)
    assert not context._packed


@pytest.mark.parametrize("family", LAYERS)
def test_each_family_in_bf16(family: str) -> None:
    prompt = [(7 * i + 3) % vocabulary(family) for i in range(40)]
    model = copy.deepcopy(models(family)[1]).to(torch.bfloat16)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt]))[0].float().log_softmax(-1)
    expected = logprobs[torch.arange(39), torch.tensor(prompt[1:])]
    engine = GenerationEngine(Runner(model, owned=True), context=CONTEXT)  # may free the weights of the model
    found = prompt_logprobs(engine, prompt)
    assert float((found - expected).abs().median()) < 0.1


def rounded(family: str) -> Transformer:
    """Return the model with the weights that int8 values represent, in fp32."""
    model = copy.deepcopy(models(family)[1])
    head = model[-1]
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # separate from the embedding
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Head | StackedLinear):
                step = module.weight.abs().amax(-1, keepdim=True) / 127
                module.weight.copy_((module.weight / step.clamp(min=1e-30)).round() * step)
    return model


@pytest.mark.parametrize("family", LAYERS)
def test_the_log_probabilities_are_those_of_the_rounded_weights(family: str) -> None:
    """This also holds with experts, whose router would amplify other errors, and with an adapter, which is not
    rounded."""
    prompt = [(7 * i + 3) % vocabulary(family) for i in range(40)]
    adapters = read_adapters(models(family)[1], adapters_of(family))
    exact = GenerationEngine(Runner(rounded(family), adapters=adapters), context=CONTEXT)
    own = Runner(copy.deepcopy(models(family)[1]), adapters=adapters, weights="int8", owned=True)
    engine = GenerationEngine(own, context=CONTEXT)
    found = []
    for lora in (None, *adapters):
        found.append(prompt_logprobs(engine, prompt, lora))
        assert torch.allclose(found[-1], prompt_logprobs(exact, prompt, lora), atol=INPUT_ROUNDING, rtol=0)
        assert len(found) == 1 or not torch.allclose(found[-1], found[0], atol=1e-2)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_are_stored_once(family: str) -> None:
    for weights, size in (("", 4), ("int8", 1)):
        model = copy.deepcopy(models(family)[1])
        layers = [module for module in model.modules() if isinstance(module, StackedLinear)]
        count = sum(len(layer.weight) for layer in layers)
        runner = Runner(model, weights=weights, owned=True)
        assert sum(layer.weight.untyped_storage().nbytes() for layer in layers) == 4 * count
        values = [
            runner._rows._packed[weight_key(matrix)].values for layer in layers for matrix in layer.weight
        ]
        least = size * sum(layer.weight.numel() for layer in layers)
        assert least <= sum(each.nbytes for each in values) < 4 * least  # padded


def on_ranks(
    rank: int,
    size: int,
    folder: str,
    adapters: dict[str, Path],
    prompts: list[tuple[list[int], str | None]],
) -> Any:
    comm = Communicator(torch.distributed.group.WORLD)
    model = from_pretrained(folder, lazy=True).eval()
    shards = shard_model(model, comm, read_adapters(model, adapters))
    options: dict[str, Any] = {
        "adapters": shards.adapters,
        "weights": "int8",
        "largest": shards.largest_weights(),
        "owned": True,
    }
    if rank:
        Worker(model, comm, **options).follow()
        return None
    driver = LocalDriver(model, comm, **options)
    found = results(GenerationEngine(driver, context=CONTEXT), prompts)
    driver.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_round_weights_as_one(ranks: Any, case: Case) -> None:
    family, changes = case
    model = models(family, **changes)[1]
    adapters = {} if changes else adapters_of(family)
    prompts = [
        ([(i * i + 3) % vocabulary(family) for i in range(length)], lora)
        for lora, length in [(None, 9), *((name, 3) for name in adapters), (None, 1)]
    ]
    runner = Runner(copy.deepcopy(model), adapters=read_adapters(model, adapters), weights="int8", owned=True)
    expected = results(GenerationEngine(runner, context=CONTEXT), prompts)
    found, _ = ranks(2).run(on_ranks, str(model.pretrained.folder), adapters, prompts)  # type: ignore[union-attr]
    for own, other in zip(found, expected, strict=True):
        assert [each.token for each in own] == [each.token for each in other]
        assert [each.logprob for each in own] == pytest.approx(
            [each.logprob for each in other], abs=INPUT_ROUNDING
        )


def test_other_combinations_are_refused(tmp_path: Path) -> None:
    model = models("llama")[1]
    with pytest.raises(RequestError, match="weights: expected one of int8, got 'int4'"):
        Runner(model, weights="int4")
    with pytest.raises(RequestError, match="weights: int8 requires the C core"):
        Runner(model, use_core=False, weights="int8")
    folder = write_folder(tmp_path)
    with pytest.raises(RequestError, match="weights: expected one of int8, got 'int4'"):
        LLM(folder, tensor=2, weights="int4")
    for arguments in (["serve", str(folder), "--tensor", "2"], ["serve", str(folder)]):
        result = CliRunner().invoke(app, [*arguments, "--port", "0", "--weights", "int4"])
        assert result.exit_code == 2
        assert "farandole serve: --weights: expected one of int8, got 'int4'" in result.output
    result = CliRunner().invoke(app, ["generate", str(folder), "--weights", "int4"])
    assert (result.exit_code, result.output) == (
        2,
        "farandole generate: weights: expected one of int8, got 'int4'\n",
    )


def test_generation_without_a_server(tmp_path: Path) -> None:
    """`LLM` and the command generate the same text, also with two ranks."""
    folder = write_folder(tmp_path / "model")
    base = ["generate", str(folder), "--prompt", "say red", "--tokens", "12", "--temperature", "0"]
    sampling: Any = {"max_tokens": 12, "temperature": 0, "logprobs": 0}
    (exact,) = LLM(folder).generate(["say red"], **sampling)
    (one,) = LLM(folder, weights="int8").generate(["say red"], **sampling)
    assert one.completions[0].logprobs != exact.completions[0].logprobs
    with LLM(folder, weights="int8", tensor=2) as llm:
        (two,) = llm.generate(["say red"], **sampling)
    assert two.text == one.text
    assert [each.logprob for each in two.completions[0].logprobs] == pytest.approx(
        [each.logprob for each in one.completions[0].logprobs], abs=INPUT_ROUNDING
    )
    for more in ([], ["--tensor", "2"]):
        result = CliRunner().invoke(app, [*base, "--weights", "int8", *more])
        assert (result.exit_code, result.output) == (0, f"say red{one.text}\n")


@pytest.mark.parametrize("options", [["--tensor", "2"], ["--replicas", "2"]])
def test_several_ranks_serve(tmp_path: Path, options: list[str]) -> None:
    folder = write_folder(tmp_path)
    body = {"model": NAME, "prompt": "say red", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    (one,) = LLM(folder, weights="int8").generate(["say red"], max_tokens=12, temperature=0)
    with command(folder, "--name", NAME, "--weights", "int8", *options) as (address, process):
        assert "(fp32, int8 weights, " in process.read_stderr()
        texts = [
            requests.post(address + "/v1/completions", json=body).json()["choices"][0]["text"]
            for _ in range(3)
        ]
    assert texts == [one.text] * 3


def test_the_command(tmp_path: Path) -> None:
    with command(write_folder(tmp_path), "--weights", "int8") as (_, process):
        assert "(fp32, int8 weights, context" in process.read_stderr()
