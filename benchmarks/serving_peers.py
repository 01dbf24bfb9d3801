"""Run other implementations of text generation for `benchmarks.serving`, in a separate environment.

    python3 -m venv peers && peers/bin/pip install torch==2.13.0 transformers ctranslate2 onnxruntime-genai onnx-ir \
        openvino-genai nncf gguf llama-cpp-python
    peers/bin/pip install --no-deps optimum optimum-intel
    peers/bin/pip install --no-deps --target older transformers==4.57.6 'huggingface_hub<1' 'tokenizers<0.23'
    python -m benchmarks.serving --write FOLDER
    peers/bin/python benchmarks/serving_peers.py convert FOLDER
    PYTHONPATH=older peers/bin/python benchmarks/serving_peers.py export FOLDER
    python -m benchmarks.serving --model FOLDER --peers peers/bin/python

`export` writes the models for OpenVINO, whose exporter needs an older version of transformers.  `run` reads one list of
requests (prompt, number of output tokens) per line, and prints the seconds and the generated tokens of each list.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Requests = list[tuple[list[int], int]]
Run = Callable[[Requests], list[list[int]]]

CONTEXT = 512


def convert(folder: Path) -> None:
    """Write a tokenizer, which some libraries require, and the models for all libraries except OpenVINO."""
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t2", eos_token="t1"
    )
    tokenizer.save_pretrained(folder)
    for kind in ("float32", "int8"):
        TransformersConverter(str(folder)).convert(
            str(folder / f"ctranslate2-{kind}"), quantization=kind, force=True
        )
    for kind in ("fp32", "int4"):
        target = str(folder / f"onnxruntime-{kind}")
        words_ = ["-i", str(folder), "-o", target, "-p", kind, "-e", "cpu", "-c", str(folder / "cache")]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words_], check=True)
    for kind in ("F32", "BF16", "Q8_0"):
        write_gguf(folder, kind)


def export(folder: Path) -> None:
    """Write the models and the tokenizer for OpenVINO."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for name, part in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        openvino.save_model(part, folder / "openvino-tokenizer" / f"openvino_{name}.xml")
    for name, compress in (("openvino", False), ("openvino-int8", True)):
        model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=compress, compile=False)
        model.save_pretrained(folder / name)


