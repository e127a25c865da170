"""Hits from a folder, and a folder that lies or is full. Buckets are in `test_store_buckets.py`.

One engine; sidecars with empty memory and other stores take turns on its sockets. A request
always ends, and gives what the engine gives for as many cached tokens.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    Measured,
    Oracle,
    blocks_of,
    check_equal,
    check_told,
    chunk_tokens,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    told,
    words,
)
from tests.e2e.chains import QUARANTINE, in_folder
from tests.e2e.store_cluster import _store, again, chunks_of, cluster, engine, listed
from tests.harness.engine import EngineProcess
from tests.harness.sidecars import SidecarProcess
from tiers.kv.arrow_file import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

__all__ = ["engine"]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-store"),
]


@pytest.mark.promise("full-attention", "llama", "store-hit")
@pytest.mark.parametrize("tokens", [3000, CHUNK_TOKENS + 1])
def test_folder_serves_an_empty_sidecar(folder: Path, engine: EngineProcess, tokens: int) -> None:
    call = Call(words(tokens, tokens))
    place = folder / f"store-{tokens}"
    place.mkdir()
    store = {"url": f"file://{place}", "prefix": "team/kv"}
    with cluster(folder, engine, store) as sidecar:
        expected = own_hit(engine, call, before=[call])
    chunks = chunks_of(tokens, chunk_tokens(engine))
    assert len(list((place / "team" / "kv").rglob("??/*/*.arrow"))) >= chunks
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks)
        cached_tokens, metrics = expected.generation.cached_tokens, told(engine)
        check_equal(again(engine, call, expected.salt), expected)
        check_told(engine, metrics, store=cached_tokens)
        counted = counters(sidecar)
        assert counted["chunks_read"] == counted["lookups"] * chunks
        # Now it is in host memory, and is not read twice.
        metrics = told(engine)
        check_equal(again(engine, call, expected.salt), expected)
        check_told(engine, metrics, host=cached_tokens)
        assert counters(sidecar)["chunks_read"] == counted["chunks_read"]


def test_head_in_the_engine_middle_in_host_tail_in_the_store(
    folder: Path, engine: EngineProcess
) -> None:
    """One request puts together what three tiers hold."""
    prompt = words(1500, 1)
    calls = [Call(prompt[: end + 1], max_tokens=1) for end in (CHUNK_TOKENS, 3 * CHUNK_TOKENS)]
    call = Call(prompt)
    place = folder / "three-tiers"
    place.mkdir()
    store = {"url": f"file://{place}"}
    with cluster(folder, engine, store) as sidecar:
        expected = own_hit(engine, call, before=[*calls, call])
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(1500, chunk_tokens(engine)))
        # Reads the first three chunks to host memory; the engine keeps one of them.
        for one in reversed(calls):
            empty(engine)
            engine.generate(one.prompt, max_tokens=1, cache_salt=expected.salt)
        assert counters(sidecar)["chunks_read"] == 3 * CHUNK_TOKENS // chunk_tokens(engine)
        metrics = told(engine)
        generation = engine.generate(call.prompt, cache_salt=expected.salt)
        check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
        assert counters(sidecar)["chunks_read"] == chunks_of(1500, chunk_tokens(engine))
        in_store_tokens = generation.cached_tokens - 3 * CHUNK_TOKENS
        check_told(engine, metrics, host=2 * CHUNK_TOKENS, store=in_store_tokens)


def check_only_written(sidecar: SidecarProcess) -> None:
    """Its store works, since chunks are written. Nothing is looked for, listed or read there."""
    sidecar.wait("everything ended", idle)
    status = sidecar.status()
    assert status["counters"]["chunks_written"] > 0
    assert (status["counters"]["chunks_read"], status["counters"]["lookups"]) == (0, 0)
    store = _store(status)
    assert (store["listings"], store["chunks"], store["catalog"]["files_read"]) == (0, 0, 0)
    assert [store["verbs"][verb]["calls"] for verb in ("list", "read")] == [0, 0]


def test_store_that_is_only_read_or_only_written(folder: Path, engine: EngineProcess) -> None:
    call, chunks = Call(words(600, 2)), chunks_of(600, chunk_tokens(engine))
    place = folder / "one-way"
    place.mkdir()
    url = {"url": f"file://{place}"}
    with cluster(folder, engine, {**url, "read": "off"}) as sidecar:
        expected = own_hit(engine, call, before=[call])
        check_only_written(sidecar)
        assert counters(sidecar)["chunks_written"] >= chunks
    assert len(list(place.rglob("??/*/*.arrow"))) >= chunks
    with cluster(folder, engine, {**url, "read": "off"}) as sidecar:
        assert again(engine, call, expected.salt).generation.cached_tokens == 0
        engine.generate(words(600, 4), cache_salt=fresh_salt())
        check_only_written(sidecar)
    with cluster(folder, engine, {**url, "write": "off"}) as sidecar:
        listed(sidecar, chunks)
        files = len(list(place.rglob("??/*/*.arrow")))
        check_equal(again(engine, call, expected.salt), expected)
        engine.generate(words(600, 3), cache_salt=fresh_salt())
        sidecar.wait("everything ended", idle)
    assert len(list(place.rglob("??/*/*.arrow"))) == files


# --- damage --------------------------------------------------------------------------------------


def _payload_end(path: Path) -> int:
    """Where an object's payload, whole blocks, ends; what follows is shorter than a block."""
    block_bytes = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    return PAGE_BYTES + (path.stat().st_size - PAGE_BYTES) // block_bytes * block_bytes


