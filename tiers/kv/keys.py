"""Keys of one request's chunks: a sha256 chain over token ids and all else that shapes their KV.

Two requests share KV exactly as far as their keys are equal.

* The root is a hash of the namespace, the cache salt and the LoRA adapter: tenants with different
  salts never share a key, not even the first.
* Multimodal items enter each chunk that they overlap, with their offset relative to the chunk.
* Where KV depends on later tokens (`identity/speculative.py`), the key of a chunk covers those too.
* A partial chunk (the tail of a prompt or of a finished request) has the same kind of key over
  fewer tokens. The token count is hashed, too, so it never equals the key of a full chunk.
* Nothing depends on PYTHONHASHSEED, on the machine, or on vLLM's own block hashes.

Cost: one conversion of the tokens to int32 bytes and one sha256 per chunk, once per request.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Final

NO_PARENT: Final = bytes(32)
_DOMAIN: Final = b"kvlake/key/1\0"
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal input that fills the positions `[offset, offset+length)`."""

    identifier: str
    offset: int
    length: int


def _framed(*parts: bytes) -> bytes:
    # Length-prefixed, so that no two lists of parts share an encoding.
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def root_key(
    namespace_digest: bytes, *, salt: str = "", lora: str = "", generation: bytes = b""
) -> bytes:
    """The parent of a request's first chunk; `generation` is random after a reset of the cache."""
    parts = _framed(namespace_digest, salt.encode(), lora.encode(), generation)
    return hashlib.sha256(_DOMAIN + b"root" + parts).digest()


@dataclass(slots=True, eq=False)
class KeyChain:
    """Keys of the chunks of one growing token sequence; partial chunks are whole blocks."""

    root: bytes
    chunk_tokens: int
    block_tokens: int
    media: Sequence[MediaItem] = ()
    """In order of offset."""
    _: KW_ONLY
    beside: InitVar["KeyChain | None"] = None
    """A chain of the same tokens, which keeps them for both; see `follow`."""
    ahead_tokens: int = 0
    """How many tokens after a chunk its KV depends on."""
    keys: list[bytes] = field(default_factory=list[bytes], init=False)
    """Keys of the full chunks, first to last. Do not change the list."""
    token_bytes: bytearray = field(default_factory=bytearray, init=False)
    partials: dict[tuple[int, int], bytes] = field(
        default_factory=dict[tuple[int, int], bytes], init=False
    )

    def __post_init__(self, beside: "KeyChain | None") -> None:
        if beside is not None:
            self.token_bytes = beside.token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens hashed so far."""
        return len(self.token_bytes) // _TOKEN_BYTES

    @property
    def decided_tokens(self) -> int:
        """Leading tokens whose KV is determined by the tokens hashed so far."""
        return max(0, self.num_tokens - self.ahead_tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append token ids (int32 range) and hash the chunks that they complete."""
        self.token_bytes += array("i", token_ids).tobytes()
        self.follow()

    def follow(self) -> None:
        """Hash the chunks that were completed since in this chain or the one beside it."""
        for index in range(len(self.keys), self.decided_tokens // self.chunk_tokens):
            self.keys.append(self._key(index, self.chunk_tokens))

    def parent(self, index: int) -> bytes:
        """Key of the chunk before chunk `index`, or 32 zero bytes for the first."""
        return self.keys[index - 1] if index else NO_PARENT

    def tokens(self, index: int, num_blocks: int) -> bytes:
        """Little-endian int32 bytes of the first `num_blocks` blocks of chunk `index`."""
        start = index * self.chunk_tokens * _TOKEN_BYTES
        return bytes(
            self.token_bytes[start : start + num_blocks * self.block_tokens * _TOKEN_BYTES]
        )

    def partial(self, index: int, num_blocks: int) -> bytes:
        """Key of the first `num_blocks` blocks of chunk `index`; all chunks before it are full."""
        if (index, num_blocks) not in self.partials:
            self.partials[index, num_blocks] = self._key(index, num_blocks * self.block_tokens)
        return self.partials[index, num_blocks]

    def key_of(self, index: int, num_blocks: int) -> bytes:
        """Key of the first `num_blocks` blocks of chunk `index`, which may be all of them."""
        if num_blocks * self.block_tokens == self.chunk_tokens:
            return self.keys[index]
        return self.partial(index, num_blocks)

    def partial_blocks(self, index: int) -> int:
        """Whole blocks of chunk `index` that are determined; all of them if it is full."""
        tokens = min(self.decided_tokens - index * self.chunk_tokens, self.chunk_tokens)
        return max(tokens, 0) // self.block_tokens

    def _key(self, index: int, num_tokens: int) -> bytes:
        start = index * self.chunk_tokens
        end = start + num_tokens + self.ahead_tokens
        hasher = hashlib.sha256(_DOMAIN)
        hasher.update(self.keys[index - 1] if index else self.root)
        hasher.update(num_tokens.to_bytes(4, "little"))
        hasher.update(memoryview(self.token_bytes)[start * _TOKEN_BYTES : end * _TOKEN_BYTES])
        for item in self.media:
            if item.offset < end and item.offset + item.length > start:
                # Relative to the chunk and signed: an item may begin in a chunk before this one.
                relative = (item.offset - start).to_bytes(8, "little", signed=True)
                hasher.update(_framed(item.identifier.encode(), relative))
        return hasher.digest()
