"""What KV memory must hold: a function of the tokens, of who asks, and of the place in the model.

Owns the geometry of the simulated models, the content of every token, and the record of what each
key must hold (`Truth`), which is made from tokens and never from bytes that kvlake moved.

Invariant: two keys that are equal have equal content, or the record refuses: tenants, weights and
models never share a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from connector.identity.groups import Attention, Geometry, chunk_tokens_of
from tests.simulation.clock import Violation
from tiers.kv.keys import KeyChain, root_key
from tiers.kv.layout import ChunkLayout, KVLayout, Segment
from tiers.kv.slot_image import SlotTemplates

Words = npt.NDArray[np.uint64]

LAYERS = 2
WINDOW_LAYERS = 1
HEADS = 2
BLOCK_TOKENS = 4
CHUNK_TOKENS = 16
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how it is cut: what makes a realm.

    For a model of several KV cache groups: the first group; the others lie over it.
    """

    name: str
    ranks: int
    words: int
    """Content of one (layer, head, token), in 8-byte words."""
    layer_major: bool
    layers: int = LAYERS
    window: int = 0
    """Tokens that its layers read, their own included; 0: all of them."""
    others: tuple[Model, ...] = ()

    @property
    def groups(self) -> tuple[Model, ...]:
        """Its KV cache groups, in the order of their numbers."""
        return (self, *self.others)

    @property
    def geometry(self) -> Geometry:
        """Tokens per block and chunk, and how far back its layers read."""
        attention = Attention(self.window)
        tokens = chunk_tokens_of(CHUNK_TOKENS, BLOCK_TOKENS, attention)
        return Geometry(BLOCK_TOKENS, tokens, attention)

    @property
    def namespace(self) -> bytes:
        return f'{{"model":"{self.name}"}}'.encode()

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.namespace).digest()

    @property
    def topology(self) -> str:
        return f"tp{self.ranks}"

    def segment(self, rank: int) -> Segment:
        heads = HEADS // self.ranks
        return Segment(0, self.layers, rank * heads, heads)

    def kv_layout(self, rank: int, num_blocks: int) -> KVLayout:
        segment = self.segment(rank)
        content = self.words * 8
        page = segment.num_heads * BLOCK_TOKENS * content
        layer_step, block_step = (num_blocks * page, page) if self.layer_major else (page, 0)
        block_step = block_step or LAYERS * page
        shape = (num_blocks, segment.num_heads, BLOCK_TOKENS, content)
        strides = (block_step, BLOCK_TOKENS * content, content, 1)
        return KVLayout.from_views(
            segment,
            [(layer * layer_step, shape, strides) for layer in range(self.layers)],
            itemsize=1,
            dtype="uint8",
            encoding="simulated",
            size_bytes=num_blocks * LAYERS * page,
        )

    def chunk_layout(self, rank: int) -> ChunkLayout:
        return self.kv_layout(rank, 1).chunk(self.geometry.blocks_per_chunk)

    def view(self, memory: npt.NDArray[np.uint8], rank: int) -> Words:
        """A worker's memory as [block, layer, head, token, word]."""
        heads = self.segment(rank).num_heads
        words: Words = memory.view(np.uint64)
        if self.layer_major:
            shaped = words.reshape(LAYERS, -1, heads, BLOCK_TOKENS, self.words)
            return shaped.transpose(1, 0, 2, 3, 4)[:, : self.layers]
        return words.reshape(-1, LAYERS, heads, BLOCK_TOKENS, self.words)[:, : self.layers]

    def expand(self, digests: Words, rank: int) -> Words:
        """Content of tokens, [token, layer, head, word], from their digests."""
        segment = self.segment(rank)
        places = np.arange(self.layers * HEADS * self.words, dtype=np.uint64)
        factors = (places * np.uint64(2) + np.uint64(1)).reshape(self.layers, HEADS, self.words)
        own = factors[:, segment.first_head : segment.first_head + segment.num_heads]
        content: Words = digests[:, np.newaxis, np.newaxis, np.newaxis] * own[np.newaxis]
        return content

    def blocks(self, digests: Words, rank: int) -> Words:
        """The same as [block, layer, head, token, word]: digests of whole blocks."""
        content = self.expand(digests, rank)
        shaped = content.reshape(-1, BLOCK_TOKENS, *content.shape[1:])
        return np.ascontiguousarray(shaped.transpose(0, 2, 3, 1, 4))

    def image(self, key: bytes, fact: Fact, rank: int) -> npt.NDArray[np.uint8]:
        """The object that another cluster would have written for a key."""
        template = templates_of(self, rank)[fact.num_blocks]
        image = np.zeros(template.image_bytes, dtype=np.uint8)
        template.prepare(image)
        template.payload(image)[:] = self.blocks(fact.digests, rank).view(np.uint8).ravel()
        template.seal(image, key, fact.parent, fact.token_ids)
        return image


