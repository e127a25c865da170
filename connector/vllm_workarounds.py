"""Blocks that vLLM's own prefix cache names though nobody computed them.

vLLM names a request's blocks when it schedules it, before they are computed. Where it then takes
the request out of the same step again, to make room for one with a higher priority, the names stay:
the next request that begins the same takes what is in those blocks for its KV, and so would whoever
stores it. Here they lose their names, at the end of that step and so before anybody asks.

Owns how far each request has got. Does not own vLLM's blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Withdrawn:
    """The requests that vLLM schedules, and how many tokens of each were scheduled for good."""

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}
        self._reached: dict[str, int] = {}

    def allocated(self, request: Any) -> None:
        """A request was given blocks; it is scheduled in this step, or after its load."""
        self._requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._reached.pop(request_id, None)

    def step(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_pool: Any,
        num_groups: int,
    ) -> int:
        """Take in a step; how many blocks lost their names.

        Args:
            scheduled: request id to the number of tokens that it computes in this step.
            preempted: ids of requests that vLLM took the blocks of, some after it scheduled them.
            block_pool: vLLM's, or None where it is not known yet.
            num_groups: KV cache groups.
        """
        unnamed = 0
        for request_id in preempted:
            reached = self._reached.pop(request_id, None)
            if reached is not None and block_pool is not None:
                request = self._requests[request_id]
                unnamed += _unname(block_pool, request, reached, num_groups)
        for request_id, num_tokens in scheduled.items():
            request = self._requests.get(request_id)
            if request is not None:
                # Of drafts that may be rejected vLLM names no block.
                computed = request.num_computed_tokens + num_tokens
                self._reached[request_id] = min(computed, request.num_tokens)
        return unnamed


def _unname(block_pool: Any, request: Any, reached: int, num_groups: int) -> int:
    """Have no block be known by what a request has beyond `reached` tokens.

    Of two blocks of one name one may be right; which, nobody knows.
    """
    unnamed = 0
    for block_hash in request.block_hashes[reached // block_pool.hash_block_size :]:
        for group in range(num_groups):
            seen = set[int]()
            while found := block_pool.get_cached_block(block_hash, [group]):
                block_id = found[0].block_id
                if block_id in seen:
                    break
                seen.add(block_id)
                block_pool.evict_blocks({block_id})
            unnamed += len(seen)
    return unnamed
