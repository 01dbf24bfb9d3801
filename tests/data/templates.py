"""Chat templates in the style of published models, and conversations for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{%- else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{%- endfor -%}"
        "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}"
        "{{ bos_token }}{% for m in loop_messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "tools": (
        "{% if tools %}{{ '<|system|>\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ eos_token }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|user|>\n<tool_response>\n' + m.content + '\n</tool_response>' + eos_token }}"
        "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' }}{% generation %}{% if m.content %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
        "{{ '<tool_call>' }}{{ {'name': call.name, 'arguments': call.arguments} | tojson }}{{ '</tool_call>' }}{% endfor %}"
        "{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}
"""Templates with the tag `generation` around everything that the assistant writes."""

THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A template that removes the reasoning from earlier turns."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def say(*contents: str, system: str = "") -> dict[str, Any]:
    """Return a record in which the user and the assistant alternate."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + turns}


CONVERSATIONS = {
    "one turn": say("say red", "red red"),
    "turns": say("say one", "one", "now two three", "two three, three", "and the moon?", "moon\nmoon"),
    "system": say("cat or dog?", "dog", "bird?", "no", system="You say one word."),
    "unicode": say("grün?", "ja, grün 🌲", "naïve", "ñandú"),
    "ends with the user": say("say sun", "sun", "more"),
}

TOOL_CALLS = {
    "tools": [WEATHER],
    "messages": [
        {"role": "user", "content": "Is the sun out in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
        },
        {"role": "tool", "content": '{"sky": "blue"}', "name": "weather"},
        {"role": "assistant", "content": "Yes, the sky is blue."},
    ],
}


def conversations_for(name: str) -> dict[str, dict[str, Any]]:
    """Return the conversations that a template supports."""
    return {**CONVERSATIONS, "tool calls": TOOL_CALLS} if name == "tools" else CONVERSATIONS


def without_tags(template: str) -> str:
    """Return the template without the tag `generation`."""
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


def tokenizer_of(folder: Path, template: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a folder with another template."""
    found = PreTrainedTokenizerFast.from_pretrained(folder)
    found.chat_template = template
    return found


def rendered_by_transformers(
    tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and flags of the assistant's tokens."""
    found = tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return found["input_ids"], found["assistant_masks"]
