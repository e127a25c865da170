"""Request and answer through the real sockets of a real sidecar process.

A scheduler's client (the connector's own) sends a lookup of one unknown key, or of 400, and spins
until the answer is there. Prints one JSON object, microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from connector.client import Attempt, Client
from sidecar.protocol import PROTOCOL_VERSION, Attach, Lookup, LookupDone, Role
from tests.harness.sidecars import SidecarProcess


def round_trips(client: Client, keys: int, count: int) -> list[float]:
    """Microseconds of `count` lookups of `keys` keys each."""
    session = client.session
    assert session is not None
    wanted = [os.urandom(32) for _ in range(keys)]
    timed: list[float] = []
    for number in range(count):
        started = time.perf_counter()
        assert client.send(session, Lookup(session.epoch, number, wanted, 1000))
        while not any(isinstance(message, LookupDone) for message in client.poll()):
            pass
        timed.append((time.perf_counter() - started) * 1e6)
    return timed[count // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvlake-wire-"))
    attach = Attach(
        version=PROTOCOL_VERSION,
        role=Role.SCHEDULER,
        engine_id="bench",
        rank=0,
        world_size=1,
        topology="tp1",
        namespace=b'{"bench":1}',
        block_tokens=32,
        blocks_per_chunk=8,
        pid=os.getpid(),
    )
    try:
        with SidecarProcess(folder, {"host": {"size": "64MiB"}}) as sidecar:
            client = Client((sidecar.socket,), lambda: Attempt(attach))
            assert client.wait_attached(10)
            result: dict[str, float] = {}
            for keys, name in ((1, "round_trip"), (400, "lookup_400")):
                timed = sorted(round_trips(client, keys, options.count))
                result[f"{name}_p50_us"] = round(statistics.median(timed), 1)
                result[f"{name}_p99_us"] = round(timed[int(len(timed) * 0.99)], 1)
            client.close()
        print(json.dumps(result))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
