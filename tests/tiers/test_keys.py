"""Two token sequences share keys exactly as far as they, and what they run under, are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.kv.keys import NO_PARENT, KeyChain, MediaItem, root_key

NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)
BLOCK = 4
CHUNK = 16


def chain_of(
    tokens: list[int], root: bytes = ROOT, media: list[MediaItem] | None = None
) -> KeyChain:
    chain = KeyChain(root, CHUNK, BLOCK, media or [])
    chain.extend(tokens)
    return chain


def all_keys(chain: KeyChain) -> set[bytes]:
    """Full and partial keys of everything that the chain knows."""
    last = len(chain.keys)
    partials = {chain.partial(last, count) for count in range(1, chain.partial_blocks(last) + 1)}
    return partials | set(chain.keys)


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tiers.kv.keys import *\n"
        "r = root_key(bytes(32), salt='s', lora='l')\n"
        "c = KeyChain(r, 16, 4, [MediaItem('image', 3, 20)])\n"
        "c.extend(range(70))\n"
        "print([k.hex() for k in c.keys], c.partial(4, 1).hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(printed) == 1


def test_the_format_of_a_key_is_what_it_was() -> None:
    # Keys name objects in stores that outlive every release: a change here orphans all of them.
    chain = chain_of(list(range(40)), root_key(NAMESPACE, salt="tenant", lora="adapter"))
    assert chain.keys[0].hex()[:16] == "62c88eee23575b92"
    assert chain.partial(2, 1).hex()[:16] == "547e570be6a59ade"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (root_key(NAMESPACE), root_key(bytes(32))),
        (root_key(NAMESPACE), root_key(NAMESPACE, salt="a")),
        (root_key(NAMESPACE, salt="a"), root_key(NAMESPACE, salt="b")),
        (root_key(NAMESPACE, salt="a"), root_key(NAMESPACE, lora="a")),
        (root_key(NAMESPACE, salt="ab", lora="c"), root_key(NAMESPACE, salt="a", lora="bc")),
        (root_key(NAMESPACE, generation=b"x"), root_key(NAMESPACE, generation=b"y")),
        (root_key(NAMESPACE, lora="x"), root_key(NAMESPACE, generation=b"x")),
    ],
)
def test_salt_and_adapter_are_in_every_key(one: bytes, other: bytes) -> None:
    tokens = list(range(70))
    assert not all_keys(chain_of(tokens, one)) & all_keys(chain_of(tokens, other))


def test_a_partial_key_never_equals_a_full_one() -> None:
    tokens = list(range(CHUNK))
    full = chain_of(tokens)
    assert len(full.keys) == 1
    # Even if a chunk of another engine's size held the very same tokens.
    assert full.partial(0, CHUNK // BLOCK) == full.keys[0]
    assert all(full.partial(0, count) != full.keys[0] for count in range(1, CHUNK // BLOCK))
    assert len({full.partial(0, count) for count in range(1, CHUNK // BLOCK)}) == 3


def test_partial_keys_follow_the_full_chunk_before_them() -> None:
    tokens = list(range(CHUNK + BLOCK))
    other = [7, *tokens[1:]]
    assert chain_of(tokens).partial(1, 1) != chain_of(other).partial(1, 1)


@pytest.mark.parametrize(
    ("tokens", "index", "blocks"),
    [(0, 0, 0), (3, 0, 0), (4, 0, 1), (15, 0, 3), (16, 0, 4), (16, 1, 0), (27, 1, 2), (27, 2, 0)],
)
def test_only_whole_blocks_count(tokens: int, index: int, blocks: int) -> None:
    assert chain_of(list(range(tokens))).partial_blocks(index) == blocks


def test_parents_and_tokens_of_a_chunk() -> None:
    chain = chain_of(list(range(40)))
    assert chain.parent(0) == NO_PARENT
    assert chain.parent(2) == chain.keys[1]
    assert chain.tokens(1, 4) == b"".join(n.to_bytes(4, "little") for n in range(16, 32))
    assert chain.tokens(2, 1) == b"".join(n.to_bytes(4, "little") for n in range(32, 36))


class TestMedia:
    def test_an_item_counts_from_the_chunk_that_it_begins_in(self) -> None:
        plain = chain_of([1] * 64)
        image = chain_of([1] * 64, media=[MediaItem("cat", 20, 8)])
        assert image.keys[0] == plain.keys[0]
        assert not set(image.keys[1:]) & set(plain.keys)

    @pytest.mark.promise("media-uuid", "multimodal")
    def test_its_identity_and_place_count(self) -> None:
        keys = {
            chain_of([1] * 16, media=media).keys[0]
            for media in (
                [MediaItem("cat", 4, 8)],
                [MediaItem("dog", 4, 8)],
                [MediaItem("cat", 5, 8)],
                [MediaItem("cat", 4, 4), MediaItem("cat", 8, 4)],
            )
        }
        assert len(keys) == 4

    def test_the_place_is_relative_and_may_be_before_the_chunk(self) -> None:
        # Equal tokens under equal parents, the image shifted by one: the second chunk must differ
        # although the image covers all of it both times.
        one = chain_of([1] * 48, media=[MediaItem("cat", 10, 30)])
        other = chain_of([1] * 48, media=[MediaItem("cat", 11, 30)])
        assert not set(one.keys) & set(other.keys)

    def test_a_partial_chunk_has_the_items_that_it_overlaps(self) -> None:
        plain = chain_of([1] * 16)
        image = chain_of([1] * 16, media=[MediaItem("cat", 9, 2)])
        assert image.partial(0, 2) == plain.partial(0, 2)
        assert image.partial(0, 3) != plain.partial(0, 3)


TOKENS = st.lists(st.integers(0, 2), max_size=5 * CHUNK)


@given(TOKENS, TOKENS, st.integers(0, 5 * CHUNK))
def test_two_sequences_share_keys_exactly_as_far_as_they_are_equal(
    one: list[int], other: list[int], shared: int
) -> None:
    other = one[:shared] + other
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    chains = chain_of(one), chain_of(other)
    common = [a for a, b in zip(chains[0].keys, chains[1].keys, strict=False) if a == b]
    assert len(common) == equal // CHUNK
    assert not set(chains[0].keys[len(common) :]) & set(chains[1].keys)
    # Where both know the tail, its pieces are shared as far as it is equal, block by block.
    index = equal // CHUNK
    known = min(chain.partial_blocks(index) for chain in chains)
    for count in range(1, min(known, CHUNK // BLOCK - 1) + 1):
        same = chains[0].partial(index, count) == chains[1].partial(index, count)
        assert same == (index * CHUNK + count * BLOCK <= equal)


@given(TOKENS, st.lists(st.integers(0, 5 * CHUNK), max_size=6))
def test_growing_gives_the_keys_of_the_whole(tokens: list[int], segment_sources: list[int]) -> None:
    grown = chain_of([])
    for start, end in zip(
        [0, *sorted(segment_sources)], [*sorted(segment_sources), len(tokens)], strict=True
    ):
        grown.extend(tokens[start:end])
        all_keys(grown)
    assert grown.num_tokens == len(tokens)
    assert grown.keys == chain_of(tokens).keys
    assert all_keys(grown) == all_keys(chain_of(tokens))
