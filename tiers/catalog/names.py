"""Names of what is in the store: segments, and the catalog's own files.

Owns every object name below a store's prefix, written and parsed:

* `v1/<namespace>/<kk>/<key>/<segment>.arrow`: one segment of a chunk
* `v1/<namespace>/namespace.json`: what the namespace is
* `v1/<namespace>/catalog/log/<writer>/<number>-<digest>.arrow`: rows that one writer announced
* `v1/<namespace>/catalog/snapshot/<generation>-<part>-<digest>.arrow`: rows, merged
* `v1/<namespace>/catalog/manifest/<generation>`: which snapshots and logs make up the catalog
* `v1/lease/<generation>`: which process may compact and collect

Does not own I/O, or whether an object is intact: a name is a claim, verified when it is read.

Invariants: parsing returns what was formatted, and every other name parses to None, so foreign
objects, quarantined ones and those of later formats are ignored. Numbers have a fixed width, so
the names in one folder sort as their numbers do.
"""

import re
from typing import Final, NamedTuple

from tiers.errors import LayoutError
from tiers.kv.layout import Segment

FORMAT: Final = "v1"
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32
NAMESPACE_CHARACTERS: Final = 16
NUMBER_DIGITS: Final = 12
NUMBER_MAX: Final = 10**NUMBER_DIGITS - 1
LEASE_FOLDER: Final = f"{FORMAT}/lease"

_NAME = re.compile(
    rf"{FORMAT}/([0-9a-f]{{{NAMESPACE_CHARACTERS}}})/([0-9a-f]{{2}})/([0-9a-f]{{{2 * KEY_BYTES}}})"
    r"/([0-9.-]{1,64})\.arrow"
)
_NAMESPACE = re.compile(rf"({FORMAT}/[0-9a-f]{{{NAMESPACE_CHARACTERS}}})/?")
_NUMBER = rf"([0-9]{{{NUMBER_DIGITS}}})"
_WRITER = r"([sc][0-9a-f]{15})"
_LOG_FOLDER = re.compile(rf"log/{_WRITER}/")
_LOG = re.compile(rf"log/{_WRITER}/{_NUMBER}-([0-9a-f]{{32}})\.arrow")
_SNAPSHOT = re.compile(rf"snapshot/{_NUMBER}-([0-9]{{5}})-([0-9a-f]{{32}})\.arrow")
_MANIFEST = re.compile(rf"manifest/{_NUMBER}")
_LEASE = re.compile(rf"{LEASE_FOLDER}/{_NUMBER}")


class ObjectName(NamedTuple):
    """The parts of a segment's name."""

    namespace: str
    """The first 16 hexadecimal digits of the namespace's digest. Images hold all of it."""
    key: bytes
    segment: Segment


class LogName(NamedTuple):
    """The parts of a log file's name."""

    writer: str
    """`s` and 15 hexadecimal digits for a sidecar process, `c` and 15 for a compaction."""
    number: int
    """Counts the files of one writer, from 0, without gaps."""


def namespace_prefix(namespace_digest: bytes) -> str:
    """The folder of a namespace's objects. Raises `ValueError` unless given 32 bytes."""
    if len(namespace_digest) != DIGEST_BYTES:
        raise ValueError(
            f"namespace_digest: must have {DIGEST_BYTES} bytes, got {len(namespace_digest)}"
        )
    return f"{FORMAT}/{namespace_digest.hex()[:NAMESPACE_CHARACTERS]}"


def object_name(namespace_digest: bytes, key: bytes, segment: Segment) -> str:
    """The name of one segment of chunk `key`. Raises `ValueError` for a key not of 32 bytes."""
    return segment_name(namespace_prefix(namespace_digest), key, segment.name)


def segment_name(prefix: str, key: bytes, segment: str) -> str:
    """`object_name` from a namespace's folder and a segment's name."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: must have {KEY_BYTES} bytes, got {len(key)}")
    # The two digits spread a namespace over 256 folders; S3 partitions its index by prefix too.
    digits = key.hex()
    return f"{prefix}/{digits[:2]}/{digits}/{segment}.arrow"


def parse_name(name: str) -> ObjectName | None:
    """The parts of `name`, or None where `object_name` cannot have made it."""
    match = _NAME.fullmatch(name)
    if match is None or not match[3].startswith(match[2]):
        return None
    try:
        segment = Segment.parse(match[4])
    except LayoutError:
        return None
    return ObjectName(match[1], bytes.fromhex(match[3]), segment)


def parse_namespace(folder: str) -> str | None:
    """A namespace's folder without a trailing slash, or None for another folder."""
    match = _NAMESPACE.fullmatch(folder)
    return match[1] if match else None


def namespace_info_name(prefix: str) -> str:
    """The file that says what the namespace in folder `prefix` is."""
    return f"{prefix}/namespace.json"


def catalog_folder(prefix: str) -> str:
    """The folder of the catalog of the namespace in folder `prefix`."""
    return f"{prefix}/catalog"


def log_name(folder: str, log: LogName, digest: str) -> str:
    """The name of a log file in a catalog's folder."""
    return f"{folder}/log/{log.writer}/{_digits(log.number)}-{digest}.arrow"


def parse_log_folder(folder: str, name: str) -> str | None:
    """The writer whose log files are in folder `name` of a catalog's folder, or None."""
    match = _LOG_FOLDER.fullmatch(name.removeprefix(f"{folder}/"))
    return match[1] if match else None


def parse_log(folder: str, name: str) -> LogName | None:
    """The parts of a log file's name, or None."""
    match = _LOG.fullmatch(name.removeprefix(f"{folder}/"))
    return LogName(match[1], int(match[2])) if match else None


def snapshot_name(folder: str, generation: int, part: int, digest: str) -> str:
    """The name of one part of a snapshot."""
    return f"{folder}/snapshot/{_digits(generation)}-{part:05d}-{digest}.arrow"


def parse_snapshot(folder: str, name: str) -> int | None:
    """The generation of a part of a snapshot, or None."""
    return _number(_SNAPSHOT, folder, name)


def manifest_name(folder: str, generation: int) -> str:
    """The name of a manifest. Without a digest, so that a generation can have only one."""
    return f"{folder}/manifest/{_digits(generation)}"


def parse_manifest(folder: str, name: str) -> int | None:
    """The generation of a manifest, or None."""
    return _number(_MANIFEST, folder, name)


def lease_name(generation: int) -> str:
    """The name of a lease."""
    return f"{LEASE_FOLDER}/{_digits(generation)}"


def parse_lease(name: str) -> int | None:
    """The generation of a lease, or None."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def digest_in(name: str) -> str:
    """The digest that the name of a log or a snapshot ends with."""
    return name.removesuffix(".arrow")[-32:]


def _number(pattern: re.Pattern[str], folder: str, name: str) -> int | None:
    match = pattern.fullmatch(name.removeprefix(f"{folder}/"))
    return int(match[1]) if match else None


def _digits(number: int) -> str:
    if not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"number={number}: must be between 0 and {NUMBER_MAX}")
    return f"{number:0{NUMBER_DIGITS}d}"
