"""Errors of the tiers, named by condition and split by who must act.

Owns the families a caller can tell apart without reading a message:

* `TierUnavailable`, `TierFull`: the tier did nothing; retry later or drop the work.
* `ObjectExists`: somebody else was first; look at what is there.
* `ChunkMissing`, `ChunkCorrupt` and its kinds: treat as a miss; never serve the bytes.
* `LayoutError`, `PoolError`: a caller or a configuration is wrong; fix it, do not retry.

Every message says what was found, what was expected, and what to do.
"""

from __future__ import annotations


class TierError(Exception):
    """Base of every error that a tier raises on purpose."""

    cause: str = "other"
    """What it is counted as: one word, of a set that does not grow with what happens."""


class TierUnavailable(TierError):
    """The tier could not be reached, or did not answer before its deadline.

    `retryable` is False where trying again cannot help until a person acts
    (bad credentials, no such bucket, a full disk).
    """

    def __init__(self, message: str, *, retryable: bool, cause: str | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.cause = cause or type(self).cause


class TierExpired(TierUnavailable):
    """The tier had not answered by the deadline of the request, retries included."""

    cause = "expired"


class TierUnmounted(TierUnavailable):
    """The folder is another than before: most likely it is not mounted any more."""

    cause = "unmounted"


class TierFull(TierError):
    """No slot or no space is left; the caller drops the work or makes room."""

    cause = "full"


class ObjectExists(TierError):
    """A write that must not replace anything found its name taken."""

    cause = "exists"


class ChunkMissing(TierError):
    """The tier does not hold the object that was asked for."""

    cause = "missing"


class ChunkCorrupt(TierError):
    """Bytes were found, but they are not the segment that was asked for."""

    cause = "corrupt"


class ObjectOdd(ChunkCorrupt):
    """What stands under an object's name is no regular file: a link, a pipe, a socket, a folder."""


class ObjectDenied(ChunkCorrupt):
    """The object may be intact, but this user must not read it."""

    cause = "denied"


class ImageTruncated(ChunkCorrupt):
    """The image is shorter or longer than its layout says."""

    cause = "truncated"


class ImageHeaderMismatch(ChunkCorrupt):
    """The Arrow header or footer differs from the layout's template."""


class ImageKeyMismatch(ChunkCorrupt):
    """The image is intact but holds another key than the one asked for."""


class ImageNamespaceMismatch(ChunkCorrupt):
    """The image belongs to another namespace (other model, dtype, geometry or encoding)."""


class ImageChecksumMismatch(ChunkCorrupt):
    """The payload does not hash to the checksum taken when it left the engine."""


class LayoutError(TierError, ValueError):
    """A geometry is impossible: the message names the field, its value and the rule."""


class PoolError(TierError):
    """The host pool cannot be created or was used wrongly."""
