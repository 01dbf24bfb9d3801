"""Compare the generation engine with transformers: 16 ragged requests, one after another and all at once.

    python -m benchmarks.serving [--threads 1] [--rounds 3] [--save]

The model is a Llama with 24 M parameters in fp32.  Prompts have 8 to 128 tokens and answers 32 to 128 tokens, so that
requests join and leave the batch at different times.  The limit is the time of the matrix products alone, at the
speed of a large product of torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.measure import records_table, save
from farandole.bench.serving.limit import measure_limit
from farandole.bench.serving.load import Request, ragged_requests
from farandole.models.hf import from_pretrained
from farandole.serve.engine import GenerationEngine
from farandole.serve.request import Sampling
from tests import torchvision_models  # noqa: F401, I001 - before transformers is imported

VOCABULARY, CONTEXT, REQUESTS = 4096, 512, 16


def write_model(folder: Path) -> Any:
    """Write the model, and return it as a model of transformers."""
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
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


# ---- implementations; each returns the generated tokens ----


def one_by_one_with_transformers(model: Any, requests: list[Request]) -> list[list[int]]:
    """Generate one request after another."""
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
    """Generate all requests in one padded batch; tokens after the end of a request do not count."""
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
    """Generate all requests with continuous batching; each request has its own number of tokens."""
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
    """Generate all requests at once."""
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
    """Generate one request after another."""
    return [ours(engine, [request])[0] for request in requests]


# ---- measurement ----


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/serving-THREADS.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    requests = ragged_requests(REQUESTS, (8, 128), (32, 128), VOCABULARY, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_model(Path(folder))
        engines = {
            (store, precision): GenerationEngine(
                from_pretrained(folder, dtype=dtype), context=CONTEXT, store=store
            )
            for store in ("pages", "slots")
            for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
        limit = measure_limit(from_pretrained(folder))
    best = limit.products_s([(len(request.prompt), request.output_tokens) for request in requests])
    implementations: dict[str, Callable[[], list[list[int]]]] = {
        "transformers, one by one": lambda: one_by_one_with_transformers(theirs, requests),
        "transformers, static batch": lambda: static_batch_with_transformers(theirs, requests),
        "transformers, continuous": lambda: continuous_batch_with_transformers(theirs, requests),
        "farandole, one by one": lambda: ours_one_by_one(engines["pages", "fp32"], requests),
    }
    for (store, precision), engine in engines.items():
        implementations[f"farandole, {store}, {precision}"] = lambda engine=engine: ours(engine, requests)
    generated = sum(request.output_tokens for request in requests)
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(options.rounds + 1):
        for name, implementation in implementations.items():
            start = time.perf_counter()
            tokens[name] = implementation()
            if turn:
                samples[name].append(time.perf_counter() - start)
    reference = tokens["transformers, one by one"]
    rows = []
    for name, seconds in samples.items():
        equal = sum(a == b for a, b in zip(tokens[name], reference, strict=True))
        rows.append(
            {
                "implementation": name,
                "tokens/s": round(generated / statistics.median(seconds)),
                "lowest": round(generated / max(seconds)),
                "highest": round(generated / min(seconds)),
                "of the limit": f"{best / statistics.median(seconds):.0%}",
                "equal to transformers, one by one": f"{equal} of {REQUESTS}",
            }
        )
    print(records_table(rows))
    metrics = engines["pages", "fp32"].metrics
    outside = 1 - metrics.model_time / metrics.step_time
    print(f"limit: {generated / best:.0f} tokens/s; scheduling and sampling take {outside:.1%} of a step")
    if options.save:
        result = {"threads": options.threads, "outside the model": round(outside, 4), "rows": rows}
        save(f"serving-{options.threads}", result)


if __name__ == "__main__":
    main()
