"""Tool calls and reasoning: chat templates, parsing, and the client of OpenAI."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings, strategies
from transformers import AutoTokenizer

from farandole.serve.folder import read_model
from farandole.serve.http import calls
from farandole.serve.http.call_reader import Call
from farandole.serve.http.calls import HERMES, CallFormat, find_format
from farandole.serve.http.chat import prepare_chat
from farandole.serve.http.protocol import ChatRequest
from farandole.serve.http.reply import Part, Reply
from farandole.serve.request import RequestError
from tests.models.hf.folders import CHAT
from tests.serve.server import NAME, serving, write_folder
from tests.serve.templates import LLAMA, MARKS, QWEN, QWEN_THINKING

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 4}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
STRICT: list[Any] = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
MESSAGES: list[Any] = [{"role": "user", "content": "say red cat"}]
CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
LLAMA_CALL = CALL.replace("arguments", "parameters")
HEAD = '{"name": "weather", "arguments": '
TRICKY = r'{"city": "</tool_call> }] \" \\", "days": [1, {"a": null}]}'
PARSED = Call("weather", '{"city": "Rome", "days": 2}')
CONVERSATION: list[Any] = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
    {"role": "assistant", "content": "Sun.", "reasoning_content": "hm"},
    {"role": "user", "content": "Thanks"},
]


def parts_of(reply: Reply, texts: Sequence[str]) -> Part:
    """Return the joined parts of a stream."""
    found = Part()
    for number, text in enumerate(texts, 1):
        found.add(reply.add(text, is_last=number == len(texts)))
    assert found == reply.whole
    return found


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (None, " a\n", Part(content=" a\n")),
        (None, "<think>\nx < y\n</think>\n\n b ", Part("x < y", "b ")),
        (None, "\n<think>x", Part("x")),
        (None, "a <think>x</think>", Part(content="a <think>x</think>")),
        (None, "<thin", Part(content="<thin")),
        (None, "", Part()),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", Part(calls=[PARSED])),
        (HERMES, f"So: \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n", Part("", "So:", [PARSED] * 2)),
        (HERMES, f"<think>\nx\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", Part("x", "", [PARSED])),
        (HERMES, f"<tool_call>\n{CALL}\n", Part(calls=[PARSED])),
        (HERMES, "a <tool_call>\n{\n</tool_call> b", Part(content="a<tool_call>\n{\n</tool_call> b")),
        (HERMES, OTHER, Part(content=OTHER)),
        (HERMES, "1 < 2 <tool", Part(content="1 < 2 <tool")),
        (HERMES, CALL, Part(content=CALL)),
        (HERMES, f"<tool_call>{HEAD}{{\n}} }}</tool_call>", Part(calls=[Call("weather", "{\n}")])),
        (HERMES, f"<tool_call>{HEAD}{TRICKY}}}</tool_call>", Part(calls=[Call("weather", TRICKY)])),
        (HERMES, '<tool_call>{"id": [1], "arguments": {}, "a": -1.5e3 , "name": "time"}</tool_call>', Part(calls=[Call("time", "{}")])),
        # the beginning of a call has been sent before the error arrives
        (HERMES, f'<tool_call>{HEAD}{{"city": "Ro', Part(calls=[Call("weather", '{"city": "Ro')])),
        (HERMES, f'<tool_call>{HEAD}{{"city": "Ro\n</tool_call> b', Part("", "b", [Call("weather", '{"city": "Ro')])),
        (HERMES, f'<tool_call>{HEAD}{{"a": 1</tool_call><tool_call>{CALL}', Part(calls=[Call("weather", '{"a": 1'), PARSED])),
        (HERMES, f"<tool_call>{HEAD}{{]}}</tool_call>b", Part("", "b", [Call("weather", "{")])),
        (HERMES, f"<tool_call>{CALL}}}]\n</tool_call>", Part(calls=[PARSED])),
        (HERMES, f"<tool_call>{CALL[:-1]}\n</tool_call>\nb", Part("", "b", [PARSED])),
        (HERMES, f"<tool_call>{CALL} </tool_c", Part(calls=[PARSED])),
        (HERMES, f"<tool_call>{CALL}\n<tool_call>{CALL}\n{CALL}</tool_call>", Part(calls=[PARSED] * 3)),
        (HERMES, f"<tool_call>{CALL} a </tool_call> b </tool_call>", Part("", "a b </tool_call>", [PARSED])),
        (HERMES, f"<tool_call>{CALL}\n{OTHER}", Part("", OTHER, [PARSED])),
        # without the name of a tool and arguments, there is no call
        (HERMES, "<tool_call>" + HEAD, Part(content="<tool_call>" + HEAD)),
        (HERMES, '<tool_call>{"name": "time"}</tool_call>', Part(content='<tool_call>{"name": "time"}</tool_call>')),
        (HERMES, f'<tool_call>{HEAD}"{{}}"}}</tool_call>', Part(content=f'<tool_call>{HEAD}"{{}}"}}</tool_call>')),
        (calls.LLAMA, LLAMA_CALL, Part(calls=[PARSED])),
        (calls.LLAMA, f"\n{LLAMA_CALL}; {LLAMA_CALL}", Part(calls=[PARSED] * 2)),
        (calls.LLAMA, f'{{"type": "function", {LLAMA_CALL[1:]}}}', Part(calls=[PARSED])),
        (calls.LLAMA, f"{LLAMA_CALL} and {LLAMA_CALL}", Part("", f"and {LLAMA_CALL}", [PARSED])),
        (calls.LLAMA, f"{LLAMA_CALL}; {{}} a", Part("", "{} a", [PARSED])),
        (calls.LLAMA, LLAMA_CALL[:-4], Part(calls=[Call("weather", PARSED.arguments[:-3])])),
        (calls.LLAMA, "The weather {is} good", Part(content="The weather {is} good")),
        (calls.LLAMA, '{"a": 1}', Part(content='{"a": 1}')),
        (calls.LLAMA, "{" * 5000, Part(content="{" * 5000)),
    ],
)  # fmt: skip
def test_parts_do_not_depend_on_the_stream(form: CallFormat | None, text: str, expected: Part) -> None:
    def reply() -> Reply:
        return Reply(form, SCHEMAS, reasons=True)

    assert parts_of(reply(), [text]) == expected
    for size in (1, 3, 7):
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        assert parts_of(reply(), cut or [""]) == expected
        assert parts_of(reply(), [*cut, ""]) == expected
    inside = Reply(form, SCHEMAS, reasons=True, is_reasoning=True)
    assert parts_of(inside, ["\nhm", "\n</thi", "nk>\n\n", *text]).reasoning == "hm"


FRAGMENTS = [
    *MARKS, CALL, LLAMA_CALL, HEAD, OTHER, "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "a", "<", "é", "1",
    '"name": ', '"weather"', '"arguments": ', '"parameters": ',
]  # fmt: skip


@pytest.mark.parametrize("form", [HERMES, calls.LLAMA])
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=strategies.data())
def test_streams_of_random_text(form: CallFormat, data: strategies.DataObject) -> None:
    """The parts do not depend on the stream, and no text is lost or changed."""
    text = "".join(data.draw(strategies.lists(strategies.sampled_from(FRAGMENTS), max_size=12)))
    cuts = sorted(data.draw(strategies.sets(strategies.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole = parts_of(Reply(form, SCHEMAS, reasons=True), [text])
    assert parts_of(Reply(form, SCHEMAS, reasons=True), pieces) == whole
    parts = [whole.reasoning, whole.content, *(call.arguments for call in whole.calls)]
    left = Counter(text)
    left.subtract("".join("".join(parts).split()))
    assert min(left.values(), default=0) >= 0
    if not whole.calls and not whole.reasoning:
        marks = ("<think>", "</think>") if text.lstrip().startswith("<think>") else ()
        for mark in marks:
            text = text.replace(mark, "", 1)
        assert "".join(whole.content.split()) == "".join(text.split())


def test_formats() -> None:
    assert find_format(QWEN) is HERMES
    assert find_format(LLAMA) is calls.LLAMA
    for template, text in (
        (CHAT, "does not use tools"),
        ("{{ tools }} [TOOL_CALLS]", "Mistral"),
        (QWEN + "<function=", "Qwen3-Coder"),
        ("{{ tools }}", "unknown"),
    ):
        with pytest.raises(RequestError, match=text) as error:
            find_format(template)
        assert error.value.field == "tools"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_folder(tmp_path_factory.mktemp(name), template, tokens)
        for name, template, tokens in (
            ("qwen", QWEN, MARKS),
            ("thinking", QWEN_THINKING, MARKS),
            ("llama", LLAMA, ()),
            ("unmarked", QWEN, ()),
        )
    }


@pytest.fixture(scope="module")
def clients(folders: dict[str, Path]) -> Iterator[dict[str, openai.OpenAI]]:
    with (
        serving(folders["qwen"]) as (qwen, _),
        serving(folders["thinking"]) as (thinking, _),
        serving(folders["llama"]) as (llama, _),
        serving(folders["unmarked"]) as (unmarked, _),
    ):
        addresses = {"qwen": qwen, "thinking": thinking, "llama": llama, "unmarked": unmarked}
        yield {
            name: openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
            for name, address in addresses.items()
        }


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_prompts_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    body = ChatRequest.model_validate({"model": NAME, "messages": CONVERSATION, "tools": TOOLS})
    found = prepare_chat(body, read_model(folders[name]))
    theirs: list[Any] = json.loads(json.dumps(CONVERSATION))
    theirs[0]["role"] = "system"
    theirs[2]["content"] = ""
    function = theirs[2]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    tools = [{**tool, "function": {"name": "", "description": "", **tool["function"]}} for tool in TOOLS]
    expected = AutoTokenizer.from_pretrained(folders[name]).apply_chat_template(
        theirs, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert found.prompt == expected


def test_variables_of_the_template(folders: dict[str, Path], clients: dict[str, openai.OpenAI]) -> None:
    fields = {"model": NAME, "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    found = prepare_chat(ChatRequest.model_validate(fields), read_model(folders["qwen"]))
    assert found.prompt == AutoTokenizer.from_pretrained(folders["qwen"]).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert found.prompt.endswith("</think>\n\n")
    create = clients["qwen"].chat.completions.create
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 1}
    assert create(**options, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices
    for name in ("enable_thinkin", "tools", "messages", "bos_token", "raise_exception"):
        with pytest.raises(
            openai.BadRequestError, match=f"unknown variable '{name}'; expected one of enable_thinking"
        ):
            create(**options, extra_body={"chat_template_kwargs": {name: True}})


def streamed(parts: Any) -> tuple[dict[str, Any], str | None]:
    """Join a stream as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for part in parts:
        for choice in part.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(message["tool_calls"]):
                    assert (
                        call.id.startswith("call_")
                        and call.type == "function"
                        and call.function.arguments == ""
                    )
                    message["tool_calls"].append({"name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(message["tool_calls"]) - 1 and call.function.arguments
                    assert call.id is None and call.type is None and call.function.name is None
                message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message, reason


def token(folder: Path, text: str) -> str:
    return str(AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(text))


@pytest.mark.parametrize("name", ["qwen", "thinking", "llama"])
def test_required_calls_are_valid(
    clients: dict[str, openai.OpenAI], folders: dict[str, Path], name: str
) -> None:
    client = clients[name]
    bias = (
        {} if name == "llama" else {token(folders[name], "</think>"): 4, "1": 5}
    )  # ends the reasoning and the calls
    for seed in range(3):
        options: dict[str, Any] = {
            "model": NAME, "messages": MESSAGES, "seed": seed, "max_tokens": 700, "logit_bias": bias, "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "weather"}} if seed else "required",
        }  # fmt: skip
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls", whole
        assert whole.message.tool_calls and whole.message.content is None
        found = []
        for call in whole.message.tool_calls:
            assert call.type == "function" and (not seed or call.function.name == "weather")
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            found.append({"name": call.function.name, "arguments": call.function.arguments})
        reasoning = getattr(whole.message, "reasoning_content", "")
        assert reasoning or name != "thinking"
        message, reason = streamed(client.chat.completions.create(stream=True, **options))
        assert (message, reason) == (
            {"content": "", "reasoning_content": reasoning, "tool_calls": found},
            "tool_calls",
        )
        with client.chat.completions.stream(**options) as stream:  # the client joins the parts
            pieces = [
                event.arguments_delta
                for event in stream
                if event.type == "tool_calls.function.arguments.delta"
            ]
            joined = stream.get_final_completion().choices[0].message
        assert [call.function.arguments for call in joined.tool_calls or []] == [
            each["arguments"] for each in found
        ]
        assert joined.content in (None, "") and "".join(pieces) == "".join(
            each["arguments"] for each in found
        )
        assert len(pieces) > 5 * len(found)  # nearly one piece for each token
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in whole.message.tool_calls
        ]
        more: list[Any] = [*MESSAGES, whole.message, *results]  # as clients continue
        answer = client.chat.completions.create(
            model=NAME, messages=more, tools=TOOLS, max_tokens=5, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_incomplete_calls_in_streams(clients: dict[str, openai.OpenAI], name: str) -> None:
    """A call that `max_tokens` ends has the arguments so far, also in streams, and no mark is in the content."""
    begun = 0
    for most in (3, 30, 36, 42):
        options: dict[str, Any] = {
            "model": NAME, "messages": MESSAGES, "seed": 1, "max_tokens": most, "tools": TOOLS, "n": 2,
            "tool_choice": "required",
        }  # fmt: skip
        whole = clients[name].chat.completions.create(**options)
        parts = list(clients[name].chat.completions.create(stream=True, logprobs=True, **options))
        for number, choice in enumerate(whole.choices):
            own = [
                each.model_copy(update={"choices": [c for c in each.choices if c.index == number]})
                for each in parts
            ]
            message, reason = streamed(own)
            made = [
                {"name": c.function.name, "arguments": c.function.arguments}
                for c in choice.message.tool_calls or []
            ]
            assert (message["tool_calls"], message["content"]) == (made, choice.message.content or "")
            assert reason == choice.finish_reason
            begun += bool(made) and reason == "length"
            assert not (made and choice.message.content)
            tokens = [
                entry
                for each in own
                for c in each.choices
                if c.logprobs
                for entry in c.logprobs.content or []
            ]
            assert len(tokens) == most or reason == "tool_calls"
    assert begun


def test_strict_tools(clients: dict[str, openai.OpenAI], folders: dict[str, Path]) -> None:
    """With `strict`, the model may write a text, and each call is valid."""
    start, think = token(folders["qwen"], "<tool_call>"), token(folders["qwen"], "<think>")
    create = clients["qwen"].chat.completions.create
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 1200, "tools": STRICT}
    for several in (True, False):
        found = create(logit_bias={start: 100}, parallel_tool_calls=several, seed=1, **options).choices[0]
        made = found.message.tool_calls or []
        assert made and (several or len(made) == 1)
        for call in made:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    text = create(
        logit_bias={start: -100, think: -100, "1": -100}, seed=2, **{**options, "max_tokens": 30}
    ).choices[0]
    assert text.finish_reason == "length" and text.message.content and not text.message.tool_calls


def test_reasoning(clients: dict[str, openai.OpenAI], folders: dict[str, Path]) -> None:
    create = clients["thinking"].chat.completions.create
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "seed": 1}
    bias = {token(folders["thinking"], "</think>"): 4.5}
    found: Any = create(logit_bias=bias, **options).choices[0].message
    assert found.reasoning_content and found.content
    message, _ = streamed(create(logit_bias=bias, stream=True, **options))
    assert (message["reasoning_content"], message["content"]) == (found.reasoning_content, found.content)
    constrained = create(extra_body={"regex": "red|cat"}, **options).choices[0].message
    assert constrained.content in ("red", "cat")


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "a", **fields}}]


