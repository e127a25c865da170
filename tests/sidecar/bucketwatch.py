"""What a bucket holds, seen by a client of its own: botocore, which the product does not list with.

Owns listing the bucket, telling its objects apart by name, and a thread that lists again and again
while others write. Does not own what may be there.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from botocore.config import Config
from botocore.session import get_session

from sidecar.demo.processes import REGION

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

KINDS = {
    "chunk": re.compile(r"v1/[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{64}/[^/]+\.arrow"),
    "log": re.compile(r"v1/[0-9a-f]{16}/catalog/log/.+"),
    "snapshot": re.compile(r"v1/[0-9a-f]{16}/catalog/snapshot/.+"),
    "about": re.compile(r"v1/[0-9a-f]{16}/namespace\.json"),
    "manifest": re.compile(r"v1/[0-9a-f]{16}/catalog/manifest/.+"),
    "lease": re.compile(r"v1/lease/.+"),
    "probe": re.compile(r"probe/.+"),
}
"""The names that kvlake makes, as docs/reference/format.md has them."""

LIST_SECONDS = 0.1


class Held(NamedTuple):
    """One listing, by kind; `other` is what kvlake does not make."""

    objects: Counter[str]
    size_bytes: Counter[str]


def kind_of(name: str) -> str:
    """What an object is, by its name below the prefix."""
    return next((kind for kind, names in KINDS.items() if names.fullmatch(name)), "other")


class BucketWatch:
    """Lists one prefix of a bucket until it is closed, and remembers the most that it saw."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        self._bucket = server.bucket
        self._prefix = f"{prefix}/"
        self._client: Any = get_session().create_client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=REGION,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=Config(retries={"max_attempts": 5}),
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.seen: list[Held] = []
        self.each: Callable[[], None] = lambda: None
        """Called after each listing."""
        self.failure: BaseException | None = None

    def names(self) -> Iterator[tuple[str, int, float]]:
        """Every object: its name below the prefix, its bytes, and when it was written."""
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._prefix)
                yield name, entry["Size"], entry["LastModified"].timestamp()

    def held(self) -> Held:
        """What is there now."""
        held = Held(Counter(), Counter())
        for name, size_bytes, _ in self.names():
            held.objects[kind_of(name)] += 1
            held.size_bytes[kind_of(name)] += size_bytes
        return held

    def remove(self, name: str) -> None:
        """Delete an object, behind everybody's back."""
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}{name}")

    def most(self, kind: str) -> Held:
        """The most objects and bytes of a kind that any one listing found."""
        return Held(
            Counter({kind: max(one.objects[kind] for one in self.seen)}),
            Counter({kind: max(one.size_bytes[kind] for one in self.seen)}),
        )

    def _watch(self) -> None:
        try:
            while not self._over.wait(LIST_SECONDS):
                self.seen.append(self.held())
                self.each()
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Self:
        self.seen.append(self.held())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()
        if self.failure is not None:
            raise self.failure
