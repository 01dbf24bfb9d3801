"""Compare speculative decoding with decoding one token per step: one request, and 16 at once.

    python -m benchmarks.speculation [--threads 2] [--rounds 3] [--save]

The model is a Llama with 110 M random parameters in fp32.  Its greedily decoded text soon repeats itself, but its
sampled text does not.  The layers of the model after the first two have little effect, so that the draft model, which
has the first two layers, predicts the greedy text as a trained draft model would.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from farandole.bench.serving_load import ragged_requests

from benchmarks.measure import records_table, save
from farandole.models.hf import from_pretrained
from farandole.models.sequence import Transformer
from farandole.serve.engine import GenerationEngine
from farandole.serve.request import Sampling
from farandole.serve.runner import Runner
from farandole.serve.speculation.draft import DraftModel
from tests import torchvision_models  # noqa: F401, I001 - before transformers is imported

VOCABULARY, CONTEXT, TOKENS = 4096, 512, 64
LAYERS, DRAFT_LAYERS = 12, 2
TEXTS: dict[str, dict[str, Any]] = {
    "repetitive": {"temperature": 0.0},
    "random": {"temperature": 1.0, "seed": 1},
}


def write_models(folder: Path) -> tuple[Transformer, Transformer]:
    """Write the model and the draft model to `folder`, and return both."""
    torch.manual_seed(0)
    found = []
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "intermediate_size": 2688,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, num_hidden_layers=LAYERS)).eval()
    with torch.no_grad():
        for layer in model.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    draft = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config, num_hidden_layers=DRAFT_LAYERS)
    ).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    for name, each in (("model", model), ("draft", draft)):
        each.save_pretrained(folder / name)
        found.append(from_pretrained(folder / name).eval())
    return found[0], found[1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/speculation-THREADS.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model, draft = write_models(Path(folder))
    choices: dict[str, dict[str, Any]] = {
        "off": {},
        "lookup": {"speculate": "lookup"},
        "draft": {"speculate": "draft", "draft": DraftModel(Runner(draft), CONTEXT)},
    }
    runner = Runner(model)
    engines = {name: GenerationEngine(runner, context=CONTEXT, **choice) for name, choice in choices.items()}
    requests = ragged_requests(16, (16, 64), (TOKENS, TOKENS), VOCABULARY, seed=0)
    seconds: dict[tuple[str, int, str], list[float]] = {}
    proposed: dict[tuple[str, int, str], list[int]] = {}
    for engine in engines.values():  # measures step times, and packs the weights
        run(engine, [each.prompt for each in requests], {"temperature": 0.0, "max_tokens": 8})
    for _ in range(options.rounds):
        for text, parameters in TEXTS.items():
            for count in (1, 16):
                results = []
                for name, engine in engines.items():
                    metrics = engine.metrics
                    before = metrics.proposed_tokens, metrics.accepted_tokens
                    start = time.perf_counter()
                    results.append(run(engine, [each.prompt for each in requests[:count]], parameters))
                    key = text, count, name
                    seconds.setdefault(key, []).append(time.perf_counter() - start)
                    counts = proposed.setdefault(key, [0, 0])
                    counts[0] += metrics.proposed_tokens - before[0]
                    counts[1] += metrics.accepted_tokens - before[1]
                assert results[0] == results[1] == results[2], "speculation changed the tokens"
    rows = []
    for (text, count, name), samples in seconds.items():
        off = statistics.median(seconds[text, count, "off"])
        asked, accepted = proposed[text, count, name]
        rows.append(
            {
                "text": text,
                "requests": count,
                "speculate": name,
                "tokens/s": round(count * TOKENS / statistics.median(samples)),
                "lowest": round(count * TOKENS / max(samples)),
                "highest": round(count * TOKENS / min(samples)),
                "speed-up": f"{off / statistics.median(samples):.2f}",
                "proposed per token": f"{asked / (options.rounds * count * TOKENS):.2f}",
                "accepted": f"{accepted / asked:.0%}" if asked else "",
            }
        )
    print(records_table(rows))
    if options.save:
        save(f"speculation-{options.threads}", {"threads": options.threads, "rows": rows})


def run(engine: GenerationEngine, prompts: list[list[int]], parameters: dict[str, Any]) -> list[list[int]]:
    """Process all requests at once, and return the generated tokens of each request."""
    numbers = [engine.add(prompt, Sampling(**{"max_tokens": TOKENS} | parameters)) for prompt in prompts]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for output in engine.step():
            found[output.request].extend(output.tokens)
    return [found[number] for number in numbers]


if __name__ == "__main__":
    main()
