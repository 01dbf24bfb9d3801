"""Chat templates are rendered as by transformers, and mark the same text as the assistant's."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.data.errors import DataError
from farandole.data.template import CHATML, Template, find_template
from tests.data.templates import (
    CONVERSATIONS,
    TEMPLATES,
    THINKING,
    conversations_for,
    rendered_by_transformers,
    say,
    tokenizer_of,
    without_tags,
)
from tests.models.hf.folders import add_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(folder, 300)
    return folder


@pytest.mark.parametrize(
    "options", ["", "indent=2", "separators=(',', ':'), sort_keys=true", "ensure_ascii=true, sort_keys=true"]
)
def test_json_is_written_as_by_transformers(folder: Path, options: str) -> None:
    template = f"{{{{ messages[0].content | tojson({options}) }}}}"
    messages = [{"role": "user", "content": {"b": "é<", "a": [1, 2.5, None]}}]
    theirs = tokenizer_of(folder, template).apply_chat_template(messages, tokenize=False)
    assert Template(template, TOKENS).render(messages) == theirs


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_rendered_and_marked_as_by_transformers(
    folder: Path, name: str, tagged: bool
) -> None:
    theirs = tokenizer_of(folder, TEMPLATES[name])
    ours = Template(TEMPLATES[name] if tagged else without_tags(TEMPLATES[name]), TOKENS)
    for title, record in conversations_for(name).items():
        messages, tools = record["messages"], record.get("tools")
        variables = {"tools": tools} if tools else {}
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render(messages, **variables) == text, title
        if messages[-1]["role"] != "assistant":
            prompt = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert ours.render(messages, prompt=True, **variables) == prompt, title
        ((found, spans),) = ours.answers(messages, **variables)
        assert found == text, title
        encoding = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, flags = rendered_by_transformers(theirs, record)
        assert encoding["input_ids"] == ids, title
        overlaps = [
            int(any(b > start and a < end for start, end in spans)) for a, b in encoding["offset_mapping"]
        ]
        assert overlaps == flags, title


def test_chatml_is_the_default_of_transformers_for_such_models(folder: Path) -> None:
    theirs = tokenizer_of(folder, without_tags(TEMPLATES["chatml"]))
    for record in CONVERSATIONS.values():
        text = theirs.apply_chat_template(record["messages"], tokenize=False)
        assert Template(CHATML, TOKENS).render(record["messages"]) == text


def test_each_turn_is_a_text_if_the_template_changes_earlier_turns(folder: Path) -> None:
    messages = say("one?", "<think>easy</think>one", "two?", "<think>hard</think>two")["messages"]
    theirs = tokenizer_of(folder, THINKING)
    found = Template(THINKING, TOKENS).answers(messages)
    assert [text for text, _ in found] == [
        theirs.apply_chat_template(messages[:end], tokenize=False) for end in (2, 4)
    ]
    answers = [[text[start:end] for start, end in spans] for text, spans in found]
    assert answers == [["<think>easy</think>one</s>"], ["<think>hard</think>two</s>"]]


def test_a_tag_that_encloses_less_than_a_turn(folder: Path) -> None:
    narrow = TEMPLATES["chatml"].replace(
        "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}",
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
    )
    assert narrow != TEMPLATES["chatml"]
    record = CONVERSATIONS["turns"]
    ((text, spans),) = Template(narrow, TOKENS).answers(record["messages"])
    assert [text[a:b] for a, b in spans] == [
        m["content"] for m in record["messages"] if m["role"] == "assistant"
    ]
    theirs = tokenizer_of(folder, narrow)
    offsets = theirs(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    flags = [int(any(b > start and a < end for start, end in spans)) for a, b in offsets]
    assert flags == rendered_by_transformers(theirs, record)[1]


def test_conversations_that_a_template_rejects(folder: Path) -> None:
    template = Template(TEMPLATES["mistral"], TOKENS)
    with pytest.raises(DataError, match="the chat template rejects the messages: roles must alternate"):
        template.answers([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(DataError, match="cannot render the messages"):
        template.answers([{"role": "user", "content": None}])


def test_invalid_and_missing_templates(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the chat template is invalid on line 2: .*use another template"):
        Template("{{ bos_token }}\n{% for %}", TOKENS)
    assert "<|im_start|>" in find_template(folder, "chatml").source
    (tmp_path / "own.jinja").write_text("{{ eos_token }}")
    assert find_template(folder, str(tmp_path / "own.jinja")).render([]) == "</s>"
    with pytest.raises(
        DataError, match=r"data.template=missing.jinja: .*expected a readable file, or chatml"
    ):
        find_template(folder, "missing.jinja")
    with pytest.raises(DataError, match="has no chat template; use data.template=FILE"):
        find_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'from the file' }}")
    assert find_template(tmp_path).render([]) == "from the file"
