"""Digests of whole files: each version is read once, and the cache may be damaged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from connector.identity import file_digests
from connector.identity.file_digests import file_digest, file_stamp, read_all
from tests import places

CONTENT = os.urandom(100_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user whose files all settled long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places.patch(monkeypatch, "SETTLED_SECONDS", -3600)
    return tmp_path / "cache" / "kvlake"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    paths: list[Path] = []
    digest = file_digest

    def counted(path: Path, *options: Any) -> str:
        paths.append(path)
        return digest(path, *options)

    places.patch(monkeypatch, "file_digest", counted)
    return paths


def digests_of(paths: list[Path]) -> list[str]:
    """The digests of files as they are now, in their order."""
    stamps = [file_stamp(path) for path in paths]
    found = file_digests.digests_of(stamps)
    return [found[stamp] for stamp in stamps]


def write(path: Path, content: bytes = CONTENT) -> Path:
    path.write_bytes(content)
    return path


def test_a_file_is_read_once(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    one, other = write(tmp_path / "1"), write(tmp_path / "2", b"other")
    expected = [hashlib.sha256(content).hexdigest() for content in (CONTENT, b"other")]
    assert digests_of([one, other]) == digests_of([one, other]) == expected
    assert sorted(read) == [one, other]
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.promise("weights")
def test_a_changed_file_is_read_again(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    """Also if its size and modification time are the same."""
    path = write(tmp_path / "1")
    first = digests_of([path])
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"patched")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digests_of([path]) != first
    assert len(read) == 2
    assert cache.is_dir()


def test_a_file_changed_just_now_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "1")
    assert digests_of([path]) == digests_of([path])
    assert len(read) == 2


def test_of_processes_that_start_together_one_reads(
    tmp_path: Path, cache: Path, read: list[Path]
) -> None:
    path = write(tmp_path / "1")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(digests_of, [[path]] * 8))
    assert len({one for (one,) in found}) == 1
    assert len(read) == 1
    assert cache.is_dir()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff"])
def test_a_damaged_cache_is_ignored(
    tmp_path: Path, cache: Path, read: list[Path], content: bytes
) -> None:
    path = write(tmp_path / "1")
    first = digests_of([path])
    (cache / "weights.json").write_bytes(content)
    assert digests_of([path]) == digests_of([path]) == first
    assert len(read) == 2


def test_a_folder_that_others_may_write_is_not_trusted(
    tmp_path: Path, cache: Path, read: list[Path]
) -> None:
    path = write(tmp_path / "1")
    first = digests_of([path])
    place = cache / "weights.json"
    place.write_text(json.dumps(dict.fromkeys(json.loads(place.read_text()), "0" * 64)))
    cache.chmod(0o777)
    assert digests_of([path]) == first
    assert len(read) == 2


def test_a_cache_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file")))
    assert digests_of([tmp_path / "file"]) == [hashlib.sha256(CONTENT).hexdigest()]


def test_nothing_is_remembered_unless_asked(tmp_path: Path, cache: Path) -> None:
    assert read_all([file_stamp(write(tmp_path / "1"))])
    assert not cache.exists()


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter("123456789")

    def changed(path: Path) -> str:
        return f"0:0:7:0:{next(stamps)}:{path}"

    places.patch(monkeypatch, "file_stamp", changed)
    with pytest.raises(OSError, match="changed while it was read"):
        file_digest(write(tmp_path / "1"))
    with pytest.raises(OSError, match="changed before it was read"):
        digests_of([tmp_path / "1"])
    assert not (cache / "weights.json").exists()


def test_long_reads_are_logged(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places.patch(monkeypatch, "LONG_BYTES", 1)
    caplog.set_level("INFO", "vllm.kvlake")
    paths = [write(tmp_path / name, name.encode()) for name in "abc"]
    assert digests_of(paths) == [hashlib.sha256(name.encode()).hexdigest() for name in "abc"]
    assert "reading" in caplog.text
    assert "were read in" in caplog.text
    assert cache.is_dir()


def test_large_files_that_another_process_reads_are_waited_for_longer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all ranks reading, the one that is nearly done would be slowed."""
    places.patch(monkeypatch, "WAIT_SECONDS_MIN", 0.0)
    read = Mock()
    places.patch(monkeypatch, "_read_and_remember", read)
    cache.mkdir(mode=0o700, parents=True)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    stop = threading.Event()
    stop.set()
    with (cache / "weights.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(file_digests.ReadingStopped):
            file_digests.digests_of([file_stamp(path)], stop)
    assert not read.called
