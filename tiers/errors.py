"""Errors of the tiers, named by condition and grouped by who must act.

* `TierUnavailable`, `TierFull`: the tier did nothing; retry later or drop the work.
* `ObjectExists`: another writer was first; read the object.
* `ChunkMissing`, `ChunkCorrupt` and its kinds: treat as a miss; never serve the bytes.
* `LayoutError`, `PoolError`: a caller or a configuration is wrong; fix it, do not retry.

Every message says what was found, what was expected, and what to do.
"""


class TierError(Exception):
    """Base of every error that a tier raises on purpose."""

    cause: str = "other"
    """Label in metrics: one word of a fixed set."""


class TierUnavailable(TierError):
    """The tier could not be reached, or did not answer before its deadline.

    `retryable` is False if a person has to act first (bad credentials, no bucket, a full disk).
    """

    def __init__(self, message: str, *, retryable: bool, cause: str | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.cause = cause or type(self).cause


class TierExpired(TierUnavailable):
    """The tier did not answer before the deadline of the request, retries included."""

    cause = "expired"


class TierUnmounted(TierUnavailable):
    """The folder is another one than before: most likely it is not mounted any more."""

    cause = "unmounted"


class TierFull(TierError):
    """No slot or no space is left."""

    cause = "full"


class ObjectExists(TierError):
    """The name of a write that must not replace anything is taken."""

    cause = "exists"


class ChunkMissing(TierError):
    """The tier does not hold the requested object."""

    cause = "missing"


class ChunkCorrupt(TierError):
    """Bytes were found, but not those of the requested segment."""

    cause = "corrupt"


class ObjectOdd(ChunkCorrupt):
    """An object's name belongs to no regular file, but a link, a pipe, a socket or a folder."""


class ObjectDenied(ChunkCorrupt):
    """The object may be intact, but this user may not read it."""

    cause = "denied"


class ImageTruncated(ChunkCorrupt):
    """The image is shorter or longer than its layout requires."""

    cause = "truncated"


class ImageHeaderMismatch(ChunkCorrupt):
    """The Arrow header or footer differs from the layout's template."""


class ImageFormatMismatch(ChunkCorrupt):
    """The image has a format that this release does not know. It may be intact."""


class ImageKeyMismatch(ChunkCorrupt):
    """The image is intact but has another key than the requested one."""


class ImageNamespaceMismatch(ChunkCorrupt):
    """The image belongs to another namespace (other model, dtype, geometry or encoding)."""


class ImageChecksumMismatch(ChunkCorrupt):
    """The payload does not hash to the checksum taken when it left the engine."""


class LayoutError(TierError, ValueError):
    """A geometry is invalid: the message names the field, its value and the rule."""


class PoolError(TierError):
    """The host pool cannot be created, or was used incorrectly."""
