"""Define the fields of HTTP requests, and convert the fields to engine parameters.

Unknown and unsupported fields are errors.  A field with the value null is treated as absent.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farandole.serve.request import MAX_CHOICES, MAX_LOGPROBS, RequestError, Sampling

Tokens = Annotated[list[int], Field(min_length=1)]


class Fields(BaseModel):
    """The base class of requests and of the objects nested in requests."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, values: Any) -> Any:
        """Reject strings with unpaired surrogates, which JSON permits but UTF-8 cannot encode."""
        for name, value in values.items() if isinstance(values, dict) else ():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise RequestError(str(name), "expected Unicode text, got an unpaired surrogate") from None
        return values


class StreamOptions(Fields):
    """The options of a streamed response."""

    include_usage: bool = False


class JSONSchema(Fields):
    """A named JSON schema for the output."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class ResponseFormat(Fields):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def schema_of(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output, or None for unconstrained text."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            expected = "a schema" if self.type == "json_schema" else "no schema"
            raise RequestError("response_format.json_schema", f"expected {expected} for type {self.type}")
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class _Generation(Fields):
    """Fields that completions and chat completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    response_format: ResponseFormat | None = None
    # fields that OpenAI's API does not have
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    regex: str | None = None
    grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        """Return whether the last event of a stream contains the token counts.

        Raises:
            RequestError: if the request has `stream_options`, but `stream` is false.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options", "expected a request with stream=true, got stream=false; omit stream_options"
            )
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, *, prompt_logprobs: bool, continues: bool
    ) -> Sampling:
        try:
            bias = {int(token): value for token, value in self.logit_bias.items()}
        except ValueError:
            raise RequestError(
                "logit_bias", f"expected token IDs as keys, got {list(self.logit_bias)[:4]}"
            ) from None
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            n=self.n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=bias,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            json_schema=None if self.response_format is None else self.response_format.schema_of(),
            regex=self.regex,
            grammar=self.grammar,
            continues=continues,
        )


class CompletionRequest(_Generation):
    """The fields of POST /v1/completions."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or tokens."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def sampling(self) -> Sampling:
        """Return the sampling parameters for the engine."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        prompt_logprobs = self.echo and self.logprobs is not None
        return self._sampling(max_tokens, self.logprobs, prompt_logprobs=prompt_logprobs, continues=True)


class TextPart(Fields):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Fields):
    """A function call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A tool call by the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """Return the call in the form that chat templates expect, with the arguments as a dictionary."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                "messages", f"expected a JSON object in arguments, got {self.function.arguments!r:.100}"
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Fields):
    """A message in a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        for name, role in (
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
            ("tool_call_id", "tool"),
        ):
            if getattr(self, name) is not None and self.role != role:
                raise RequestError(
                    "messages", f"expected {name} only in messages with role {role}, got role {self.role}"
                )
        if self.content is None and self.tool_calls is None:
            raise RequestError("messages", f"expected content in a message with role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError("messages", "expected tool_call_id in a message with role tool")
        content = self.content or ""
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }
        if self.tool_calls is not None:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        for name in ("tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return found


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Fields):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: bool = False


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = self.function.model_dump(include={"name", "description", "parameters"})
        return {"type": self.type, "function": function}


class FunctionName(Fields):
    """The name of a function."""

    name: Name


class NamedTool(Fields):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(_Generation):
    """The fields of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # not a field of OpenAI's API
    chat_template_kwargs: dict[str, Any] = {}

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates expect."""
        calls: set[str] = set()
        for message in self.messages:
            if message.tool_call_id is not None and message.tool_call_id not in calls:
                raise RequestError(
                    "messages",
                    f"expected the tool_call_id of an earlier call, got {message.tool_call_id!r:.100}",
                )
            calls |= {call.id for call in message.tool_calls or ()}
        return [message.plain() for message in self.messages]

    def usable_tools(self) -> dict[str, Tool]:
        """Return the tools that the model may call, keyed by name."""
        if self.tools is None:
            for name in ("tool_choice", "parallel_tool_calls"):
                if getattr(self, name) is not None:
                    raise RequestError(name, "expected tools in the same request")
            return {}
        found = {tool.function.name: tool for tool in self.tools}
        if len(found) < len(self.tools):
            raise RequestError("tools", "expected tools with different names")
        if self.tool_choice == "none":
            return {}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in found:
            raise RequestError(
                "tool_choice", f"expected the name of a tool in tools, got {self.tool_choice.function.name!r}"
            )
        return found

    def sampling(self) -> Sampling:
        """Return the sampling parameters for the engine."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("max_completion_tokens", "max_tokens is also set; omit one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "expected logprobs=true, got logprobs=false")
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(most, logprobs, prompt_logprobs=False, continues=False)


class TokenizeRequest(Fields):
    """The fields of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
