"""Split a model's text into reasoning, content and tool calls, while the text arrives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from farandole.serve.http.calls import END_THINK, THINK, Call, CallFormat
from farandole.serve.text import overlap


@dataclass
class Part:
    """New text of a reply.

    Args:
        reasoning: the text between `<think>` and `</think>`.
        content: the text for the user.
        calls: complete tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Reply:
    """The reply of one sequence, divided into parts.

    Text that could be the beginning of a mark is held back until more text has arrived.  A call that is not valid JSON
    for a known tool is part of the content.

    Args:
        form: the tool-call format, or None.
        names: the names of the tools.
        reasons: whether the text may start with reasoning.
        is_reasoning: whether the prompt ends within the reasoning.
    """

    def __init__(
        self,
        form: CallFormat | None = None,
        names: Collection[str] = (),
        *,
        reasons: bool = False,
        is_reasoning: bool = False,
    ) -> None:
        self._form, self._names = form, names
        self._read = self._reasoning if is_reasoning else self._start if reasons else self._content_start
        self._held = ""
        self._is_last = False
        self.whole = Part()

    def add(self, text: str, is_last: bool = False) -> Part:
        """Add text, and return the new part of the reply without text that is held back.

        With `is_last`, nothing is held back.
        """
        self._held += text
        self._is_last = is_last
        part = Part()
        read = None
        while read != self._read:  # each state reads as much as it can
            read = self._read
            read(part)
        self.whole.reasoning += part.reasoning
        self.whole.content += part.content
        self.whole.calls += part.calls
        return part

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the engine's finish reason, or "tool_calls" if the text ended with calls."""
        return "tool_calls" if reason == "stop" and self.whole.calls else reason

    # ---- states ----

    def _start(self, part: Part) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._read = self._reasoning
        elif self._is_last or not THINK.startswith(text):
            self._read = self._content_start

    def _reasoning(self, part: Part) -> None:
        text = self._held if self.whole.reasoning else self._held.lstrip("\n")
        before, mark, after = text.partition(END_THINK)
        if mark:
            before = before.rstrip("\n")
            self._read = self._content_start
        else:
            before, after = self._divide(text, END_THINK)
        part.reasoning += before
        self._held = after

    def _content_start(self, part: Part) -> None:
        """Skip the space after reasoning and calls, and decide whether the rest is a call without marks."""
        follows = self.whole.reasoning or self.whole.calls or part.reasoning or part.calls
        text = self._held.lstrip() if follows else self._held
        unmarked = self._form is not None and not self._form.start
        if self._is_last or (text.strip() if unmarked else text):
            self._held = text
            self._read = self._call if unmarked and text.lstrip().startswith("{") else self._content

    def _content(self, part: Part) -> None:
        if self._form is None or not self._form.start:
            part.content += self._held
            self._held = ""
            return
        before, mark, after = self._held.partition(self._form.start)
        if mark:
            before = before.rstrip()
            self._read = self._call
        else:
            before, after = self._divide(self._held, self._form.start)
        part.content += before
        self._held = after

    def _call(self, part: Part) -> None:
        form = self._form
        assert form is not None
        text, mark, after = self._held.partition(form.end) if form.end else (self._held, "", "")
        if not mark and not self._is_last:
            return
        calls = form.parse(text, self._names)
        part.calls += calls
        if not calls:
            part.content += form.start + text + mark
        self._held = after
        self._read = self._content_start

    def _divide(self, text: str, mark: str) -> tuple[str, str]:
        """Return the text that cannot belong to a mark or to the space before the mark, and the remaining text."""
        if self._is_last:
            return text, ""
        end = len(text[: len(text) - overlap(text, mark)].rstrip())
        return text[:end], text[end:]
