"""Read documents and records from text, JSON lines, Parquet and Arrow files, and from folders of such files.

A *document* is one string: a text file, a field of a JSON line, or a cell of a Parquet or Arrow column.
"""

from __future__ import annotations

import codecs
import difflib
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from farandole.data.errors import DataError
from farandole.data.wording import counted

_log = logging.getLogger(__name__)

STANDARD_LIBRARY = "stdlib"
"""The path that selects the source files of Python's standard library."""

TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".hpp",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
)
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
ARROW_SUFFIXES = (".arrow",)
RECORD_SUFFIXES = JSON_LINES_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES
READABLE_SUFFIXES = TEXT_SUFFIXES + RECORD_SUFFIXES

_ARROW_FILE = b"ARROW1"
"""The first bytes of a file in Arrow's file format; its stream format begins differently."""

_ACCEPTED = "expected UTF-8 text, JSON lines (.jsonl), Parquet or Arrow; exclude or convert the file"

_MAX_INVALID_SHARE = 0.3
"""The maximum fraction of a text file's characters that may be invalid UTF-8."""

# Tests are larger than the rest of the library; encodings and pydoc_data contain tables, not programs.
_EXCLUDED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}


@dataclass(frozen=True)
class Source:
    """A fixed sequence of files with documents.

    Args:
        root: the file or folder given by the user.
        files: sorted paths under `root`.
        field: the JSON field, or the Parquet or Arrow column, that contains the text.
    """

    root: Path
    files: tuple[Path, ...] = field(repr=False)
    field: str = "text"

    @property
    def size(self) -> int:
        """Return the total size of the files in bytes."""
        total = 0
        for path in self.files:
            with reading(path):
                total += path.stat().st_size
        return total

    def records(self, fields: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, record) for all records.  Raise `DataError` for an invalid record."""
        for path in self.files:
            if not path.name.lower().endswith(RECORD_SUFFIXES):
                raise DataError(
                    f"{path}: expected a file with records: JSON lines, Parquet or Arrow ({', '.join(RECORD_SUFFIXES)})"
                )
            yield from read_records(path, fields)

    def documents(self) -> Iterator[str]:
        """Yield all non-blank documents in order.  Raise `DataError` for an invalid document."""
        for path in self.files:
            yield from (text for text in _read(path, self.field) if text.strip())


def find_source(path: str, text_field: str = "text") -> Source:
    """Return the source at `path`, which is "stdlib", a file or a folder.

    A file with a suffix in `RECORD_SUFFIXES` is read as records, and any other file as text.  Folders are searched
    recursively for files with `READABLE_SUFFIXES`; hidden files and folders are skipped.

    Raises:
        DataError: if no readable file is found.
    """
    if path == STANDARD_LIBRARY:
        return _standard_library()
    if not path:
        raise DataError(f"data.path is empty: expected a file, a folder, or {STANDARD_LIBRARY}")
    root = Path(path).expanduser()
    if not os.path.exists(root):  # unlike Path.exists, returns False for a name that is too long
        raise DataError(_missing(root))
    if root.is_file():
        files: tuple[Path, ...] = (root.resolve(),)
    else:
        folder = _split_of_datasets(root.resolve())
        files = _files_of_dataset(folder) or tuple(_walk(folder))
        if not files:
            raise DataError(
                f"data.path={path}: found no text in this folder; expected files with the suffixes "
                f"{' '.join(READABLE_SUFFIXES)}"
            )
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"data.path={path}: no permission to read {file}; change its permissions")
    source = Source(root.resolve(), files, text_field)
    if source.size == 0:
        what = (
            "the file is empty" if root.is_file() else f"all files are empty ({counted(len(files), 'file')})"
        )
        raise DataError(f"data.path={path}: {what}")
    return source


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _EXCLUDED & set(path.relative_to(root).parts) and os.access(path, os.R_OK)
    ]
    if not files:
        raise DataError(
            f"found no source files of Python's standard library in {root}; "
            "use data.path=FILE or data.path=FOLDER"
        )
    return Source(root, tuple(files))


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"data.path={root}: cannot read {error.filename}: {error.strerror}; check the file")

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [
            Path(folder, name)
            for name in names
            if name.lower().endswith(READABLE_SUFFIXES) and not name.startswith(".")
        ]
    return iter(sorted(found))


def _split_of_datasets(root: Path) -> Path:
    """Return the training split's folder if `root` is a saved `datasets.DatasetDict`, else `root`."""
    if not (root / "dataset_dict.json").is_file():
        return root
    if not (root / "train").is_dir():
        splits = ", ".join(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        raise DataError(f"data.path={root} has no split named train; choose the folder of a split: {splits}")
    return root / "train"


def _files_of_dataset(folder: Path) -> tuple[Path, ...]:
    """Return the data files of a saved `datasets.Dataset` in order, or () for any other folder."""
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return ()
    # the folder may also contain cached results of `Dataset.map`, which state.json does not list
    try:
        found = json.loads(state.read_text())
        files = tuple(folder / each["filename"] for each in found["_data_files"])
        indices = found.get("_indices_data_files")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'{state} is damaged: expected JSON with "_data_files", a list of objects with "filename" '
            f"({type(error).__name__}: {error}); save the data set again"
        ) from None
    if indices:
        raise DataError(
            f"{state} has an index of selected rows, which is not supported; call flatten_indices() before save_to_disk"
        )
    for file in files:
        if not file.is_file():
            raise DataError(f"data.path={folder} is incomplete: {file.name} is missing; restore the file")
    return files


