"""Chat templates, which render conversations as text and locate the assistant's text.

A template is a Jinja program that belongs to a tokenizer and uses the variables and functions that `transformers`
defines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from farandole.data.errors import DataError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template "chatml", for tokenizers without a template."""

Message = Mapping[str, Any]


_START, _END = "\U0010fffe", "\U0010ffff"
"""Noncharacters that mark the assistant's text while a template with the tag `generation` is rendered."""


class _Generation(jinja2.ext.Extension):
    """Implements the `{% generation %}` tag: encloses the assistant's text in `_START` and `_END`."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_START, _END))
        return nodes.Scope([next(marks), *body, next(marks)]).set_lineno(line)


class Template:
    """A chat template, which renders conversations as text.

    Args:
        source: the Jinja program.
        tokens: a dict that maps template variables, such as `bos_token`, to special tokens.

    Raises:
        DataError: if the program is invalid.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source, self.tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
            program = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is invalid on line {error.lineno}: {error.message}; correct the template, or use "
                "another template"
            ) from None
        self._marks_answers = any(
            isinstance(node.data, str) and _START in node.data
            for node in program.find_all(nodes.TemplateData)
        )
        given = {"messages", "add_generation_prompt", *self.tokens, *environment.globals}
        self.variables = jinja2.meta.find_undeclared_variables(program) - given
        """The names of the other variables that the program reads, such as `tools`."""

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **variables: Any) -> str:
        """Return a conversation as text.

        Args:
            messages: the conversation.
            prompt: whether to append the start of the assistant's next message.
            variables: values for the variables in `self.variables`.

        Raises:
            DataError: if the template rejects the messages.
        """
        return self._render(messages, prompt, variables).replace(_START, "").replace(_END, "")

    def _render(self, messages: Sequence[Message], prompt: bool, variables: Mapping[str, Any]) -> str:
        """Return a conversation as text; mark the assistant's text if the template has `generation` tags."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=prompt, **self.tokens, **variables
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template rejects the messages: {error}; correct the messages, or use another template"
            ) from None
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"the chat template cannot render the messages: {error!r}; correct the messages, or use another template"
            ) from None

    def answers(
        self, messages: Sequence[Message], **variables: Any
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the conversation as texts, each with the character ranges written by the assistant.

        If the template has the tag `generation`, the tag marks these ranges.  Otherwise, a range is the text that
        an assistant message adds to its prompt.  The result is one text if the template renders earlier turns
        without changes.  If the template changes earlier turns, for example by removing their reasoning, the
        result has one text per assistant turn.

        Raises:
            DataError: if the template rejects the messages, or renders an assistant message without its prompt.
        """
        if self._marks_answers:
            return self._marked(self._render(messages, False, variables))
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        spans, texts = [], []
        whole = self.render(messages, **variables)
        for turn in turns:
            prompt = self.render(messages[:turn], prompt=True, **variables)
            done = self.render(messages[: turn + 1], **variables)
            if not done.startswith(prompt):
                prompt = self.render(messages[:turn], **variables)
            if not done.startswith(prompt):
                raise DataError(
                    "the chat template renders the assistant's message without the preceding prompt; choose "
                    "another file with data.template=FILE"
                )
            texts.append((done, [(len(prompt), len(done))]))
            spans.append((len(prompt), len(done)))
        if all(whole.startswith(done) for done, _ in texts):
            return [(whole, spans)] if spans else []
        return texts

    @staticmethod
    def _marked(text: str) -> list[tuple[str, list[tuple[int, int]]]]:
        """Remove the marks; return the text and the marked ranges, or [] if there are no marks."""
        spans: list[tuple[int, int]] = []
        parts = text.split(_START)
        plain = parts[0]
        for part in parts[1:]:
            answer, _, rest = part.partition(_END)
            spans.append((len(plain), len(plain) + len(answer)))
            plain += answer + rest
        return [(plain, spans)] if spans else []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON; the parameters match the `tojson` filter of transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def find_template(folder: Path, choice: str = "") -> Template:
    """Return the chat template of a tokenizer.

    Args:
        folder: a folder with `tokenizer_config.json` or `chat_template.jinja`.
        choice: the path of another template, or "chatml"; by default, the template in `folder`.

    Raises:
        DataError: if the template is missing or invalid.
    """
    config = read_tokenizer_config(folder)
    tokens = {name: text for name in config if name.endswith("_token") and (text := token_text(config, name))}
    if choice == "chatml":
        return Template(CHATML, tokens)
    if choice:
        try:
            return Template(Path(choice).expanduser().read_text(encoding="utf-8"), tokens)
        except OSError as error:
            raise DataError(
                f"data.template={choice}: {error.strerror}; expected a readable file, or chatml"
            ) from None
        except UnicodeDecodeError:
            raise DataError(f"data.template={choice}: expected text in UTF-8, got other bytes") from None
    file = folder / "chat_template.jinja"
    try:
        source: Any = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except UnicodeDecodeError:
        raise DataError(f"{file} is damaged: expected text in UTF-8; restore the file") from None
    if isinstance(source, list):  # several named templates
        named = {each["name"]: each["template"] for each in source}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str):
        raise DataError(f"{folder} has no chat template; use data.template=FILE or data.template=chatml")
    return Template(source, tokens)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, or {} if the file is missing or does not contain a JSON object.

    Raises:
        DataError: if the file is damaged.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; restore the file") from None
    return found if isinstance(found, dict) else {}


def token_text(config: Mapping[str, Any], name: str) -> str | None:
    """Return the text of the special token `name`, such as `eos_token`, from a tokenizer's configuration, or None."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