def _token_ids(path: Path) -> int:
    """Where an object's token ids begin: behind its key, its parent's and a checksum."""
    key = bytes.fromhex(path.parent.name)
    return path.read_bytes().index(key) + 2 * KEY_BYTES + CHECKSUM_BYTES


def _change_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _swap_in(path: Path, other: Path) -> None:
    """Another chunk under this name: intact, and of the same namespace, but not this one."""
    shutil.copyfile(other, path)


DAMAGE: Final[dict[str, Callable[[Path, Path], None]]] = {
    "payload": lambda path, _: _change_byte(path, PAGE_BYTES + 12_345),
    "last payload byte": lambda path, _: _change_byte(path, _payload_end(path) - 1),
    "header": lambda path, _: _change_byte(path, 40),
    "footer": lambda path, _: _change_byte(path, path.stat().st_size - 30),
    "token ids": lambda path, _: _change_byte(path, _token_ids(path)),
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, _: os.truncate(path, 0),
    "longer": lambda path, _: os.truncate(path, path.stat().st_size + 1),
    "another chunk": _swap_in,
}
HARMLESS: Final = ("header", "footer", "longer")
"""Around row and payload, which are right and read."""


@pytest.mark.nightly
def test_damaged_objects_are_never_served(folder: Path, engine: EngineProcess) -> None:
    """A read finds each whose bytes are wrong: the run ends before it, and it is moved aside."""
    place = folder / "damaged"
    place.mkdir()
    store = {"url": f"file://{place}"}
    oracles = {
        name: Oracle(engine, Call(words(700, 50 + i)))
        for i, name in enumerate([*DAMAGE, "gone", "intact"])
    }
    salts: dict[str, str] = {}
    paths: dict[str, Path] = {}
    with cluster(folder, engine, store) as sidecar:
        # What the engine attached with is still being written, and counts for none of them.
        empty(engine)
        sidecar.wait("nothing is to be written", idle)
        for name, oracle in oracles.items():
            before = in_folder(place)
            salts[name] = own_hit(engine, oracle.call, before=[oracle.call]).salt
            empty(engine)
            sidecar.wait("everything is written", idle)
            (chain,) = in_folder(place).since(before).chains()
            paths[name] = chain[1]
    chunk = chunk_tokens(engine)
    for name, damage in DAMAGE.items():
        damage(paths[name], paths["intact"])
    (paths["intact"].parent / "notes.arrow").write_text("not ours")
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(700, chunk) * len(oracles))
        paths["gone"].unlink()
        for name, oracle in oracles.items():
            empty(engine)
            generation = engine.generate(oracle.call.prompt, cache_salt=salts[name])
            whole = name in (*HARMLESS, "intact")
            cached = 700 // BLOCK_TOKENS * BLOCK_TOKENS if whole else chunk
            assert generation.cached_tokens == cached, name
            oracle.check(generation)
        counted = counters(sidecar)
        bad = DAMAGE.keys() - HARMLESS
        assert counted["reads_corrupt"] == counted["quarantined_store"] == len(bad)
    # What was computed instead went to the store under the same names; the bad ones are aside.
    aside = list((place / QUARANTINE).rglob("*.arrow"))
    assert {path.name for path in aside} == {path.name for path in paths.values()}
    assert {path.parent.name for path in aside} == {paths[name].parent.name for name in bad}
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(700, chunk) * len(oracles))
        for name, oracle in oracles.items():
            empty(engine)
            generation = engine.generate(oracle.call.prompt, cache_salt=salts[name])
            assert generation.cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS, name
            # Computed behind a cached chunk, its KV is rounded otherwise than the oracle's.
            oracle.check_close(generation)
        assert counters(sidecar)["reads_corrupt"] == 0


