"""What a kill matrix strikes: two engines, their sidecar, and an S3 server behind a proxy.

Owns these processes: starting them, striking one, bringing it back, and knowing what they had open
when all was well. `witness` is an engine that lives through the whole matrix; `victim` is the one
whose processes are struck, and is replaced when it was killed, by one that was started meanwhile
and could not see the sidecar yet. Does not own what of an engine can be struck (`struck.py`), what
is under way at the moment of the strike (`kill_stages.py`), nor what is expected then
(`test_kill_matrix.py`).

All requests are of one prompt, under cache salts of their own, so one oracle knows every answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidecar.exits import Exit
from tests.e2e.arms import PATIENT, Call, Oracle, empty, fresh_salt, idle, words
from tests.e2e.holds import Holds
from tests.e2e.kill_seams import PROMPT_TOKENS
from tests.e2e.kill_table import Signal, Victim
from tests.e2e.leftovers import SHARED_MEMORY, alive, counts_of, more_than
from tests.e2e.struck import HOLDS, Struck
from tests.e2e.waiting import WAIT_SECONDS_MAX, until, until_or_not
from tests.faulty_proxy import Fault, FaultyProxy
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.from_thread import BlockingPortal

    from tests.e2e.kill_seams import Seam
    from tests.harness.engine import Generation
    from tests.harness.servers import S3Server

GENERATED_TOKENS: Final = 16
"""Enough that a request still runs while its prompt is being stored."""
SALTS_PREPARED: Final = 12
"""Prompts that only the bucket holds, for the cells at the lookup stage."""
WITNESS_CORE: Final = "0"
VICTIM_CORE: Final = "1"
TRIES_MAX: Final = 8

LIMITS: Final = {
    "lookup_wait": "2s",
    "load_deadline": "2s",
    "lease_ttl": "2s",
    "store_deadline": "2s",
    # Longer than a sidecar is stopped while it drains, though the machine may pause beside that.
    "drain_seconds_max": "15s",
}
STORE_SECONDS_MAX: Final = "2s"


class World:
    """See the module."""

    def __init__(
        self,
        seam: Seam,
        folder: Path,
        model: str,
        server: S3Server,
        proxy: FaultyProxy,
        portal: BlockingPortal,
        *,
        kills: int,
    ) -> None:
        """`kills`: how many engines will be killed. Their successors are started ahead."""
        self.seam = seam
        self.folder = folder
        self.server = server
        self.proxy = proxy
        self._portal = portal
        self._model = model
        self._engines = 0
        self._spares = kills
        self._spare: Struck | None = None
        self._stopped: int | None = None
        (folder / HOLDS).mkdir()
        self.holds = Holds(folder / HOLDS)
        self.sidecar = self._new_sidecar(PATIENT, "60s").start()
        self.witness = self._new_engine(WITNESS_CORE)
        self.victim = self._new_engine(VICTIM_CORE)
        for party in (self.witness, self.victim):
            party.wait_ready().introduce(self.sidecar.socket)
        self.oracle = Oracle(
            self.witness.engine, Call(words(PROMPT_TOKENS, 7), max_tokens=GENERATED_TOKENS)
        )
        cached = [*range(0, seam.whole_tokens, seam.chunk_tokens), seam.whole_tokens]
        measured = [self.oracle.at(tokens) for tokens in cached]
        self._contents = {content for one in measured for content in one.blocks[0]}
        self.sealed_salt = fresh_salt()
        self.store_salts = self._prepare_store()
        self.restart_sidecar()
        self.wait_attached()
        for party in (self.witness, self.victim):
            self.served(party)
        self.wait("everything ended", idle)
        self._before = self._counts()
        self._start_spare()

    def _new_sidecar(self, limits: dict[str, str], store_seconds_max: str) -> SidecarProcess:
        config: dict[str, Any] = {
            "host": {"size": "256MiB", "prefault": False},
            "store": {
                "url": self.server.url,
                **self.server.settings_at(self.proxy.endpoint),
                "refresh_seconds": "200ms",
                "deadline_seconds_max": store_seconds_max,
                # This model computes sooner than any store is read: wait for it all the same.
                "recompute": "never",
            },
            "limits": limits,
            "copy": {"threads": self.seam.copy_threads},
        }
        return SidecarProcess(self.folder / "s", config, program=self.holds.program)

    def _new_engine(self, core: str) -> Struck:
        self._engines += 1
        return Struck(self.seam, self._model, self.folder, f"engine-{self._engines}", core)

    def _prepare_store(self) -> list[str]:
        """Have the prompt in the bucket under many salts, and in no memory."""
        salts = [fresh_salt() for _ in range(SALTS_PREPARED)]
        self.wait_attached()
        for salt in salts:
            self.generate(self.witness, salt)
            empty(self.witness.engine)
        self.wait("everything is written", idle)
        assert self.sidecar.status()["counters"]["chunks_written"] >= self.seam.chunks * len(salts)
        assert self.sidecar.drain() == 0
        self.sidecar.remove_pool()
        return salts

    # --- requests ------------------------------------------------------------------------------

    def begin(self, party: Struck, salt: str, **options: Any) -> int:
        """Start a request under this salt; `finish` takes the handle."""
        call = self.oracle.call
        return party.engine.begin(
            call.prompt, max_tokens=call.max_tokens, cache_salt=salt, **options
        )

    def finish(self, party: Struck, handle: int) -> Generation:
        """What came of a request, which must be what the oracle says."""
        generation = party.engine.finish(handle, WAIT_SECONDS_MAX)
        self.oracle.check(generation)
        return generation

    def generate(self, party: Struck, salt: str, **options: Any) -> Generation:
        """One request from its beginning to its end, compared with the oracle."""
        return self.finish(party, self.begin(party, salt, **options))

    def check_bytes(self, party: Struck) -> None:
        """No block of the engine holds what none holds after right requests."""
        (blocks,) = party.engine.digests()
        assert set(blocks.values()) <= self._contents, "a block holds bytes that are not right"

    def served(self, party: Struck) -> int:
        """Store the prompt and load it into poisoned memory; tokens that were loaded."""
        self.sealed_salt = self.sealed(party)
        return self.seam.whole_tokens

    def sealed(self, party: Struck) -> str:
        """Store the prompt and load it into poisoned memory; its salt.

        Tried again where a deadline was too short for a busy machine; right it must be always.
        """
        for _ in range(TRIES_MAX):
            salt = fresh_salt()
            empty(party.engine)
            self.generate(party, salt)
            if self._hits(party, salt):
                return salt
        raise AssertionError(f"no hit in {TRIES_MAX} tries; {self.sidecar.status()}")

    def finds(self, party: Struck) -> None:
        """Load what is sealed already, for an engine that stored none of it.

        What is late on a busy machine is computed, and not stored: what is found is what was there.
        """
        tries = range(TRIES_MAX)
        found = any(self._hits(party, self.sealed_salt, stores=False) for _ in tries)
        assert found, f"no hit in {TRIES_MAX} tries; {self.sidecar.status()}"

    def _hits(self, party: Struck, salt: str, *, stores: bool = True) -> bool:
        empty(party.engine)
        params = None if stores else {"kvlake": {"write": False}}
        generation = self.generate(party, salt, kv_transfer_params=params)
        self.check_bytes(party)
        return generation.cached_tokens == self.seam.whole_tokens

    # --- the processes -------------------------------------------------------------------------

    def pid_of(self, victim: Victim) -> int:
        """The process to strike."""
        match victim:
            case Victim.SIDECAR:
                assert self.sidecar.process is not None
                return self.sidecar.process.pid
            case Victim.WORKER:
                return self.victim.worker
            case Victim.CORE:
                return self.victim.core
            case Victim.S3:
                return self.server.pid

    def strike(self, victim: Victim, number: Signal) -> None:
        """Send the signal. What was killed is gone when this returns."""
        pid = self.pid_of(victim)
        if number is Signal.STOP:
            self._stopped = pid
            os.kill(pid, signal.SIGSTOP)
        elif victim is Victim.SIDECAR:
            self.sidecar.kill()
        elif victim is Victim.S3:
            self.server.process.kill()
        else:
            os.kill(pid, signal.SIGKILL)
            until("the killed process is gone", lambda: not alive(pid))

    def resume(self) -> None:
        """SIGCONT to what was stopped."""
        if self._stopped is not None:
            os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None

    def become(self, fault: Fault, only: str = "") -> None:
        """Put a fault between the sidecar and the S3 server."""
        self._portal.call(lambda: self.proxy.become(fault, only=only))

    def let_go(self) -> None:
        """Hold nothing any more, in the sidecar and before the S3 server."""
        self.holds.let_go()
        self.become(Fault.PASS)

    def drained(self, code: Exit = Exit.OK) -> None:
        """The sidecar was told to stop: it ends, and says how."""
        assert self.sidecar.process is not None
        ended = self.sidecar.process.wait(WAIT_SECONDS_MAX)
        assert ended == code, f"exit code {ended}, not {code!r}"

    def restart_sidecar(self) -> None:
        """Start the next sidecar on the same sockets."""
        self.holds.forget()
        self.sidecar = self._new_sidecar(LIMITS, STORE_SECONDS_MAX).start()

    def renew_sidecar(self) -> None:
        """Replace the sidecar in peace; the next one has measured nothing of the store yet."""
        assert self.sidecar.drain() == 0
        self.restart_sidecar()
        self.wait_attached()
        self.served(self.victim)

    def replace_victim(self) -> int:
        """Another engine in the victim's place; returns what vLLM left in shared memory."""
        left = self.victim.end()
        gone = self.victim.pids
        until("its processes are gone", lambda: not any(alive(pid) for pid in gone))
        assert self._spare is not None or not self._spares
        self.victim = (self._spare or self._new_engine(VICTIM_CORE)).wait_ready()
        self.victim.introduce(self.sidecar.socket)
        self._spare = None
        self._start_spare()
        return left

    def _start_spare(self) -> None:
        if self._spares:
            self._spares -= 1
            self._spare = self._new_engine(VICTIM_CORE)

    def repair(self) -> None:
        """After a cell that failed, have everything run again, so that the others can."""
        self.resume()
        self.let_go()
        if not alive(self.server.pid):
            self.server.restart()
        if not alive(self.pid_of(Victim.SIDECAR)):
            self.restart_sidecar()
        if not (alive(self.victim.core) and alive(self.victim.worker)):
            self.replace_victim()
        self.wait_attached()

    def close(self) -> None:
        """End everything and remove what would be left for the next sidecar."""
        self.resume()
        self.let_go()
        for party in (self.witness, self.victim, self._spare):
            if party is not None:
                party.engine.stop()
        if alive(self.pid_of(Victim.SIDECAR)):
            assert self.sidecar.drain() == 0
        self.sidecar.remove_pool()

    # --- what is seen --------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The sidecar's status."""
        return self.sidecar.status()

    def attached(self) -> set[tuple[str, int]]:
        """Roles and processes that are attached to the sidecar."""
        return {(session["role"], session["pid"]) for session in self.status()["sessions"]}

    def wait(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until a condition holds of the sidecar's status."""
        self.sidecar.wait(what, condition, WAIT_SECONDS_MAX)

    def wait_attached(self) -> float:
        """Wait until both engines are attached; seconds that it took."""
        started = time.monotonic()
        wanted = {*self.witness.clients.items(), *self.victim.clients.items()}
        until("both engines are attached", lambda: self.attached() == wanted)
        return time.monotonic() - started

    def _counts(self) -> dict[str, Counter[str]]:
        found = {
            "sidecar": counts_of(self.pid_of(Victim.SIDECAR)),
            "witness core": counts_of(self.witness.core),
            "witness worker": counts_of(self.witness.worker),
            "victim core": counts_of(self.victim.core),
            "victim worker": counts_of(self.victim.worker),
        }
        pools = SHARED_MEMORY.glob(f"kvlake-{os.getuid()}-{self.sidecar.name}*")
        sockets = Path(self.sidecar.socket).parent.iterdir()
        found["files"] = Counter(path.name for path in (*pools, *sockets))
        return found

    def leftovers(self) -> list[str]:
        """What there is more of, in any process, than when all was well. Waits for it to go."""
        left: list[str] = []

        def none_left() -> bool:
            now = self._counts()
            left[:] = [
                f"{who}: {what}"
                for who, counts in now.items()
                for what in more_than(counts, self._before[who])
            ]
            return not left

        until_or_not(none_left, WAIT_SECONDS_MAX)
        return left