@pytest.mark.parametrize(
    ("name", "change", "field", "text"),
    [
        ("qwen", {"tools": [*TOOLS, TOOLS[0]]}, "tools", "different"),
        ("qwen", {"tools": []}, "tools", "at least 1"),
        ("qwen", {"tools": function(name="a b")}, "tools", "pattern"),
        ("qwen", {"tool_choice": "auto", "tools": None}, "tool_choice", "tools"),
        ("qwen", {"parallel_tool_calls": False, "tools": None}, "parallel_tool_calls", "tools"),
        ("qwen", {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ("qwen", {"tool_choice": "always"}, "tool_choice", "required"),
        ("qwen", {"regex": "a"}, "regex", "together with tools"),
        ("qwen", {"response_format": {"type": "json_object"}}, "response_format", "together with tools"),
        (
            "qwen",
            {"tool_choice": "required", "tools": function(parameters={"type": "array", "uniqueItems": True})},
            "tools",
            "uniqueItems",
        ),
        (
            "qwen",
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
            "messages",
            "earlier call",
        ),
        ("qwen", {"messages": [{"role": "user"}]}, "messages", "content"),
        (
            "qwen",
            {"messages": [{"role": "user", "content": "", "tool_call_id": "a"}]},
            "messages",
            "tool_call_id",
        ),
        ("unmarked", {"tool_choice": "required"}, "tool_choice", "<tool_call>"),
    ],
)
def test_invalid_fields(
    clients: dict[str, openai.OpenAI], name: str, change: dict[str, Any], field: str, text: str
) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 5, "tools": TOOLS, **change}
    with pytest.raises(openai.BadRequestError, match=text) as error:
        clients[name].post("/chat/completions", body=body, cast_to=object)
    assert error.value.param == field


def test_tool_choice(clients: dict[str, openai.OpenAI]) -> None:
    create = clients["qwen"].chat.completions.create
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    plain, none = create(**options), create(tools=TOOLS, tool_choice="none", **options)
    assert none.choices[0].message == plain.choices[0].message
    auto = create(tools=TOOLS, **options)
    assert auto.usage is not None and plain.usage is not None
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens
