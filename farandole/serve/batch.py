"""Generate text for the prompts in a file, and continue where an interrupted run stopped.

Each line of the input is a JSON object with `prompt` (text or tokens) or `messages` (a conversation), and optionally
an `id` and fields of `Sampling` that replace the defaults:

    {"prompt": "import "}
    {"id": "q1", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0}

Line i of the output contains the result for line i of the input:

    {"index": 0, "fingerprint": "6b5f2a0c91d3e874", "text": "os\\n", "finish_reason": "length", "prompt_tokens": 2,
     "completion_tokens": 16}

With `n` above 1, `choices` replaces `text` and `finish_reason`.  `fingerprint` is a hash of the prompt's tokens, the
sampling parameters and the `id`.  The results of an interrupted run are only kept if all fingerprints match.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from farandole.data.errors import DataError
from farandole.serve.llm import LLM, Generation, Prompt
from farandole.serve.request import Output, RequestError, Sampling

OWN = ("id", "prompt", "messages")
_ALLOWED = {field.name for field in fields(Sampling)} - {"logprobs", "prompt_logprobs", "continues"}


def generate_file(
    llm: LLM,
    input_file: Path,
    output_file: Path,
    defaults: Sampling,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> int:
    """Generate text for each line of `input_file`, and write the results to `output_file`.

    Lines that are already in the output file are not generated again.  Line i is sampled with the seed of `defaults`
    plus i, so an interrupted run writes the same lines as an uninterrupted run.

    Args:
        progress: a callback with three arguments: the number of lines in the output so far, the number of lines in the
            input, and the number of tokens that this call has generated.

    Returns:
        The number of lines that this call has written.

    Raises:
        DataError: if a file cannot be read or written, a line is invalid, or the output file contains other text than
            results for this input and these parameters.  In this case, no text is generated, and the files are not
            changed.
    """
    check_output(input_file, output_file)
    records = _read_lines(input_file)
    parsed = [
        _parse(
            llm, record, replace(defaults, seed=defaults.seed + number), f"{input_file}, line {number + 1}"
        )
        for number, record in enumerate(records)
    ]
    headers = [
        {"index": number, "fingerprint": _fingerprint(record, *request)}
        for number, (record, request) in enumerate(zip(records, parsed, strict=True))
    ]
    done = _completed(output_file, [json.dumps(header).encode()[:-1] for header in headers])
    prompts = [prompt for prompt, _ in parsed[done:]]
    samplings = [sampling for _, sampling in parsed[done:]]
    tokens = 0

    def count(outputs: Sequence[Output]) -> None:
        nonlocal tokens
        tokens += sum(len(output.tokens) for output in outputs)
        progress(written, len(records), tokens)

    written = done
    with output_file.open("ab") as file:
        for result in llm.stream(prompts, samplings, progress=count):
            line = json.dumps(headers[written] | _result(records[written], result), ensure_ascii=False)
            file.write(line.encode() + b"\n")
            file.flush()
            written += 1
            progress(written, len(records), tokens)
        os.fsync(file.fileno())
    return written - done


def check_output(input_file: Path, output_file: Path) -> None:
    """Check that `output_file` can be read and written, without changing the file.

    Raises:
        DataError: if it cannot be read or written, or is the input file.
    """
    existed = os.path.lexists(output_file)
    try:
        with output_file.open("a+b"):
            pass
        if not existed:
            output_file.unlink()
        elif os.path.exists(input_file) and output_file.samefile(input_file):
            raise DataError(
                f"{output_file} is both the input and the output; choose another file with --output"
            )
    except OSError as error:
        raise DataError(
            f"cannot write {output_file}: {error.strerror or error}; choose another file with --output"
        ) from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        # bytes, because str.splitlines also divides text at characters such as U+2028
        lines = [line.decode() for line in path.read_bytes().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; expected a file with a JSON object per line") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise DataError(
                f"{path}, line {number}: expected a JSON object, got an empty line; remove the line"
            )
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: expected a JSON object, got text that is not JSON ({error}); correct the line"
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number}: expected a JSON object, got {type(record).__name__}; correct the line"
            )
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{path}, line {number}: expected Unicode text, got an unpaired surrogate; correct the line"
            ) from None
        records.append(record)
    return records


def _parse(llm: LLM, record: dict[str, Any], defaults: Sampling, where: str) -> tuple[Prompt, Sampling]:
    if unknown := sorted(record.keys() - _ALLOWED - set(OWN)):
        near = difflib.get_close_matches(unknown[0], [*OWN, *_ALLOWED], 1)
        raise DataError(f"{where}: unknown field {unknown[0]}" + (f"; nearest: {near[0]}" if near else ""))
    if ("prompt" in record) == ("messages" in record):
        both = "both" if "prompt" in record else "neither"
        raise DataError(f"{where}: expected either prompt or messages, got {both}")
    try:
        changes = {name: value for name, value in record.items() if name in _ALLOWED}
        if isinstance(changes.get("stop"), str):
            changes["stop"] = (changes["stop"],)
        if "logit_bias" in changes:
            changes["logit_bias"] = {int(token): bias for token, bias in changes["logit_bias"].items()}
        sampling = replace(defaults, **changes, continues="prompt" in record)
        prompt: Any = llm.render(record["messages"]) if "messages" in record else record["prompt"]
        is_text = isinstance(prompt, str)
        if not is_text and not (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
            raise RequestError("prompt", f"expected text or a list of tokens, got {prompt!r:.100}")
        encoded = llm.encode(prompt)
        llm.engine.check(encoded, sampling)
    except (RequestError, DataError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: {error}") from None
    return encoded, sampling


def _fingerprint(record: dict[str, Any], prompt: Prompt, sampling: Sampling) -> str:
    """Return a hash of all parts of a request that determine its line in the output."""
    request = repr((record.get("id"), prompt, sampling))
    return hashlib.blake2b(request.encode(), digest_size=8).hexdigest()


def _result(record: dict[str, Any], result: Generation) -> dict[str, Any]:
    own = {"id": record["id"]} if "id" in record else {}
    choices = [{"text": each.text, "finish_reason": each.finish_reason} for each in result.completions]
    content: dict[str, Any] = dict(choices[0]) if len(choices) == 1 else {"choices": choices}
    counts = {
        "prompt_tokens": len(result.prompt_tokens),
        "completion_tokens": sum(len(each.tokens) for each in result.completions),
    }
    return {**own, **content, **counts}


def _completed(path: Path, starts: Sequence[bytes]) -> int:
    """Return the number of complete lines of the output file at `path`, and remove an incomplete last line."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    for number, line in enumerate([*lines, rest] if rest else lines):
        start = starts[number] if number < len(starts) else None
        if start is None or not line.startswith(start if number < len(lines) else start[: len(rest)]):
            raise DataError(
                f"{path}, line {number + 1}: expected the result of line {number + 1} of the input ({len(starts)} lines) "
                "with the same prompt and parameters; the file belongs to another input, other options or another "
                "version; delete this file, or choose another file with --output"
            )
    if rest:
        os.truncate(path, len(content) - len(rest))
    return len(lines)
