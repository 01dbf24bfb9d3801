"""Tokenized text: complete, split without overlap, and cached by content."""

from __future__ import annotations

import errno
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from farandole.data import text as module
from farandole.data.cache import FILES, content_key, default_cache
from farandole.data.errors import DataError
from farandole.data.sources import find_source
from farandole.data.text import Text, prepare_text
from farandole.data.tokenizer import END_OF_TEXT, MASK, PAD, split_document, train_tokenizer

VOCABULARY, CONTEXT = 300, 8


def _prepare(path: Path, cache: Path, **options: object) -> Text:
    settings = {"vocabulary": VOCABULARY, "context": CONTEXT} | options
    return prepare_text(str(path), cache=cache, **settings)  # type: ignore[arg-type]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        lines = (f"def f{i}_{number}(x):\n    return x + {i * number}\n" for i in range(30))
        (folder / f"{number:02d}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _decoded(text: Text) -> list[str]:
    """Return the documents of both streams."""
    whole = []
    for part in (text.train, text.validation):
        decoded = text.tokenizer.decode(part.tokens.tolist(), skip_special_tokens=False)
        whole += decoded.split(END_OF_TEXT)[:-1]
    return whole


def test_every_document_occurs_once_and_unchanged(corpus: Path, cache: Path) -> None:
    text = _prepare(corpus, cache, validation_share=0.2)
    assert sorted(_decoded(text)) == sorted(path.read_text() for path in corpus.iterdir())
    assert text.train.samples > text.validation.samples > 0
    assert text.train.tokens.dtype == np.uint16


def test_consecutive_windows_overlap_by_one_target(corpus: Path, cache: Path) -> None:
    train = _prepare(corpus, cache).train
    first, second = train.read(np.array([0, 1]))
    assert first.shape == (CONTEXT + 1,)
    assert first[-1] == second[0]
    last = train.read(np.array([train.samples - 1]))
    assert last.shape == (1, CONTEXT + 1)


def test_split_is_deterministic(corpus: Path, tmp_path: Path) -> None:
    one, two = _prepare(corpus, tmp_path / "one"), _prepare(corpus, tmp_path / "two")
    for name in FILES:
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


def test_small_text_has_validation_tokens(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 100)
    text = _prepare(tmp_path / "a.txt", cache, validation_share=0.1)
    share = len(text.validation.tokens) / (len(text.train.tokens) + len(text.validation.tokens))
    assert share == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("share", [0, 1, float("nan")])
def test_a_validation_share_out_of_range_is_refused(corpus: Path, cache: Path, share: float) -> None:
    with pytest.raises(DataError, match="expected validation_share above 0 and below 1, got"):
        _prepare(corpus, cache, validation_share=share)


def test_too_little_text_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("few words")
    with pytest.raises(
        DataError, match=r"expected at least 9 tokens .* model.context=8.* reduce model.context"
    ):
        _prepare(tmp_path / "a.txt", cache)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="in the train split .* found 1 token"):
        _prepare(tmp_path / "a.txt", cache)
    (tmp_path / "b.txt").write_text(" \n\n")
    with pytest.raises(DataError, match="expected text, found only whitespace"):
        _prepare(tmp_path / "b.txt", cache)


