"""Convert chat requests into prompts and engine parameters, and replies into messages or deltas."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from farandole.data.errors import DataError
from farandole.data.template import Template
from farandole.serve.folder import ModelFolder
from farandole.serve.http.calls import END_THINK, THINK, CallFormat, find_format
from farandole.serve.http.protocol import ChatRequest, NamedTool, Tool
from farandole.serve.http.reply import Part, Reply
from farandole.serve.request import CONSTRAINTS, RequestError, Sampling


@dataclass(frozen=True)
class Chat:
    """A chat request, converted for the engine.

    Args:
        prompt: the rendered conversation.
        form: the tool-call format, or None if the model must not call tools.
        tools: the tools that the model may call, keyed by name.
        reasons: whether the text may start with reasoning.
        is_reasoning: whether the prompt ends with `<think>`.
    """

    prompt: str
    sampling: Sampling
    form: CallFormat | None
    tools: Mapping[str, Tool]
    reasons: bool
    is_reasoning: bool

    def reply(self) -> Reply:
        """Return a new `Reply` to parse the text of one sequence."""
        return Reply(self.form, self.tools, reasons=self.reasons, is_reasoning=self.is_reasoning)


def prepare_chat(body: ChatRequest, found: ModelFolder) -> Chat:
    """Convert a chat request to a request for the engine.

    Raises:
        RequestError: if a field is invalid, or the chat template of the model does not support a field.
    """
    if found.template is None:
        raise RequestError("messages", f"chat requests require a chat template: {found.no_template}")
    source = found.template.source
    messages, tools, sampling = body.conversation(), body.usable_tools(), body.sampling()
    if "tool_calls" not in source and any("tool_calls" in each for each in messages):
        raise RequestError("messages", "tool_calls are not supported by the model's chat template; omit them")
    added = found.tokenizer.get_added_tokens_decoder().values()
    hidden = {token.content for token in added if token.special}  # special tokens are not part of the text
    form = find_format(source) if tools else None
    if form is not None and form.start in hidden:
        raise RequestError(
            "tools",
            f"tool calls cannot be recognized, because {form.start} is a special token, which is not part of the output text",
        )
    prompt = _render(found.template, messages, tools, body.chat_template_kwargs)
    reasons = END_THINK in source and END_THINK not in hidden and not sampling.is_constrained
    is_reasoning = reasons and prompt.rstrip().endswith(THINK)
    if form is not None:
        used = next((name for name in CONSTRAINTS if getattr(sampling, name) is not None), None)
        if used is not None:
            name = "response_format" if used == "json_schema" else used
            raise RequestError(name, "not supported together with tools; omit one of them")
        required = body.tool_choice not in (None, "auto")
        several = body.parallel_tool_calls is not False
        if required or not several or any(tool.function.strict for tool in tools.values()):
            choice = body.tool_choice
            chosen = [choice.function.name] if isinstance(choice, NamedTool) else list(tools)
            grammar = form.grammar(
                {name: tools[name].function.parameters for name in chosen},
                found.tokenizer,
                required=required,
                several=several and not isinstance(choice, NamedTool),
                reasons=reasons,
                is_reasoning=is_reasoning,
            )
            sampling = replace(sampling, grammar=grammar)
    return Chat(prompt, sampling, form, tools, reasons, is_reasoning)


def _render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: Mapping[str, Tool],
    variables: Mapping[str, Any],
) -> str:
    allowed = template.variables - {"tools"}
    for name in variables:
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            expected = f"expected one of {known}" if known else "the chat template has no variables"
            raise RequestError("chat_template_kwargs", f"unknown variable {name!r}; {expected}")
    given = {"tools": [tool.plain() for tool in tools.values()]} if tools else {}
    try:
        return template.render(messages, prompt=True, **given, **variables)
    except DataError as error:
        raise RequestError("messages", str(error)) from None


def message_of(reply: Part) -> dict[str, Any]:
    """Return a complete reply as a message in OpenAI's format."""
    found: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        found["reasoning_content"] = reply.reasoning
    if reply.calls:
        calls = [{"id": _new_id(), "type": "function", "function": asdict(each)} for each in reply.calls]
        found |= {"content": reply.content or None, "tool_calls": calls}
    return found


def deltas_of(part: Part, before: int) -> list[dict[str, Any]]:
    """Convert a new part of a streamed reply to one or more deltas in OpenAI's format.

    The first delta of a call contains the name and empty arguments.  Later deltas extend the arguments.

    Args:
        before: the number of calls in the earlier parts of the reply.
    """
    text: dict[str, Any] = {}
    if part.reasoning:
        text["reasoning_content"] = part.reasoning
    if part.content:
        text["content"] = part.content
    found = [text] if text or not part.calls else []
    for call in part.calls:
        if call.name:
            before += 1
            delta: dict[str, Any] = {
                "index": before - 1,
                "id": _new_id(),
                "type": "function",
                "function": asdict(call),
            }
        else:
            delta = {"index": before - 1, "function": {"arguments": call.arguments}}
        found.append({"tool_calls": [delta]})
    return found


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