# --- a folder that takes nothing more ------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(place: Path) -> Generator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_folder(folder: Path, engine: EngineProcess) -> None:
    place = folder / "small-disk"
    place.mkdir()

    def make_room(sidecar: SidecarProcess) -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)

    with _small_disk(place):
        _check_full(folder, engine, place, lambda sidecar: None, make_room)
        assert not list(place.rglob("*.tmp"))


def test_folder_that_takes_no_large_file(folder: Path, engine: EngineProcess) -> None:
    """As a file size limit or a quota does it; needs no privilege to set up."""
    place = folder / "no-large-file"
    place.mkdir()

    def limit(size_bytes: int) -> Callable[[SidecarProcess], None]:
        def apply(sidecar: SidecarProcess) -> None:
            assert sidecar.process is not None
            _, hard = resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

        return apply

    size_bytes = chunk_tokens(engine) * KV_BYTES_PER_TOKEN * 2 // 3
    _check_full(folder, engine, place, limit(size_bytes), limit(resource.RLIM_INFINITY))
    assert not list(place.rglob("*.tmp"))


def _check_full(
    folder: Path,
    engine: EngineProcess,
    place: Path,
    fill: Callable[[SidecarProcess], None],
    make_room: Callable[[SidecarProcess], None],
) -> None:
    call, later = Call(words(3000, 4)), Call(words(1000, 5))
    store = {"url": f"file://{place}", "breaker": {"pause_max": "1s"}}
    with cluster(folder, engine, store) as sidecar:
        fill(sidecar)
        # Neither the requests nor the host tier feel it.
        expected = own_hit(engine, call, before=[call])
        sidecar.wait("writes fail", lambda status: status["counters"]["writes_failed"] > 0)
        check_equal(again(engine, call, expected.salt), expected)
        sidecar.wait("writing pauses", lambda status: _store(status)["writes"] != "closed")
        assert _store(sidecar.status())["reads"] == "closed", "what is there can be read"
        # The state is that of the last probe, whose few bytes may still fit.
        assert _store(sidecar.status())["verbs"]["write"]["failures"]
        assert "object store unavailable" in sidecar.log_path.read_text()
        make_room(sidecar)
        sidecar.wait("it is well", lambda status: _store(status)["state"] == "ok")
        written = counters(sidecar)["chunks_written"]
        salt = own_hit(engine, later, before=[later]).salt
        sidecar.wait("everything ended", idle)
        chunks = chunks_of(1000, chunk_tokens(engine))
        assert counters(sidecar)["chunks_written"] >= written + chunks
    with cluster(folder, engine, {"url": f"file://{place}"}) as sidecar:
        listed(sidecar, chunks)
        assert again(engine, later, salt).generation.cached_tokens == 992