def _missing(path: Path) -> str:
    parent = path.parent
    while not os.path.exists(parent):
        parent = parent.parent
    names = [entry.name for entry in parent.iterdir()] if os.access(parent, os.R_OK) else []
    near = difflib.get_close_matches(path.name, names, n=1)
    nearest = f"; the nearest existing folder is {parent.resolve()}"
    hint = f"; did you mean {parent / near[0]}?" if near else nearest
    return f"data.path={path}: no such file or folder{hint}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an `OSError` in the `with` block to a `DataError` that names the file `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the file") from error


def _read(path: Path, text_field: str) -> Iterator[str]:
    if not path.name.lower().endswith(RECORD_SUFFIXES):
        return iter((_read_text(path),))
    return _texts(path, text_field)


def _texts(path: Path, text_field: str) -> Iterator[str]:
    for where, record in read_records(path, (text_field,)):
        text = record.get(text_field)
        if isinstance(text, str):
            yield text
        elif text is not None or text_field not in record:
            if text is not None:
                raise DataError(
                    f'{where}: expected text in field "{text_field}", found {type(text).__name__}; choose a field with '
                    "data.field=NAME"
                )
            raise DataError(
                f'{where}: expected text in field "{text_field}", found only {", ".join(record)}; choose a field with '
                "data.field=NAME"
            )


def _read_text(path: Path) -> str:
    """Return the text of a file, with invalid UTF-8 replaced by U+FFFD."""
    with reading(path):
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    replaced = text.count("\N{REPLACEMENT CHARACTER}") / max(1, len(text))
    if "\0" in text:
        raise DataError(f"{path} is not text: it contains NUL bytes; {_ACCEPTED}")
    if replaced > _MAX_INVALID_SHARE:
        raise DataError(
            f"{path} is not UTF-8 text: {replaced:.0%} of its characters are invalid; {_ACCEPTED}"
        )
    if replaced:
        try:
            path.read_text(encoding="utf-8")  # the file itself may contain the replacement character
        except UnicodeDecodeError as error:
            _warn_invalid(path, f"byte {error.start + 1}")
    return text


@cache  # warn only once, although a file is read several times
def _warn_invalid(path: Path, where: str) -> None:
    _log.warning(
        "farandole: %s, %s: invalid UTF-8 replaced by U+FFFD; convert or exclude the file", path, where
    )


def read_records(path: Path, fields: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for all records of a JSON lines, Parquet or Arrow file.

    The location is text for error messages, such as the path and the line number.

    Args:
        path: the file.
        fields: the columns to read from a Parquet or Arrow file; by default, all columns.  At least one column
            must exist.

    Raises:
        DataError: if the file is damaged, or a Parquet or Arrow file has none of the fields.
    """
    suffix = path.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return _read_parquet(path, fields)
    if suffix in ARROW_SUFFIXES:
        return _read_arrow(path, fields)
    return _read_json_lines(path)


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with reading(path), path.open("rb") as lines:
        for number, encoded in enumerate(lines, 1):
            if number == 1:
                encoded = encoded.removeprefix(codecs.BOM_UTF8)
            if not encoded.strip():
                continue
            try:
                line = encoded.decode()
            except UnicodeDecodeError:
                _warn_invalid(path, f"line {number}")
                line = encoded.decode(errors="replace")
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: expected JSON: {error}; correct the line") from None
            if _SURROGATE in line.lower() and (found := _surrogate(record)):
                raise DataError(
                    f"{path}, line {number}: expected text, found the unpaired surrogate {found!a}; correct the line"
                )
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, line {number}: expected a JSON object, found {type(record).__name__}; correct the line"
                )
            yield f"{path}, line {number}", record


_SURROGATE = "\\ud"
"""The start of an escaped surrogate in lower-case JSON."""


def _surrogate(record: Any) -> str:
    """Return the first unpaired surrogate in a record, or ""."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return str(error.object[error.start])
    return ""


def _read_parquet(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as arrow  # imported here, because the import takes a second and few users need it
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(path)
        columns = _columns(path, table.schema_arrow.names, fields)
        yield from _rows(path, table.iter_batches(columns=columns))
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, "a Parquet file", error) from None


def _read_arrow(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for all records of a file in Arrow's stream format or file format."""
    import pyarrow as arrow

    try:
        with arrow.memory_map(str(path)) as mapped:
            is_file = mapped.read(len(_ARROW_FILE)) == _ARROW_FILE
            mapped.seek(0)
            table = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(mapped).read_all()
        columns = _columns(path, table.schema.names, fields)
        yield from _rows(path, table.select(columns).to_batches())
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, "an Arrow file", error) from None


def _damaged(path: Path, kind: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())  # some of Arrow's messages have several lines
    return DataError(f"{path} cannot be read as {kind}: {reason}; restore or exclude the file")


def _columns(path: Path, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    found = [name for name in fields if name in names] if fields else list(names)
    if not found:
        wanted = " or ".join(f'"{field}"' for field in fields)
        raise DataError(
            f"{path}: expected a column {wanted}, found only {', '.join(names)}; choose a column with data.field=NAME"
        )
    return found


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    """Return `value` without null struct fields."""
    # all structs in a column have the same fields, so fields that a record does not have are null
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
