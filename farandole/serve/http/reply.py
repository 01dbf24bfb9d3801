"""Split a model's text into reasoning, content and tool calls, while the text arrives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from farandole.serve.http.call_reader import SPACE, Call, CallReader
from farandole.serve.http.calls import END_THINK, THINK, CallFormat
from farandole.serve.text import overlap


@dataclass
class Part:
    """A reply, or a new part of a streamed reply.

    Args:
        reasoning: the text between `<think>` and `</think>`.
        content: the text for the user.
        calls: tool calls; in a stream, an entry without a name continues the previous call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Append the next part of a stream."""
        self.reasoning += part.reasoning
        self.content += part.content
        for call in part.calls:
            if call.name:
                self.calls.append(Call(call.name, call.arguments))
            else:
                self.calls[-1].arguments += call.arguments


class Reply:
    """Splits the text of one sequence into reasoning, content and tool calls.

    Text that could be the beginning of a delimiter is held back until more text has arrived.  Calls are returned as
    they arrive (see `CallReader`).  If the text between delimiters does not begin with a call to a known tool, the text
    and its delimiters are part of the content.

    Args:
        form: the tool-call format, or None if tool calls are not parsed.
        names: the names of the tools.
        reasons: whether the text may start with reasoning.
        is_reasoning: whether the prompt ends with `<think>`.
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
        self._reader: CallReader
        self._is_open = False  # whether a call has begun whose end delimiter has not arrived
        self.whole = Part()

    def add(self, text: str, is_last: bool = False) -> Part:
        """Add text, and return the new part of the reply.

        Args:
            is_last: whether `text` ends the sequence; if so, no text is held back.
        """
        self._held += text
        self._is_last = is_last
        part = Part()
        read = None
        while read != self._read:  # each state reads as much as it can
            read = self._read
            read(part)
        self.whole.add(part)
        return part

    def finish_reason(self, reason: str | None) -> str | None:
        """Return "tool_calls" if the reply contains calls and the engine's `reason` is "stop", else `reason`."""
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
        """Skip the whitespace after reasoning or a tool call, and decide whether content or a call follows."""
        follows = self.whole.reasoning or self.whole.calls or part.reasoning or part.calls
        text = self._held.lstrip() if follows else self._held
        unmarked = self._form is not None and not self._form.start
        if self._is_last or (text.strip() if unmarked else text):
            self._held = text
            self._read = self._content
            if unmarked and text.lstrip().startswith("{"):  # the text may be a call without delimiters
                self._start_call()

    def _content(self, part: Part) -> None:
        form = self._form
        if form is None or not form.start:
            part.content += self._held
            self._held = ""
            return
        marks = (form.start, form.end) if self._is_open else (form.start,)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            before, self._held = self._divide(self._held, *marks)
        else:
            at, mark = min(found)
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            self._is_open = False
            if mark == form.start:
                before = before.rstrip()
                self._start_call(mark)
            else:
                self._read = self._content_start
        part.content += before

    def _start_call(self, mark: str = "") -> None:
        assert self._form is not None
        self._reader = CallReader(self._form.key, self._names, mark)
        self._read = self._call

    def _call(self, part: Part) -> None:
        reader = self._reader
        count, calls = reader.read(self._held)
        part.calls += calls
        self._held = self._held[count:]
        self._is_open |= reader.has_begun
        if reader.has_ended or self._is_last:
            self._read = self._call_end if reader.has_begun else self._content
            if not reader.has_begun:
                part.content += reader.text

    def _call_end(self, part: Part) -> None:
        """Skip superfluous brackets and the end delimiter, and decide whether another call follows."""
        assert self._form is not None
        end = self._form.end
        text = self._held.lstrip(SPACE + ";}]")
        if end and text.startswith(end):
            text = text[len(end) :]
            self._is_open = False
            self._read = self._content_start
        elif not end.startswith(text) and text:
            self._read = self._content_start
            if text.startswith("{"):
                self._start_call()
        elif self._is_last:
            text = ""
        self._held = text

    def _divide(self, text: str, *marks: str) -> tuple[str, str]:
        """Split off the longest suffix that could be the start of a delimiter, and the whitespace before it."""
        if self._is_last:
            return text, ""
        end = len(text[: len(text) - max(overlap(text, mark) for mark in marks)].rstrip())
        return text[:end], text[end:]