def test_cache_is_used_until_content_or_settings_change(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = module._build
    monkeypatch.setattr(module, "_build", lambda *args: (built.append(1), build(*args)))
    folders = [_prepare(corpus, cache).folder, _prepare(corpus, cache, context=4).folder]
    assert (len(built), len(set(folders))) == (1, 1)
    _prepare(corpus, cache, vocabulary=301)
    (corpus / "00.py").write_text("changed = True\n" * 50)
    _prepare(corpus, cache)
    assert len(built) == 3
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "unreadable"])
def test_damaged_entry_is_built_again(
    corpus: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _prepare(corpus, cache).folder
    train = (folder / "train.bin").read_bytes()
    match damage:
        case "truncated":
            (folder / "train.bin").write_bytes(train[:-10])
        case "flipped":
            (folder / "train.bin").write_bytes(bytes([train[0] ^ 1]) + train[1:])
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "unreadable":
            (folder / "entry.json").write_text("{")
    text = _prepare(corpus, cache)
    assert (text.folder / "train.bin").read_bytes() == train
    assert "rebuilding them" in caplog.text


def test_full_disk_is_reported_and_leaves_no_files(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_build", full)
    with pytest.raises(
        DataError,
        match=r"cannot write tokens to .*: no space left on the disk \(.* free\).*; choose another folder with data.cache=",
    ):
        _prepare(corpus, cache)
    assert [p for p in cache.rglob("*") if p.suffix != ".lock"] == [cache / "tokens"]


def test_full_disk_without_space_for_the_cache_folder_is_reported(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(Path, "mkdir", full)  # no inode is free
    with pytest.raises(DataError, match=r"cannot write tokens to .*: no space left on the disk \(.* free\)"):
        _prepare(corpus, cache)


def test_unwritable_cache_is_reported(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write tokens to .*file"):
        _prepare(corpus, tmp_path / "file")


def _job(corpus: Path, cache: Path) -> None:
    assert _prepare(corpus, cache).train.samples > 0


def test_concurrent_jobs_build_one_entry(corpus: Path, cache: Path) -> None:
    jobs = [multiprocessing.get_context("fork").Process(target=_job, args=(corpus, cache)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert len([path for path in (cache / "tokens").iterdir() if path.is_dir()]) == 1


def test_progress_is_reported_to_the_end(corpus: Path, cache: Path) -> None:
    calls: list[tuple[str, float]] = []
    _prepare(corpus, cache, progress=lambda what, share: calls.append((what, share)))
    assert list(dict.fromkeys(what for what, _ in calls)) == [
        "reading text",
        "learning tokens",
        "encoding text",
    ]
    for what in ("reading text", "encoding text"):
        shares = [share for named, share in calls if named == what]
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1.0)


def test_vocabulary_smaller_than_all_bytes_is_refused(corpus: Path, cache: Path) -> None:
    with pytest.raises(DataError, match=r"from 257 \(257 byte-level tokens\) to 2"):
        _prepare(corpus, cache, vocabulary=256)


def test_large_vocabularies_use_four_bytes(corpus: Path, cache: Path) -> None:
    text = _prepare(corpus, cache, vocabulary=70_000, validation_share=0.2)
    assert text.train.tokens.dtype == np.uint32
    assert sorted(_decoded(text)) == sorted(path.read_text() for path in corpus.iterdir())


def test_chunks_concatenate_to_the_document() -> None:
    document = "".join(f"line {i}\n" for i in range(5000)) + "x" * 20_000
    chunks = list(split_document(document))
    assert "".join(chunks) == document
    assert all(len(chunk) <= 1 << 13 for chunk in chunks)
    assert all(chunk.endswith("\n") for chunk in chunks[: len(chunks) // 2])


def test_any_text_round_trips_through_tokens() -> None:
    tokenizer = train_tokenizer(["hello world"] * 3, 280)
    for text in ("hello", "naïve café 東京 🙂", "\ttab\r\n  spaces  ", "\0"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_default_cache_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache() == Path("/elsewhere/farandole")


def test_files_of_a_killed_process_are_removed(corpus: Path, cache: Path) -> None:
    folder = _prepare(corpus, cache).folder
    shutil.move(folder, folder.with_name(f"{folder.name}.x.tmp"))
    assert _prepare(corpus, cache).folder == folder
    assert not list(cache.rglob("*.tmp"))


def test_a_tokenizer_trained_on_the_same_text_uses_the_same_entry(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    first = _prepare(corpus, cache)
    file = tmp_path / "tokenizer.json"
    shutil.copyfile(first.folder / "tokenizer.json", file)
    assert _prepare(corpus, cache, tokenizer=file).folder == first.folder
    (corpus / "more.py").write_text("print()\n" * 100)
    changed = _prepare(corpus, cache, tokenizer=file)
    assert changed.folder != first.folder
    assert changed.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """transformers saves the settings of its last call in this file."""
    whole = _prepare(corpus, cache)
    whole.tokenizer.enable_truncation(16)
    whole.tokenizer.enable_padding(length=64)
    file = tmp_path / "tokenizer.json"
    whole.tokenizer.save(str(file))
    found = _prepare(corpus, cache, tokenizer=file)
    assert np.array_equal(found.train.tokens, whole.train.tokens)


def test_a_tokenizer_with_tokens_outside_the_vocabulary_is_refused(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({END_OF_TEXT: 0, "def": VOCABULARY}, unk_token=END_OF_TEXT)).save(str(file))
    with pytest.raises(DataError, match=r"contains token 300, but model\.vocabulary=300; use .*=301"):
        _prepare(corpus, cache, tokenizer=file)


def test_special_tokens_change_the_cache_key(corpus: Path, cache: Path) -> None:
    settings = {"vocabulary": VOCABULARY, "validation_share": 0.02}
    key = content_key(find_source(str(corpus), "text"), settings, lambda what, share: None)
    assert _prepare(corpus, cache).folder == cache / "tokens" / key
    with_mask = _prepare(corpus, cache, special_tokens=(MASK,))
    assert with_mask.folder != cache / "tokens" / key
    assert with_mask.folder != _prepare(corpus, cache, special_tokens=(MASK, PAD)).folder


def test_special_tokens_follow_the_end_token_and_their_names_in_text_stay_text(
    tmp_path: Path, cache: Path
) -> None:
    document = f"a [MASK] is no {END_OF_TEXT} [PAD]\n" * 200
    (tmp_path / "a.txt").write_text(document)
    text = _prepare(tmp_path / "a.txt", cache, special_tokens=(MASK, PAD))
    assert [text.tokenizer.token_to_id(name) for name in (END_OF_TEXT, MASK, PAD)] == [0, 1, 2]
    tokens = np.concatenate([text.train.tokens, text.validation.tokens])
    assert (tokens <= 2).sum() == 1  # the end of the document
    assert text.tokenizer.decode(tokens.tolist()) == document


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((MASK, MASK), "duplicate special token '\\[MASK\\]'"),
        ((END_OF_TEXT,), "always included"),
        (("mask",), "could be learned from text; use a name such as '\\[mask\\]'"),
        (("",), "could be learned"),
        (MASK, "'\\[' could be learned"),  # a string instead of a tuple
    ],
)
def test_invalid_special_tokens_are_refused(
    corpus: Path, cache: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _prepare(corpus, cache, special_tokens=names)
    with pytest.raises(DataError, match=r"from 259 \(257 byte-level tokens \+ 2 special tokens\) to 2"):
        _prepare(corpus, cache, special_tokens=(MASK, PAD), vocabulary=258)