def write_gguf(folder: Path, kind: str) -> None:
    """Write the model for llama.cpp, whose rotary embedding pairs neighboring values."""
    import gguf
    from gguf.quants import quantize
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(folder / f"{kind}.gguf", "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in state.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads:
            rows = value.shape[0] // heads // 2
            value = value.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(value.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        stored = getattr(gguf.GGMLQuantizationType, kind if value.dim() == 2 else "F32")
        writer.add_tensor(target, quantize(value.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- implementations ----


def ctranslate2(folder: Path, kind: str, threads: int) -> Run:
    """Return a function that batches all requests; a request leaves the batch when it has all its tokens."""
    import ctranslate2

    compute = "int8_float32" if kind == "int8" else "float32"
    path = str(folder / f"ctranslate2-{'int8' if kind == 'int8' else 'float32'}")
    generator = ctranslate2.Generator(
        path, "cpu", compute_type=compute, inter_threads=1, intra_threads=threads
    )

    def run(requests: Requests) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in requests]

        def add(step: Any) -> bool:
            found[step.batch_id].append(step.token_id)
            return len(found[step.batch_id]) == requests[step.batch_id][1]

        most = max(count for _, count in requests)
        prompts = [[f"t{token}" for token in prompt] for prompt, _ in requests]
        generator.generate_batch(
            prompts,
            max_length=most,
            min_length=most,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=add,
        )
        return found

    return run


def onnxruntime(folder: Path, kind: str, threads: int) -> Run:
    """Return a function that processes one padded batch; tokens after the end of a request do not count."""
    import numpy as np
    import onnxruntime_genai as genai

    config = genai.Config(str(folder / f"onnxruntime-{kind}"))
    options = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)

    def run(requests: Requests) -> list[list[int]]:
        longest = max(len(prompt) for prompt, _ in requests)
        most = longest + max(count for _, count in requests)
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(
            batch_size=len(requests), max_length=most, min_length=most, do_sample=False
        )
        generator = genai.Generator(model, parameters)
        pad = json.loads((folder / f"onnxruntime-{kind}" / "genai_config.json").read_text())["model"][
            "pad_token_id"
        ]
        padded = [[pad] * (longest - len(prompt)) + prompt for prompt, _ in requests]
        generator.append_tokens(np.array(padded, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [
            generator.get_sequence(i)[longest : longest + count].tolist()
            for i, (_, count) in enumerate(requests)
        ]

    return run


def openvino(folder: Path, kind: str, threads: int) -> Run:
    """Return a function that generates with continuous batching."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    precision = "bf16" if kind == "bf16" else "f32"
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder / ("openvino-int8" if kind == "int8" else "openvino")),
        genai.Tokenizer(str(folder / "openvino-tokenizer")),
        scheduler,
        "CPU",
        INFERENCE_PRECISION_HINT=precision,
        INFERENCE_NUM_THREADS=threads,
    )

    def run(requests: Requests) -> list[list[int]]:
        handles = []
        for number, (prompt, count) in enumerate(requests):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
            handles.append(pipeline.add_request(number, openvino.Tensor(np.array([prompt])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return run


def llama_cpp(folder: Path, kind: str, threads: int) -> Run:
    """Return a function that decodes all requests in one batch; a request leaves it when it has all its tokens."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    file = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}[kind]
    model = llama_cpp.llama_model_load_from_file(
        str(folder / f"{file}.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 16 * CONTEXT, 2048, 512, 16
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(4096, 0, 1)

    def run(requests: Requests) -> list[list[int]]:
        llama_cpp.llama_memory_clear(memory, False)
        found: list[list[int]] = [[] for _ in requests]
        pending = {number: (0, prompt) for number, (prompt, _) in enumerate(requests)}
        while pending:
            batch.n_tokens, last = 0, {}
            for number, (start, tokens) in pending.items():
                for offset, token in enumerate(tokens):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at] = token, start + offset
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                    batch.logits[at] = offset == len(tokens) - 1
                    batch.n_tokens += 1
                last[number] = batch.n_tokens - 1
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            following = {}
            for number, at in last.items():
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), (vocabulary,))
                found[number].append(int(logits.argmax()))
                if len(found[number]) < requests[number][1]:
                    start, tokens = pending[number]
                    following[number] = (start + len(tokens), found[number][-1:])
                else:
                    llama_cpp.llama_memory_seq_rm(memory, number, -1, -1)
            pending = following
        return found

    return run


IMPLEMENTATIONS: dict[str, tuple[Callable[[Path, str, int], Run], str]] = {
    "CTranslate2, fp32": (ctranslate2, "fp32"),
    "CTranslate2, int8": (ctranslate2, "int8"),
    "ONNX Runtime GenAI, fp32": (onnxruntime, "fp32"),
    "ONNX Runtime GenAI, int4": (onnxruntime, "int4"),
    "llama.cpp, fp32": (llama_cpp, "fp32"),
    "llama.cpp, bf16": (llama_cpp, "bf16"),
    "llama.cpp, int8": (llama_cpp, "int8"),
    "OpenVINO GenAI, fp32": (openvino, "fp32"),
    "OpenVINO GenAI, bf16": (openvino, "bf16"),
    "OpenVINO GenAI, int8": (openvino, "int8"),
}


def main() -> None:
    """Convert, export or run."""
    action, folder, *options = sys.argv[1:]
    if action == "run":
        name, threads = options
        build, kind = IMPLEMENTATIONS[name]
        run = build(Path(folder), kind, int(threads))
        for line in sys.stdin:
            requests = json.loads(line)
            start = time.perf_counter()
            tokens = run(requests)
            print("result", json.dumps([time.perf_counter() - start, tokens]), flush=True)
    else:
        {"convert": convert, "export": export}[action](Path(folder))


if __name__ == "__main__":
    main()
