"""Compare the generation engine with other implementations: 16 ragged requests, one after another and all at once.

    python -m benchmarks.serving [--threads 1] [--rounds 3] [--only PATTERN] [--save NAME]
    python -m benchmarks.serving --model FOLDER --peers PYTHON ...      # see `serving_peers.py`

The model is a Llama with 24 M random parameters.  Prompts have 8 to 128 tokens and outputs 32 to 128 tokens, so that
requests join and leave the batch at different times.  The rounds of all implementations are interleaved, after one
round that does not count.  The limit is the time of the matrix products alone in fp32, at the speed of a large matrix
product in torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.measure import records_table, save
from benchmarks.serving_peers import IMPLEMENTATIONS as PEERS
from farandole.bench.serving.limit import measure_limit
from farandole.bench.serving.load import Request, ragged_requests
from farandole.models.hf import from_pretrained
from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import PRECISIONS
from farandole.serve.request import Sampling
from farandole.serve.runner import Runner
from tests import torchvision_models  # noqa: F401, I001 - before transformers is imported

VOCABULARY, CONTEXT, REQUESTS = 4096, 512, 16
FORMATS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "int8": {"precision": "fp32", "weights": "int8"},
    "bf16, int8": {"precision": "bf16", "weights": "int8"},
}
"""The options of farandole's engines, by name."""

Generate = Callable[[], tuple[float, list[list[int]]]]
"""Processes all requests, and returns the seconds and the tokens."""