def with_window(model: Model, window: int) -> Model:
    """The model with a second group, whose layers read a window and lie over the first's."""
    name = f"{model.name} behind {window}"
    second = replace(model, name=name, layers=WINDOW_LAYERS, window=window)
    return replace(model, others=(second,))


_templates: dict[tuple[str, int, int], SlotTemplates] = {}


def templates_of(model: Model, rank: int) -> SlotTemplates:
    """The templates of one rank; the sidecar makes its own."""
    name = (model.name, model.ranks, rank)
    if name not in _templates:
        _templates[name] = SlotTemplates(model.chunk_layout(rank), model.digest)
    return _templates[name]


class TokenDigests:
    """A digest of each token of a growing sequence and of all tokens before it."""

    def __init__(self, owner: str) -> None:
        self._hasher = hashlib.blake2b(owner.encode(), digest_size=8)
        self._digests: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> Words:
        for token in tokens[len(self._digests) :]:
            self._hasher.update(token.to_bytes(4, "little"))
            self._digests.append(int.from_bytes(self._hasher.digest(), "little"))
        return np.array(self._digests[: len(tokens)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Fact:
    """What a key must hold."""

    owner: str
    parent: bytes
    token_ids: bytes
    digests: Words

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // BLOCK_TOKENS


class Truth:
    """Key to content, from tokens."""

    def __init__(self) -> None:
        self.facts: dict[bytes, Fact] = {}
        self.keys: list[bytes] = []
        self.numbers: dict[bytes, int] = {}
        """Places of the keys in `keys`."""

    def learn(
        self, key: bytes, owner: str, parent: bytes, token_ids: bytes, digests: Words
    ) -> Fact:
        """Note what `key` holds for `owner`: model, salt and weights."""
        fact = Fact(owner, parent, token_ids, digests)
        known = self.facts.setdefault(key, fact)
        if key not in self.numbers:
            self.numbers[key] = len(self.keys)
            self.keys.append(key)
        if known.owner != owner or known.token_ids != token_ids or known.parent != parent:
            raise Violation("a key has one owner", f"{key.hex()[:12]}: {known.owner}, {owner}")
        return known


def owner_of(model: Model, salt: str, weights: int) -> str:
    """Whose KV it is: nobody else may ever be given it."""
    return f"{model.name}/{salt}/{weights}"


def facts_of_prompt(
    truth: Truth, model: Model, salt: str, tokens: Sequence[int]
) -> list[tuple[bytes, Fact]]:
    """Keys of a prompt's full chunks and of its tail, as another cluster would know them."""
    geometry = model.geometry
    chain = KeyChain(root_key(model.digest, salt=salt), geometry.chunk_tokens, BLOCK_TOKENS)
    chain.extend(tokens)
    owner = owner_of(model, salt, 0)
    digests = TokenDigests(owner)(tokens)
    places = [(index, geometry.blocks_per_chunk, key) for index, key in enumerate(chain.keys)]
    tail = chain.partial_blocks(len(places))
    if tail:
        places.append((len(places), tail, chain.partial(len(places), tail)))
    facts: list[tuple[bytes, Fact]] = []
    for index, blocks, key in places:
        start = index * geometry.chunk_tokens
        held = digests[start : start + blocks * BLOCK_TOKENS]
        parent, ids = chain.parent(index), chain.tokens(index, blocks)
        facts.append((key, truth.learn(key, owner, parent, ids, held)))
    return facts
