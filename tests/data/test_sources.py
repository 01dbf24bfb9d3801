"""The sources that `data.path` can name, and errors for unreadable ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from farandole.data.cache import content_digest
from farandole.data.errors import DataError
from farandole.data.sources import find_source
from tests.data.datasets import save_to_disk


def _documents(path: Path, field: str = "text") -> list[str]:
    return list(find_source(str(path), field).documents())


def test_standard_library_excludes_its_tests() -> None:
    source = find_source("stdlib")
    names = {path.name for path in source.files}
    assert {"argparse.py", "typing.py"} <= names
    assert not any({"site-packages", "test", "encodings"} & set(path.parts) for path in source.files)
    assert "class ArgumentParser" in "".join(source.documents())


def test_text_file_may_have_any_suffix(tmp_path: Path) -> None:
    (tmp_path / "poem.verse").write_text("roses\n")
    assert _documents(tmp_path / "poem.verse") == ["roses\n"]


def test_a_few_invalid_bytes_are_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "lines.jsonl").write_bytes(b'{"text": "tea"}\n{"text": "caf\xe9"}\n')
    (tmp_path / "replacement.txt").write_text("\N{REPLACEMENT CHARACTER} is valid UTF-8")
    for _ in range(2):  # a file is read several times
        assert _documents(tmp_path / "latin.txt") == ["caf�"]
        assert _documents(tmp_path / "lines.jsonl") == ["tea", "caf�"]
    assert len(_documents(tmp_path / "replacement.txt")) == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[2].partition(";")[0].rpartition("/")[2] for text in warnings] == [
        "latin.txt, byte 4: invalid UTF-8 replaced by U+FFFD",
        "lines.jsonl, line 2: invalid UTF-8 replaced by U+FFFD",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x7fELF\x02\x00\x00 and so on", "it contains NUL bytes"),
        ("a text of Windows".encode("utf-16"), "it contains NUL bytes"),
        ("текст в кодировке".encode("koi8-r"), "is not UTF-8 text: 8.% of its characters are invalid"),
    ],
)
def test_binary_files_are_refused_with_any_suffix(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(DataError, match=f"notes.txt .*{says}; expected UTF-8 text, JSON lines"):
        _documents(tmp_path)


def test_folders_are_read_recursively_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("z.txt", "b/a.py", "b/image.png", ".git/c.txt", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.md").write_text("  \n")
    assert _documents(tmp_path) == ["b/a.py", "z.txt"]


def test_json_lines_with_a_chosen_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "eins"}\n\n{"text": "two", "body": "zwei"}\n')
    assert _documents(path) == ["one", "two"]
    assert _documents(path, "body") == ["eins", "zwei"]
    with pytest.raises(
        DataError, match=r'a.jsonl, line 1: expected text in field "content", found only text, body'
    ):
        _documents(path, "content")


@pytest.mark.parametrize(
    "line",
    ["{not json", '["text"]', json.dumps({"text": 3}), "\x7f\xff", "[" * 99_999, r'{"text": "\uD800"}'],
)
def test_invalid_json_line_is_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match="a.jsonl, line 2: "):
        _documents(tmp_path / "a.jsonl")


def test_byte_order_marks_and_escaped_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "\\ud83d\\ude00"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftwo")
    assert _documents(tmp_path) == ["one", "\N{GRINNING FACE}", "two"]


def test_parquet_with_a_chosen_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"text": ["one", None, "two"], "body": ["x", "y", "z"], "n": [1, 2, 3]}), path
    )
    assert _documents(path) == ["one", "two"]
    assert _documents(path, "body") == ["x", "y", "z"]
    with pytest.raises(DataError, match='expected a column "content", found only text, body, n'):
        _documents(path, "content")
    with pytest.raises(DataError, match='row 1: expected text in field "n", found int'):
        _documents(path, "n")
    path.write_bytes(b"no such thing")
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        _documents(path)


def test_damaged_pages_of_parquet_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [f"number {n}" for n in range(2000)]}), path)
    whole = path.read_bytes()
    for start in (4, 5000):  # the header, and the compressed content
        path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
        with pytest.raises(
            DataError, match="a.parquet cannot be read as a Parquet file: .*restore or exclude"
        ):
            _documents(path)


def test_text_that_is_not_utf_8_in_parquet_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = arrow.array([b"caf\xe9"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": text}), path)
    with pytest.raises(DataError, match="a.parquet cannot be read as a Parquet file: 'utf-8' codec"):
        _documents(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow"])
def test_read_errors_name_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    source = find_source(str(tmp_path / name))
    (tmp_path / name).unlink()
    for read in (lambda: list(source.documents()), lambda: content_digest(source, lambda what, share: None)):
        with pytest.raises(DataError, match=f"{name}.*No such file"):
            read()


def test_missing_file_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match="no such file or folder; did you mean .*corpus.txt"):
        find_source(str(tmp_path / "corpsu.txt"))
    with pytest.raises(DataError, match="the nearest existing folder is"):
        find_source(str(tmp_path / "deep" / "er" / "x"))
    for path in (tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "a.txt"):
        with pytest.raises(
            DataError, match=f"no such file or folder; the nearest existing folder is {tmp_path}"
        ):
            find_source(str(path))


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_text("x")
    with pytest.raises(
        DataError, match="found no text in this folder; expected files with the suffixes .txt"
    ):
        find_source(str(tmp_path))
    with pytest.raises(DataError, match="data.path is empty: expected a file, a folder, or stdlib"):
        find_source("")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="the file is empty"):
        find_source(str(tmp_path / "empty.txt"))
    with pytest.raises(DataError, match=r"all files are empty \(1 file\)"):
        find_source(str(tmp_path))


def test_file_without_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(DataError, match="no permission to read .*secret.txt"):
        find_source(str(tmp_path / "secret.txt"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in find_source(str(path)).records()]


def test_folder_of_the_datasets_library(tmp_path: Path) -> None:
    table = arrow.table({"text": [f"text {n}" for n in range(12)], "n": list(range(12))})
    folder = save_to_disk(tmp_path / "set", table, shards=3)
    cached = folder / "cache-0123456789abcdef.arrow"  # written by Dataset.map, and not part of the data set
    cached.write_bytes((folder / "data-00000-of-00003.arrow").read_bytes())
    assert _documents(folder) == [f"text {n}" for n in range(12)]
    assert [row["n"] for row in _rows(folder)] == list(range(12))
    with pytest.raises(DataError, match="data-00000-of-00003.arrow, row 1: expected text in field"):
        _documents(folder, "n")


def test_dataset_dict_has_a_training_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "sets" / "test", arrow.table({"text": ["test"]}))
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(DataError, match="has no split named train; choose the folder of a split: test"):
        _documents(tmp_path / "sets")
    save_to_disk(tmp_path / "sets" / "train", arrow.table({"text": ["one", "two"]}))
    assert _documents(tmp_path / "sets") == ["one", "two"]
    assert _documents(tmp_path / "sets" / "test") == ["test"]


def test_damaged_folders_of_the_datasets_library_are_refused(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "set", arrow.table({"text": ["a long text " * 9] * 12}), shards=2)
    second = folder / "data-00001-of-00002.arrow"
    whole = second.read_bytes()
    for content in (whole[: len(whole) // 2], b"no such thing"):
        second.write_bytes(content)
        with pytest.raises(DataError, match="data-00001-of-00002.arrow cannot be read as an Arrow file"):
            _documents(folder)
    second.unlink()
    with pytest.raises(DataError, match="is incomplete: data-00001-of-00002.arrow is missing"):
        _documents(folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match="call flatten_indices"):
        _documents(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match="state.json is damaged"):
        _documents(folder)


def test_null_fields_of_structs_are_missing_fields(tmp_path: Path) -> None:
    rows = [{"items": [{"a": 1}, {"b": {"c": "x"}}, {"b": {"d": [1, None]}}], "n": None}]
    (tmp_path / "rows.arrow").touch()
    table = arrow.Table.from_pylist(rows)
    with (  # Arrow's file format
        arrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as file,
        arrow.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "rows.parquet")
    for name in ("rows.arrow", "rows.parquet"):
        assert _rows(tmp_path / name) == rows
