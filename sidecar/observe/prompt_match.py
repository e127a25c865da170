"""Where the chunks of a prompt are, and at which token it differs from what is cached: /match.

Owns the search for a prompt by its tokens. Does not own keys (`tiers/kv/keys.py`), nor the walk
over host memory (`host_contents.py`).

Invariants: nothing is changed. An answer has no tokens, only how many are equal, and compares with
chunks of the same cache salt alone: nobody can guess prompts of a tenant without its salt. Flags
are those of the shared index, so the answer is what an engine of that realm would find.
"""

import functools
import itertools
import json
from typing import Annotated, Any, Final

import anyio
import msgspec
import numpy as np
import numpy.typing as npt

from sidecar.core.directory import Chunk, SegmentState
from sidecar.observe.host_contents import HostContents, QueryError, describe
from sidecar.protocol import tenant_id
from sidecar.protocol.prompts import PromptOutcome
from sidecar.service.dispatcher import Dispatcher
from sidecar.sessions.namespaces import RealmLayout
from tiers.catalog.names import NAMESPACE_CHARACTERS
from tiers.kv.index import (
    ANYWHERE,
    FLAG_HOST,
    GONE_EVICTED,
    GONE_EXPIRED,
    GONE_QUOTA,
    tags_of,
)
from tiers.kv.keys import KeyChain, root_key
from tiers.kv.layout import ROW_ENCODING
from tiers.store.client import run_to_end

TOKENS_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = 8 * TOKENS_MAX
READS_AHEAD: Final = ("eagle", "eagle3", "mtp")
"""Drafters that read the token after a position, as in `connector/identity/speculative.py`."""
GONE: Final = {
    GONE_EVICTED: PromptOutcome.EVICTED,
    GONE_EXPIRED: PromptOutcome.EXPIRED,
    GONE_QUOTA: PromptOutcome.QUOTA,
}

