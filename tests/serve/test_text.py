"""Text as it arrives: incomplete characters, and stop strings that are never shown."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from farandole.data.tokenizer import train_tokenizer
from farandole.serve.text import TextStream, overlap
from tests.serve.sentencepiece import sentencepiece


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat and the dog, été à l'étang 猫と犬 " * 3], 300)


def stream(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the parts of a text up to a stop string, and whether it was found."""
    own = TextStream(tokenizer(), stop)
    parts = []
    for token in tokenizer().encode(text).ids:
        parts.append(own.add(token))
        if own.stopped:
            return parts, True
    parts.append(own.finish())
    return parts, own.stopped


@given(st.text("abc猫 é\n", max_size=30), st.lists(st.text("abc猫 ", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    parts, stopped = stream(text, tuple(stop))
    ends = [text.find(each) for each in stop if each in text]
    assert stopped == bool(ends)
    # the first stop string that is complete ends the text
    complete = min((text.find(each) + len(each) for each in stop if each in text), default=len(text))
    expected = min((text.find(each) for each in stop if each in text[:complete]), default=len(text))
    got = "".join(parts)
    if stopped:
        # a token can complete several stop strings at once
        assert got in {text[:end] for end in ends}
        assert len(got) <= expected
    else:
        assert got == text


def test_nothing_that_could_be_a_stop_string_is_shown() -> None:
    own = TextStream(tokenizer(), ("dog!",))
    shown = "".join(own.add(token) for token in tokenizer().encode("the do").ids)
    assert shown == "the "
    assert shown + own.finish() == "the do"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_all_text_that_cannot_begin_a_stop_string_is_shown(text: str, stop: list[str]) -> None:
    own, shown = TextStream(tokenizer(), stop), ""
    for end in range(1, len(text) + 1):
        shown += own.add(*tokenizer().encode(text[end - 1]).ids)
        if own.stopped:
            break
        assert shown == text[: end - max(overlap(text[:end], each) for each in stop)]


def test_stop_strings_are_compared_only_with_text_that_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def compare(text: str, stop: str) -> int:
        lengths.append(len(text))
        return overlap(text, stop)

    monkeypatch.setattr("farandole.serve.text.overlap", compare)
    own = TextStream(tokenizer(), ("cat" + "t" * 1000,))
    for token in tokenizer().encode("the cat and the dog " * 20).ids:
        own.add(token)
    assert own.length == 400
    assert max(lengths) < 30


def test_incomplete_characters_wait() -> None:
    own = TextStream(tokenizer())
    ids = tokenizer().encode("犀").ids
    assert len(ids) > 1
    assert [own.add(token) for token in ids] == [""] * (len(ids) - 1) + ["犀"]
    cut = TextStream(tokenizer())
    assert cut.add(ids[0]) == ""
    assert cut.finish() == "�"


@pytest.mark.parametrize("text", ["the cat", "été 猫", ""])
def test_parts_join_to_the_text(text: str) -> None:
    assert "".join(stream(text, ())[0]) == text


@given(st.lists(st.sampled_from([*"中é".encode(), 0xF0, 0x80, "▁a", "b", "▁"]), max_size=12))
@example(["▁a", *"中".encode(), 0xF0, "b"])  # a valid character, a byte that is not one, and text
def test_invalid_bytes_do_not_end_the_text(tokens: list[int | str]) -> None:
    own = TextStream(sentencepiece())
    names = [f"<0x{token:02X}>" if isinstance(token, int) else token for token in tokens]
    parts = [own.add(sentencepiece().token_to_id(name)) for name in names]
    text = "".join(parts) + own.finish()
    assert text.count("b") == tokens.count("b") and text.count("a") == tokens.count("▁a")


def ids(*names: str) -> list[int]:
    return [sentencepiece().token_to_id(name) for name in names]


@pytest.mark.parametrize("stop", [(), ("x",)])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (ids("▁a", "▁c"), " b b中 b"),
        (ids("▁a", "<s>"), " b b中 b"),
        (ids("▁a", "<0xE4>"), " b b中 b"),  # an incomplete character
        (ids("<s>"), "b b中 b"),
        ([], "b b中 b"),
    ],
)
def test_a_continuation_keeps_the_space_at_its_start(
    prompt: list[int], expected: str, stop: tuple[str, ...]
) -> None:
    own = TextStream(sentencepiece(), stop, prompt)
    tokens = ids("▁b", "▁b", "<0xE4>", "<0xB8>", "<0xAD>", "▁b")
    assert "".join(own.add(token) for token in tokens) + own.finish() == expected
    assert own.length == len(expected)


def test_the_text_that_is_held_back_continues_the_prompt() -> None:
    own = TextStream(sentencepiece(), (), ids("▁a"))
    assert [own.add(token) for token in ids("<0xE4>", "<0xB8>")] == ["", ""]
    assert own.finish() == "��"
    own = TextStream(sentencepiece(), (" b",), ids("▁a"))
    assert (own.add(*ids("▁b")), own.stopped) == ("", True)


@given(st.text("abc猫 é\n", max_size=9), st.lists(st.integers(0, 299), max_size=12))
def test_the_prompt_does_not_change_the_text_of_byte_level_tokens(prompt: str, tokens: list[int]) -> None:
    alone, after = TextStream(tokenizer()), TextStream(tokenizer(), (), tokenizer().encode(prompt).ids)
    assert [alone.add(token) for token in tokens] == [after.add(token) for token in tokens]
    assert (alone.length, alone.finish()) == (after.length, after.finish())
