"""Where the chunks of a prompt are, and at which token it differs from what is cached: /match.

Owns the search for a prompt by its tokens. Does not own keys (`tiers/kv/keys.py`), nor the walk
over host memory (`host_contents.py`).

Invariants: nothing is changed. An answer has no tokens, only how many are equal, and compares with
chunks of the same cache salt alone: nobody can guess prompts of a tenant without its salt. Flags
are those of the shared index, so the answer is what an engine of that realm would find.
"""

import itertools
from typing import Annotated, Any, Final

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

    async def document(self, question: PromptQuestion) -> Document:
        """What each realm has of a prompt, the one with most of it first."""
        known = [realm for realm in self._dispatcher.realms.all() if _knows_tokens(realm)]
        async with self._host.lock:
            found = [await self._match(realm, question) for realm in known]
        found.sort(key=lambda one: -one["found_tokens"])
        return {"tokens": len(question.tokens), "realms": found}

    async def _match(self, realm: RealmLayout, question: PromptQuestion) -> Document:
        about = describe(realm.namespace_digest.hex()[:NAMESPACE_CHARACTERS], [realm])
        chunk_tokens = realm.block_tokens * realm.blocks_per_chunk
        chain = KeyChain(
            root_key(realm.namespace_digest, salt=question.cache_salt),
            chunk_tokens,
            realm.block_tokens,
            ahead_tokens=int(about["about"].get("drafter", {}).get("method") in READS_AHEAD),
        )
        chain.extend(question.tokens)
        full = len(chain.keys)
        tails = [chain.partial(full, n) for n in range(chain.partial_blocks(full), 0, -1)]
        tags = tags_of([*chain.keys, *tails], realm.index_salt)
        flags = realm.indexed_in.index.lookup(tags)
        leading = int(np.argmin(np.append(flags[:full] & ANYWHERE, 0) > 0))
        runs = [
            {"end_tokens": end * chunk_tokens, "where": _where(int(flags[start]))}
            for start, end in itertools.pairwise(_edges(flags[:full]))
        ]
        tail = next((n for n in range(len(tails)) if flags[full + n] & ANYWHERE), None)
        found_tokens = leading * chunk_tokens
        if tail is not None and leading == full:
            found_tokens += (len(tails) - tail) * realm.block_tokens
            runs.append({"end_tokens": found_tokens, "where": _where(int(flags[full + tail]))})
        document = {
            **about,
            "topology": realm.topology,
            "attached": realm.realm_id in self._attached(),
            "chunk_tokens": chunk_tokens,
            "runs": runs,
            "found_tokens": found_tokens,
        }
        if leading < full:
            key = chain.keys[leading]
            gone = self._dispatcher.engine.gone.since(realm.realm_id, key)
            now = self._dispatcher.engine.lookups.now
            document["missed"] = key.hex()
            document["missed_gone_seconds"] = None if gone is None else round(now - gone, 1)
            document |= await self._nearest(realm, chain.parent(leading), question, found_tokens)
        return document

    async def _nearest(
        self, realm: RealmLayout, parent: bytes, question: PromptQuestion, first_token: int
    ) -> Document:
        """The chunk behind `parent` in host memory that begins most like the rest of a prompt."""
        chunk_tokens = realm.block_tokens * realm.blocks_per_chunk
        wanted = np.array(question.tokens[first_token : first_token + chunk_tokens], np.int32)
        tenant = tenant_id(question.cache_salt)
        best: tuple[int, Chunk] | None = None
        async for chunk in self._host.walk([realm]):
            if (chunk.parent, chunk.tenant) != (parent, tenant):
                continue
            if chunk.segments[0].state is not SegmentState.HOST:
                continue
            same = self._equal_tokens(realm, chunk, wanted)
            if best is None or same > best[0]:
                best = same, chunk
        if best is None or not best[0]:
            return {}
        same, chunk = best
        return {
            "nearest": chunk.key.hex(),
            # Equal tokens with another key: another adapter or image.
            "differs_at": None if same == len(wanted) else first_token + same,
        }

    def _equal_tokens(self, realm: RealmLayout, chunk: Chunk, wanted: npt.NDArray[np.int32]) -> int:
        segment, templates = chunk.segments[0], realm.ranks[0].templates
        image = self._dispatcher.pool.memory[segment.slot : segment.slot + templates.slot_bytes]
        held = np.array(templates[segment.num_blocks].token_ids(image), dtype=np.int32)
        count = min(len(held), len(wanted))
        unequal = np.flatnonzero(held[:count] != wanted[:count])
        return int(unequal[0]) if len(unequal) else count

    def _attached(self) -> set[int]:
        return {
            realm.realm_id
            for session in self._dispatcher.sessions.all()
            for realm in session.realms
        }


def _knows_tokens(realm: RealmLayout) -> bool:
    """Whether its keys are made of tokens, and a worker said how its slots are laid out."""
    return 0 in realm.ranks and realm.ranks[0].layout.encoding != ROW_ENCODING


def _edges(flags: npt.NDArray[np.uint8]) -> list[int]:
    """Where runs of equal flags begin, and the end."""
    if not len(flags):
        return []
    return [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]


def _where(flags: int) -> str:
    if flags & ANYWHERE:
        return str(PromptOutcome.HOST if flags & FLAG_HOST else PromptOutcome.STORE)
    return str(GONE.get(flags, PromptOutcome.NEW))
