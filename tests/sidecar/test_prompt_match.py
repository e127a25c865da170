"""`kvlake explain --prompt`: a prompt looked up chunk by chunk, by its tokens."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.observe.host_contents import QueryError
from sidecar.observe.prompt_match import parse_question
from sidecar.protocol import Outcome, StoreChunk, StoreJob, tenant_id
from tests.sidecar.client import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    NAMESPACE,
    RunningSidecar,
    Worker,
    config_in,
)
from tiers.kv.keys import KeyChain, root_key

pytestmark = pytest.mark.promise("prompt-match")

CHUNK = BLOCK_TOKENS * BLOCKS_PER_CHUNK
PROMPT = list(range(1000, 1000 + 4 * CHUNK + 2 * BLOCK_TOKENS + 3))
CACHED = 4 * CHUNK + 2 * BLOCK_TOKENS
WIDE = json.dumps({"model": "tests/tiny", "dtype": "float32"}).encode()


def store(
    worker: Worker,
    tokens: list[int],
    *,
    salt: str = "",
    lora: str = "",
    namespace: bytes = NAMESPACE,
    ttl_ms: int = 0,
) -> KeyChain:
    """Store the chunks of a prompt, its tail among them, under the keys that the connector uses."""
    root = root_key(hashlib.sha256(namespace).digest(), salt=salt, lora=lora)
    chain = KeyChain(root, CHUNK, BLOCK_TOKENS)
    chain.extend(tokens)
    tail = chain.partial_blocks(len(chain.keys))
    for index in range(len(chain.keys) + (tail > 0)):
        blocks = BLOCKS_PER_CHUNK if index < len(chain.keys) else tail
        job_id = len(worker.done) + 1
        one = StoreChunk(
            chain.key_of(index, blocks),
            chain.parent(index),
            chain.tokens(index, blocks),
            list(range(blocks)),
            tenant_id(salt),
        )
        worker.submit(stores=[StoreJob(job_id, [one], ttl_ms)])
        assert worker.outcome(job_id) is Outcome.OK
    return chain


class Explained:
    """Runs `kvlake explain --prompt` against a sidecar."""

    def __init__(self, url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self._file, self._capsys = url, folder / "prompt", capsys

    def __call__(self, prompt: object, *words: str, code: int = 0) -> str:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        self._file.write_text(text)
        ended = main(["explain", "--prompt", str(self._file), "--url", self.url, *words])
        told = self._capsys.readouterr()
        assert ended == code, told.err
        return told.err if code else told.out

    def realms(self, prompt: object) -> list[dict[str, Any]]:
        realms: list[dict[str, Any]] = json.loads(self(prompt, "--json"))["realms"]
        return realms


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with RunningSidecar(config_in(short_directory)) as sidecar:
        yield sidecar


@pytest.fixture
def explain(
    sidecar: RunningSidecar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Explained:
    return Explained(sidecar.info.http_url, tmp_path, capsys)


def test_a_prompt_that_is_cached(sidecar: RunningSidecar, explain: Explained) -> None:
    assert "no engine has attached yet" in explain(PROMPT)
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT)
        (realm,) = explain.realms(PROMPT)
        assert realm["runs"] == [{"end_tokens": CACHED, "where": "host"}]
        assert (realm["found_tokens"], realm["attached"]) == (CACHED, True)
        assert "missed" not in realm
        text = explain({"prompt": PROMPT, "max_tokens": 1})
        assert f"{CACHED} of {len(PROMPT)} tokens cached" in text
        assert "computed: no chunk can hold them" in text
        # Shorter than a block.
        (realm,) = explain.realms(PROMPT[: BLOCK_TOKENS - 1])
        assert (realm["runs"], realm["found_tokens"]) == ([], 0)
    sidecar.wait_until(lambda now: not now["sessions"])
    (realm,) = explain.realms(PROMPT)
    assert not realm["attached"]


@pytest.mark.parametrize("place", [0, 1, CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 7])
def test_the_token_where_a_prompt_differs(
    sidecar: RunningSidecar, explain: Explained, place: int
) -> None:
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT)
        other = PROMPT.copy()
        other[place] = 7
        (realm,) = explain.realms(other)
        whole = place // CHUNK * CHUNK
        assert realm["found_tokens"] == whole
        # Nothing begins like a chunk that differs from its first token on.
        expected = place if place % CHUNK else None
        assert realm.get("differs_at") == expected
        if expected is not None:
            assert f"differs from a cached one at token {place}" in explain(other)
        assert realm["runs"][-1] == {"end_tokens": CACHED, "where": "new"}


def test_the_nearest_of_several_prompts(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path) as worker:
        for length in (3, 40, 21):
            tokens = PROMPT[: CHUNK + length] + [9] * (CHUNK - length)
            chain = store(worker, tokens)
            if length == 40:
                nearest = chain.keys[1]
        (realm,) = explain.realms(PROMPT)
        assert (realm["differs_at"], realm["nearest"]) == (CHUNK + 40, nearest.hex())


def test_a_piece_of_the_first_chunk_that_is_missing(
    sidecar: RunningSidecar, explain: Explained
) -> None:
    """As engines find it: an earlier turn ended in the middle of that chunk."""
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT[: CHUNK + 2 * BLOCK_TOKENS])
        (realm,) = explain.realms(PROMPT)
        assert realm["found_tokens"] == CHUNK + 2 * BLOCK_TOKENS
        assert "nearest" not in realm, "the cached one only ends there"
        assert realm["runs"] == [
            {"end_tokens": CHUNK + 2 * BLOCK_TOKENS, "where": "host"},
            {"end_tokens": CACHED, "where": "new"},
        ]
        other = PROMPT.copy()
        other[CHUNK + 20] = 7
        (realm,) = explain.realms(other)
        # Its first block.
        assert (realm["found_tokens"], realm["differs_at"]) == (CHUNK, CHUNK + 20)


def test_the_end_of_a_prompt(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path) as worker:
        short = PROMPT[: 2 * BLOCK_TOKENS + 1]
        (realm,) = explain.realms(short)
        assert realm["runs"] == [{"end_tokens": 2 * BLOCK_TOKENS, "where": "new"}]
        store(worker, PROMPT)
        other = PROMPT.copy()
        other[4 * CHUNK + 5] = 7
        (realm,) = explain.realms(other)
        assert (realm["found_tokens"], realm["differs_at"]) == (4 * CHUNK, 4 * CHUNK + 5)
        assert realm["runs"] == [
            {"end_tokens": 4 * CHUNK, "where": "host"},
            {"end_tokens": CACHED, "where": "new"},
        ]


def test_recurrent_layers_are_left_out(sidecar: RunningSidecar, explain: Explained) -> None:
    namespace = json.dumps({"model": "tests/tiny", "state": {}}).encode()
    with Worker(sidecar.path, namespace=namespace):
        assert explain.realms(PROMPT) == []


def test_another_cache_salt(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT, salt="secret")
        # Nobody can guess the prompts of a tenant without its salt.
        (realm,) = explain.realms(PROMPT)
        assert (realm["found_tokens"], "nearest" in realm) == (0, False)
        (realm,) = explain.realms({"prompt": PROMPT, "cache_salt": "other"})
        assert (realm["found_tokens"], "nearest" in realm) == (0, False)
        (realm,) = explain.realms({"prompt": PROMPT, "cache_salt": "secret"})
        assert realm["found_tokens"] == CACHED


def test_another_adapter(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT, lora="files of an adapter")
        (realm,) = explain.realms(PROMPT)
        assert (realm["found_tokens"], realm["differs_at"]) == (0, None)
        assert "another adapter or image" in explain(PROMPT)


def test_another_dtype(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path, namespace=WIDE, engine_id="wide") as wide:
        store(wide, PROMPT, namespace=WIDE)
    sidecar.wait_until(lambda now: not now["sessions"])
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT[:CHUNK])
        text = explain(PROMPT)
    first, second = text.split("\n\n")
    assert f"{CHUNK} of {len(PROMPT)} tokens cached" in first
    assert f"{CACHED} of {len(PROMPT)} tokens cached" in second
    assert 'it differs from the first in dtype ("float16", "float32")' in second


def test_chunks_that_left(sidecar: RunningSidecar, explain: Explained) -> None:
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT[: 2 * CHUNK])
        store(worker, PROMPT[: 3 * CHUNK], ttl_ms=50)
        sidecar.wait_until(lambda _: _expired(explain))
        (realm,) = explain.realms(PROMPT)
        assert realm["runs"][-2:] == [
            {"end_tokens": 3 * CHUNK, "where": "expired"},
            {"end_tokens": CACHED, "where": "new"},
        ]
        assert realm["missed_gone_seconds"] >= 0
        assert "the first one left the cache" in explain(PROMPT)


def _expired(explain: Explained) -> bool:
    (realm,) = explain.realms(PROMPT)
    return any(run["where"] == "expired" for run in realm["runs"])


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "it has 0 tokens"),
        ([1, "a"], "'a' is no token id"),
        ([1, -2], "-2 is no token id"),
        ([True], "True is no token id"),
        ("", "there is no prompt in it"),
        ({"model": "m"}, "there is no prompt in it"),
        ({"prompt": [1], "cache_salt": 3}, "cache_salt=3"),
    ],
)
def test_files_that_are_no_prompt(explain: Explained, prompt: object, said: str) -> None:
    assert said in explain(prompt, code=2)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--prompt", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert main(["explain", "request", "--prompt", "/nowhere"]) == 2
    assert "not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "body"),
        (b"[]", "expected `object`"),
        (b"{}", "tokens"),
        (b'{"tokens": []}', "tokens"),
        (b'{"tokens": [1, "a"]}', "tokens[1]"),
        (b'{"tokens": [-1]}', "tokens[0]"),
        (b'{"tokens": [4294967296]}', "tokens"),
        (b'{"tokens": [1], "salt": "a"}', "salt"),
        (b'{"tokens": [1], "cache_salt": "\xff"}', "utf-8"),
    ],
)
def test_bodies_that_are_no_question(body: bytes, said: str) -> None:
    with pytest.raises(QueryError, match="the body: ") as refused:
        parse_question(body)
    assert said.lower() in str(refused.value).lower()


class _DoubleOfVllmServer(BaseHTTPRequestHandler):
    """Answers as vLLM's `/tokenize`; `tests/e2e` asks a real one."""

    answers: dict[str, Any]
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps(self.answers).encode()
        self.send_response(200 if "tokens" in self.answers else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_DoubleOfVllmServer, "answers", {"tokens": PROMPT}, raising=False)
    monkeypatch.setattr(_DoubleOfVllmServer, "asked", [], raising=False)
    with HTTPServer(("127.0.0.1", 0), _DoubleOfVllmServer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_text_and_messages(sidecar: RunningSidecar, explain: Explained, engine: str) -> None:
    with Worker(sidecar.path) as worker:
        store(worker, PROMPT)
        assert f"{CACHED} of {len(PROMPT)}" in explain("some text\n", "--engine", engine)
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        assert f"{CACHED} of {len(PROMPT)}" in explain(chat, "--engine", engine)
    del chat["stream"]
    assert _DoubleOfVllmServer.asked == [{"prompt": "some text\n"}, chat]


def test_an_engine_that_refuses_or_is_not_there(
    explain: Explained, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_DoubleOfVllmServer, "answers", {"error": "no such model"})
    assert "answered 400" in explain("text", "--engine", engine, code=1)
    assert "--engine" in explain("text", "--engine", "http://127.0.0.1:1", code=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = threading.Thread(target=_answer_as_ssh, args=(other,))
        answer.start()
        port = other.getsockname()[1]
        said = explain("text", "--engine", f"http://127.0.0.1:{port}", code=1)
        answer.join()
    assert "is that a vLLM server?" in said


def _answer_as_ssh(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_standard_input(
    explain: Explained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(PROMPT)))
    assert main(["explain", "--prompt", "-", "--url", explain.url]) == 0
    assert "no engine has attached yet" in capsys.readouterr().out


def test_drafters_that_read_ahead(sidecar: RunningSidecar, explain: Explained) -> None:
    namespace = json.dumps({"model": "tests/tiny", "drafter": {"method": "eagle3"}}).encode()
    root = root_key(hashlib.sha256(namespace).digest())
    chain = KeyChain(root, CHUNK, BLOCK_TOKENS, ahead_tokens=1)
    chain.extend(PROMPT)
    with Worker(sidecar.path, namespace=namespace) as worker:
        chunk = StoreChunk(
            chain.keys[0], chain.parent(0), chain.tokens(0, BLOCKS_PER_CHUNK), list(range(4))
        )
        worker.submit(stores=[StoreJob(1, [chunk])])
        assert worker.outcome(1) is Outcome.OK
        (realm,) = explain.realms(PROMPT)
        assert realm["found_tokens"] == CHUNK