Document = dict[str, Any]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PromptQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, as the body of a request in JSON."""

    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)]
    cache_salt: str = ""


def parse_question(body: bytes) -> PromptQuestion:
    """The question in a request's body. Raises `QueryError`."""
    try:
        return msgspec.json.decode(body, type=PromptQuestion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise QueryError(
            f'the body: {error}; send {{"tokens": [token ids], "cache_salt": "text"}}'
        ) from error


class PromptMatches:
    """Looks a prompt up in all realms of one dispatcher."""

    def __init__(self, dispatcher: Dispatcher, host: HostContents) -> None:
        self._dispatcher = dispatcher
        self._host = host
        self._thread = anyio.CapacityLimiter(1)

    async def document(self, body: bytes) -> Document:
        """What each realm has of the prompt in a body, the one with most of it first.

        Raises `QueryError`.
        """
        known = [realm for realm in self._dispatcher.realms.all() if _knows_tokens(realm)]
        found: list[Document] = []
        first: KeyChain | None = None
        async with self._host.lock:
            # A list of tokens takes several times the memory of its body.
            question = parse_question(body)
            for realm in known:
                # In a thread: a million tokens take tens of milliseconds. Cancelled queries keep
                # the lock until the thread ends; otherwise abandoned threads would pile up.
                work = functools.partial(_chain_of, realm, question, first)
                chain = await run_to_end(work, self._thread)
                first = first or chain
                if not realm.forgotten:
                    found.append(await self._match(realm, question, chain))
        found.sort(key=lambda one: -one["found_tokens"])
        return {"tokens": len(question.tokens), "realms": found}

    async def _match(
        self, realm: RealmLayout, question: PromptQuestion, chain: KeyChain
    ) -> Document:
        per_chunk, per_block = chain.chunk_tokens, chain.block_tokens
        full = len(chain.keys)
        flags = _flags(realm, chain.keys)
        leading = int(np.argmin(np.append(flags & ANYWHERE, 0) > 0))
        # Behind the full chunks, engines look for pieces of the next one, the longest first.
        blocks = min(chain.partial_blocks(leading), realm.blocks_per_chunk - 1)
        pieces = _flags(realm, [chain.partial(leading, n) for n in range(blocks, 0, -1)])
        best = next((n for n, flag in enumerate(pieces) if flag & ANYWHERE), None)
        found_tokens = leading * per_chunk
        runs = _runs(flags[:leading], 0, per_chunk)
        if best is not None:
            found_tokens += (blocks - best) * per_block
            runs.append({"end_tokens": found_tokens, "where": _where(int(pieces[best]))})
        runs += _runs(flags[leading:], leading, per_chunk)
        end_tokens = full * per_chunk + chain.partial_blocks(full) * per_block
        missed = [] if found_tokens >= end_tokens else chain.keys[leading : leading + 1]
        if not runs or runs[-1]["end_tokens"] < end_tokens:
            # The piece at the end of the prompt, which is not there.
            last = chain.partial(full, chain.partial_blocks(full))
            runs.append({"end_tokens": end_tokens, "where": _where(int(_flags(realm, [last])[0]))})
            missed = missed or [last]
        document = {
            **describe(realm.namespace_digest.hex()[:NAMESPACE_CHARACTERS], [realm]),
            "topology": realm.topology,
            "home": realm.indexed_in.realm_id,
            "attached": realm.realm_id in self._attached(),
            "chunk_tokens": per_chunk,
            "runs": _merged(runs),
            "found_tokens": found_tokens,
        }
        if missed:
            gone = self._dispatcher.engine.gone.since(realm.realm_id, missed[0])
            now = self._dispatcher.engine.lookups.now
            document["missed"] = missed[0].hex()
            document["missed_gone_seconds"] = None if gone is None else round(now - gone, 1)
            parent = chain.parent(leading)
            document |= await self._nearest(realm, parent, question, leading * per_chunk)
        return document

    async def _nearest(
        self, realm: RealmLayout, parent: bytes, question: PromptQuestion, first_token: int
    ) -> Document:
        """The chunk behind `parent` in host memory that begins most like the rest of a prompt."""
        chunk_tokens = realm.block_tokens * realm.blocks_per_chunk
        wanted = np.array(question.tokens[first_token : first_token + chunk_tokens], np.int32)
        tenant = tenant_id(question.cache_salt)
        best: tuple[int, int, Chunk] | None = None
        async for chunk in self._host.walk([realm]):
            if (chunk.parent, chunk.tenant) != (parent, tenant):
                continue
            if chunk.segments[0].state is not SegmentState.HOST:
                continue
            same, count = self._equal_tokens(realm, chunk, wanted)
            if best is None or same > best[0]:
                best = same, count, chunk
        if best is None or not best[0]:
            return {}
        same, count, chunk = best
        if same < min(count, len(wanted)):
            return {"nearest": chunk.key.hex(), "differs_at": first_token + same}
        # Equal tokens with another key: another adapter or image. Else one of them only ends.
        alike = count == len(wanted)
        return {"nearest": chunk.key.hex(), "differs_at": None} if alike else {}

    def _equal_tokens(
        self, realm: RealmLayout, chunk: Chunk, wanted: npt.NDArray[np.int32]
    ) -> tuple[int, int]:
        """How many of its first tokens are equal, and how many it has."""
        segment, templates = chunk.segments[0], realm.ranks[0].templates
        image = self._dispatcher.pool.memory[segment.slot : segment.slot + templates.slot_bytes]
        held = np.array(templates[segment.num_blocks].token_ids(image), dtype=np.int32)
        count = min(len(held), len(wanted))
        unequal = np.flatnonzero(held[:count] != wanted[:count])
        return int(unequal[0]) if len(unequal) else count, len(held)

    def _attached(self) -> set[int]:
        return {
            realm.realm_id
            for session in self._dispatcher.sessions.all()
            for realm in session.realms
        }


def _knows_tokens(realm: RealmLayout) -> bool:
    """Whether its keys are made of tokens, and a worker said how its slots are laid out.

    Recurrent layers keep a state in some places only, so where the others are says nothing.
    """
    if 0 not in realm.ranks or realm.ranks[0].layout.encoding == ROW_ENCODING:
        return False
    return "state" not in json.loads(realm.namespace)


def _chain_of(realm: RealmLayout, question: PromptQuestion, beside: KeyChain | None) -> KeyChain:
    """The keys of a prompt in a realm; the tokens are those of `beside`, if it is given."""
    drafter: Document = json.loads(realm.namespace).get("drafter", {})
    chain = KeyChain(
        root_key(realm.namespace_digest, salt=question.cache_salt),
        realm.block_tokens * realm.blocks_per_chunk,
        realm.block_tokens,
        beside=beside,
        ahead_tokens=int(drafter.get("method") in READS_AHEAD),
    )
    if beside is None:
        chain.extend(question.tokens)
    else:
        chain.follow()
    return chain


def _flags(realm: RealmLayout, keys: list[bytes]) -> npt.NDArray[np.uint8]:
    return realm.indexed_in.index.lookup(tags_of(keys, realm.index_salt))


def _runs(flags: npt.NDArray[np.uint8], first: int, chunk_tokens: int) -> list[Document]:
    """Runs of chunks with equal flags, from chunk `first` on."""
    if not len(flags):
        return []
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    return [
        {"end_tokens": (first + end) * chunk_tokens, "where": _where(int(flags[start]))}
        for start, end in itertools.pairwise((0, *edges.tolist(), len(flags)))
    ]


def _merged(runs: list[Document]) -> list[Document]:
    """The same, with neighbours that are alike as one."""
    merged: list[Document] = []
    for run in runs:
        if merged and merged[-1]["where"] == run["where"]:
            merged.pop()
        if run["end_tokens"]:
            merged.append(run)
    return merged


def _where(flags: int) -> str:
    if flags & ANYWHERE:
        return str(PromptOutcome.HOST if flags & FLAG_HOST else PromptOutcome.STORE)
    return str(GONE.get(flags, PromptOutcome.NEW))
