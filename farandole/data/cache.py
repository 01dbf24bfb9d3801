"""A content-addressed disk cache for tokenized text.

An entry is a folder with data files and `entry.json`, which lists the sizes and checksums of the data files.  For
plain text, the data files are `tokenizer.json`, `train.bin` and `validation.bin`; the `.bin` files contain token
ids of 2 or 4 bytes.  The folder name is a hash of the text and the settings, so changed text or settings create a
new entry.  An entry is written under a temporary name, flushed and renamed, so every entry is complete.  A file
lock ensures that only one process per host builds an entry; all other processes wait, including processes of other
jobs.  If a process dies, the kernel releases its lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from farandole.data.errors import DataError
from farandole.data.sources import Source, reading
from farandole.data.wording import disk_failure

_log = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""The version of the format, increased with every change so that older entries are not used."""

FILES = ("tokenizer.json", "train.bin", "validation.bin")

Progress = Callable[[str, float], None]
"""A function called with the current activity and its completed fraction (0 to 1)."""


def default_cache() -> Path:
    """Return farandole's cache folder for the current user."""
    from platformdirs import user_cache_path

    return user_cache_path("farandole", appauthor=False)


def content_key(source: Source, settings: Mapping[str, object], progress: Progress) -> str:
    """Return the cache key (32 hexadecimal digits) for the text of `source` and these settings."""
    return entry_key(content_digest(source, progress), settings)


def entry_key(content: str, settings: Mapping[str, object]) -> str:
    """Return the cache key for the text digest `content` and these settings."""
    text = json.dumps([FORMAT_VERSION, content, settings], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def content_digest(source: Source, progress: Progress) -> str:
    """Return a digest of a source's field name, file names and file contents."""
    digest = hashlib.blake2b(source.field.encode())
    total, done = max(1, source.size), 0
    for path in source.files:
        name = path.relative_to(source.root) if path != source.root else Path(path.name)
        with reading(path), path.open("rb") as file:
            digest.update(f"\0{name.as_posix()}\0{path.stat().st_size}\0".encode())
            while block := file.read(1 << 20):
                digest.update(block)
                done += len(block)
                progress("reading text", done / total)
    return digest.hexdigest()


def cached_folder(
    cache: Path, key: str, build: Callable[[Path], None], files: Sequence[str] = FILES, *, path: str
) -> Path:
    """Return the folder of the cache entry `key`; build the entry first if it is missing or damaged.

    `build(folder)` must write `files` to `folder`.  `path` is the path of the text, for a log message.

    Raises:
        DataError: if the cache cannot be written or the disk is full.
    """
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            damage = _find_damage(folder, files)
            if damage is None:
                return folder
            if folder.exists():
                _log.warning(
                    "farandole: cached tokens in %s are damaged (%s); rebuilding them", folder, damage
                )
                shutil.rmtree(folder)
            for partial in cache.glob(f"{key}.*.tmp"):  # left by a killed process
                shutil.rmtree(partial)
            _log.info("reading and tokenizing %s (once; stored in %s)", path, folder)
            _write(folder, build, files)
    except OSError as error:
        raise DataError(
            f"cannot write tokens to {cache}: {disk_failure(error, cache)}; choose another folder with data.cache=FOLDER"
        ) from error
    return folder


def _find_damage(folder: Path, files: Sequence[str]) -> str | None:
    try:
        recorded = json.loads((folder / "entry.json").read_text())
        for name in files:
            size, checksum = recorded[name]
            if (folder / name).stat().st_size != size:
                return f"the size of {name} has changed"
            if _checksum(folder / name) != checksum:
                return f"the content of {name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return "entry.json cannot be read"
    return None


def _write(folder: Path, build: Callable[[Path], None], files: Sequence[str]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        build(temporary)
        recorded = {name: [(temporary / name).stat().st_size, _checksum(temporary / name)] for name in files}
        (temporary / "entry.json").write_text(json.dumps(recorded))
        for name in (*files, "entry.json"):
            flush(temporary / name)
        temporary.chmod(0o755)
        temporary.rename(folder)
        flush(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def flush(path: Path) -> None:
    """Flush a file or a folder to disk with `fsync`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems cannot flush a folder.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