def write_model(folder: Path) -> None:
    """Write the model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


# ---- implementations; each returns the generated tokens ----


def one_by_one_with_transformers(model: Any, requests: list[Request]) -> list[list[int]]:
    """Process one request after another."""
    found = []
    for request in requests:
        inputs = torch.tensor([request.prompt])
        result = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=request.output_tokens,
            do_sample=False,
        )
        found.append(result[0, len(request.prompt) :].tolist())
    return found


def static_batch_with_transformers(model: Any, requests: list[Request]) -> list[list[int]]:
    """Process all requests in one padded batch; tokens after the end of a request do not count."""
    longest = max(len(request.prompt) for request in requests)
    padding = [longest - len(request.prompt) for request in requests]
    inputs = torch.tensor([[0] * n + request.prompt for n, request in zip(padding, requests, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    most = max(request.output_tokens for request in requests)
    result = model.generate(inputs, attention_mask=mask, max_new_tokens=most, do_sample=False)
    return [
        row[longest : longest + request.output_tokens].tolist()
        for row, request in zip(result, requests, strict=True)
    ]


def continuous_batch_with_transformers(model: Any, requests: list[Request]) -> list[list[int]]:
    """Process all requests with continuous batching; each request has its own number of tokens."""
    config = transformers.GenerationConfig(
        max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        names = [
            manager.add_request(request.prompt, max_new_tokens=request.output_tokens) for request in requests
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
    finally:
        manager.stop(block=True)
    return [found[name] for name in names]


def ours(engine: GenerationEngine, requests: list[Request]) -> list[list[int]]:
    """Process all requests at once."""
    numbers = [
        engine.add(request.prompt, Sampling(max_tokens=request.output_tokens, temperature=0))
        for request in requests
    ]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for output in engine.step():
            found[output.request].extend(output.tokens)
    return [found[number] for number in numbers]


def ours_one_by_one(engine: GenerationEngine, requests: list[Request]) -> list[list[int]]:
    """Process one request after another."""
    return [ours(engine, [request])[0] for request in requests]


# ---- measurement ----


def timed(call: Callable[[], list[list[int]]]) -> Generate:
    """Return a function that calls `call`, and returns the seconds and the tokens."""

    def generate() -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        tokens = call()
        return time.perf_counter() - start, tokens

    return generate


def peer(
    stack: contextlib.ExitStack, python: str, folder: Path, name: str, threads: int, line: str
) -> Generate:
    """Start a process with another implementation, and return a function that generates with this process."""
    script = str(Path(__file__).with_name("serving_peers.py"))
    command = [python, script, "run", str(folder), name, str(threads)]
    process = stack.enter_context(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    )
    stack.callback(process.kill)
    assert process.stdin is not None and process.stdout is not None
    requests, results = process.stdin, process.stdout

    def generate() -> tuple[float, list[list[int]]]:
        requests.write(line + "\n")
        requests.flush()
        for text in results:
            if text.startswith("result "):
                seconds, tokens = json.loads(text.removeprefix("result "))
                return seconds, tokens
        raise RuntimeError(f"{name} ended with status {process.wait()}")

    return generate


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a model folder that --write has written")
    parser.add_argument("--write", type=Path, help="only write the model to this folder")
    parser.add_argument("--peers", help="the interpreter of an environment for serving_peers.py")
    parser.add_argument(
        "--only", default="", help="only implementations whose names match this regular expression"
    )
    parser.add_argument("--save", metavar="NAME", help="write docs/benchmarks/NAME.json")
    options = parser.parse_args()
    if options.write:
        write_model(options.write)
        return
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    requests = ragged_requests(REQUESTS, (8, 128), (32, 128), VOCABULARY, seed=0)
    line = json.dumps([(list(request.prompt), request.output_tokens) for request in requests])
    with contextlib.ExitStack() as stack:
        folder = options.model
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_model(folder)
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        limit = measure_limit(from_pretrained(folder))
        best = limit.products_s([(len(request.prompt), request.output_tokens) for request in requests])
        implementations: dict[str, Generate] = {
            "transformers, one by one": timed(lambda: one_by_one_with_transformers(theirs, requests)),
            "transformers, static batch": timed(lambda: static_batch_with_transformers(theirs, requests)),
            "transformers, continuous": timed(lambda: continuous_batch_with_transformers(theirs, requests)),
        }
        engines = {name: engine_of(folder, **kinds) for name, kinds in FORMATS.items()}
        for name, engine in engines.items():
            implementations[f"farandole, {name}"] = timed(lambda engine=engine: ours(engine, requests))
        alone = engine_of(folder)
        implementations["farandole, one by one"] = timed(lambda: ours_one_by_one(alone, requests))
        slots = engine_of(folder, store="slots")
        implementations["farandole, fp32, slots"] = timed(lambda: ours(slots, requests))
        for name in PEERS if options.peers else ():
            if re.search(options.only, name):
                implementations[name] = peer(stack, options.peers, folder, name, options.threads, line)
        reference = ours(alone, requests)
        chosen = {name: call for name, call in implementations.items() if re.search(options.only, name)}
        samples: dict[str, list[float]] = {name: [] for name in chosen}
        equal: dict[str, int] = {}
        for turn in range(options.rounds + 1):
            for name, call in chosen.items():
                seconds, tokens = call()
                equal[name] = sum(a == b for a, b in zip(tokens, reference, strict=True))
                if turn:
                    samples[name].append(seconds)
    generated = sum(request.output_tokens for request in requests)
    rows = [
        {
            "implementation": name,
            "tokens/s": round(generated / statistics.median(seconds)),
            "lowest": round(generated / max(seconds)),
            "highest": round(generated / min(seconds)),
            "of the limit": f"{best / statistics.median(seconds):.0%}",
            "equal to farandole, fp32": f"{equal[name]} of {REQUESTS}",
        }
        for name, seconds in samples.items()
    ]
    print(records_table(rows))
    print(f"limit: {generated / best:.0f} tokens/s")
    for name, engine in engines.items():
        if f"farandole, {name}" in chosen:
            metrics = engine.metrics
            outside = 1 - metrics.model_time / metrics.step_time
            step = 1e3 * metrics.step_time / metrics.steps
            print(f"{name}: {step:.2f} ms per step, {outside:.1%} of it for scheduling and sampling")
    if options.save:
        save(options.save, {"threads": options.threads, "rows": rows})


def engine_of(
    folder: Path, precision: str = "fp32", weights: str = "", store: str = "pages"
) -> GenerationEngine:
    """Return an engine for the model."""
    model = from_pretrained(folder, dtype=PRECISIONS[precision])
    return GenerationEngine(Runner(model, weights=weights, owned=True), context=CONTEXT, store=store)


if __name__ == "__main__":
    main()
