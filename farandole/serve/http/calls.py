"""The formats in which models write tool calls, and the grammars that constrain the output to valid calls.

Hermes and Qwen write any number of calls after the text:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Llama 3 writes a call instead of text:

    {"name": "weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from farandole.serve.constraint import SPACE
from farandole.serve.request import RequestError

THINK, END_THINK = "<think>", "</think>"
"""The delimiters of a model's reasoning."""

_OTHERS = {
    "<function=": "Qwen3-Coder's XML",
    "<arg_key>": "GLM's XML",
    "[TOOL_CALLS]": "Mistral's [TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>": "DeepSeek's <｜tool▁calls▁begin｜>",
    "<|channel|>": "gpt-oss's harmony",
    "<|tool_call|>": "Granite's <|tool_call|>",
}
"""The names of unsupported formats.  Each key is a string that occurs only in chat templates with this format."""


@dataclass(frozen=True)
class CallFormat:
    """A tool-call format.

    Args:
        start, end: the delimiters of a call; both are empty if a call is the whole text.
        key: the JSON key of the arguments.
    """

    start: str
    end: str
    key: str

    def grammar(
        self,
        tools: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        required: bool,
        several: bool,
        reasons: bool,
        is_reasoning: bool,
    ) -> str:
        """Return an llguidance grammar that accepts a text only if all its tool calls are valid.

        Args:
            tools: a dict that maps the name of each tool to the JSON schema of its arguments.
            required: whether the text after the reasoning must consist only of calls.
            several: whether more than one call is allowed.
            reasons: whether the model may reason before the text.
            is_reasoning: whether the prompt ends with `<think>`.

        Raises:
            RequestError: if a delimiter is not a token of the model.
        """
        rules = [
            f"args{number}: %json {json.dumps(_spaced(each))}" for number, each in enumerate(tools.values())
        ]
        objects = [
            json.dumps(f'{{"name": {json.dumps(name)}, "{self.key}": ') + f' args{number} "}}"'
            for number, name in enumerate(tools)
        ]
        rules.append(f"object: {' | '.join(objects)}")
        text = ""
        if self.start:
            start, end = (_token(tokenizer, mark) for mark in (self.start, self.end))
            rules.append(f'call: {start} "\\n" object "\\n" {end}')
            calls = r'call ("\n" call)*' if several else "call"
            text, reply = "/(.|\\n)+/", f"TEXT? ({calls})?"
        else:
            calls, text, reply = "object", "/[^{](.|\\n)*/", "(TEXT | object)?"
        if required:
            reply = calls
        else:
            rules.append(f"TEXT: {text}")
        thoughts = ""
        if reasons:
            first, last = _token(tokenizer, THINK), _token(tokenizer, END_THINK)
            thoughts = f"THOUGHTS? {last} /\\n{{0,2}}/"
            thoughts = thoughts if is_reasoning else f"({first} {thoughts})?"
            rules.append("THOUGHTS: /(.|\\n)+/")
        return "\n".join([f"start: {thoughts} {reply}", *rules])


HERMES = CallFormat("<tool_call>", "</tool_call>", "arguments")
LLAMA = CallFormat("", "", "parameters")


def find_format(template: str) -> CallFormat:
    """Return the tool-call format that a chat template uses.

    Args:
        template: the Jinja source of the chat template.

    Raises:
        RequestError: if the template does not use tools, or its format is not supported.
    """
    if "tools" not in template:
        raise RequestError(
            "tools",
            "the model's chat template does not use tools; omit tools, or start the server with --chat-template FILE",
        )
    for mark, name in _OTHERS.items():
        if mark in template:
            raise RequestError(
                "tools",
                f"the chat template's tool-call format, {name}, is not supported; the supported formats are <tool_call> "
                "with JSON, and Llama 3's JSON",
            )
    if HERMES.start in template and "arguments" in template:
        return HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA
    raise RequestError(
        "tools",
        "the chat template's tool-call format is unknown; the supported formats are <tool_call> with JSON, and Llama 3's "
        "JSON",
    )


def _token(tokenizer: Tokenizer, mark: str) -> str:
    """Return the delimiter `mark` in the grammar's syntax; raise RequestError if `mark` is not a token."""
    if tokenizer.token_to_id(mark) is None:  # a grammar cannot separate the delimiter from the preceding text
        raise RequestError(
            "tool_choice",
            f"tool calls cannot be constrained, because {mark} is not a token of the model; use tool_choice='auto' without "
            "strict functions and without parallel_tool_calls=false",
        )
    return mark


def _spaced(schema: Any) -> Any:
    """Return `schema` with an llguidance option that limits whitespace in the JSON."""
    own = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return {**own, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": SPACE}}
