"""The documents of /prompts: the last prompts, and the tokens of all of them over time."""

import time
from typing import Any, Final

from sidecar.observe.benefit import MEANINGS, WINDOWS, meaning_of_loss, sentences
from sidecar.observe.history import FigureHistory
from sidecar.service.dispatcher import Dispatcher
from sidecar.service.prompts import ReportedPrompt

PROMPTS_SHOWN: Final = 20
PROMPTS_MAX: Final = 1000
"""In one answer."""

Document = dict[str, Any]


class PromptDocuments:
    """Makes them from what a sidecar's schedulers reported."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def document(self, count: int, request_id: str = "") -> Document:
        """The last prompts, newest first; those of one request if it is named."""
        found = self._dispatcher.prompts.last(count, request_id)
        prompts = [self._prompt(one) for one in found]
        return {"prompts": prompts, "meanings": {one: meaning_of_loss(one) for one in MEANINGS}}

    def _prompt(self, one: ReportedPrompt) -> Document:
        record = one.record
        return {
            "request_id": record.request_id,
            "seconds_ago": round(time.time() - one.at, 3),
            "engine_id": one.engine_id,
            "model": one.model,
            "tokens": dict(record.tokens),
            "runs": [{"end_tokens": run.end_tokens, "outcome": run.outcome} for run in record.runs],
            "missed": record.missed.hex()[:32] or None,
            "missed_token": record.missed_token if record.missed else None,
            "missed_reason": record.missed_reason if record.missed else None,
            "missed_gone_seconds": one.gone_seconds,
            "chunk_tokens": one.chunk_tokens,
            "lookup_ms": record.lookup_us / 1000,
            "read_ms": record.read_us / 1000,
            "load_ms": record.load_us / 1000,
            "late_ms": record.late_us / 1000,
            "late_limit_ms": record.late_limit_us / 1000,
            "saved_ms": record.saved_us / 1000,
        }


def prompts_summary(dispatcher: Dispatcher, history: FigureHistory) -> Document:
    """Prompts since the start, their tokens over `WINDOWS`, and what they saved."""
    prompts, settings = dispatcher.prompts, dispatcher.config.gpu
    gpu_hours = prompts.seconds.gpu / 3600
    price = settings.hour_price
    windows = {name: history.over_last(seconds) for name, (seconds, _) in WINDOWS.items()}
    return {
        "sentences": sentences(windows, prompts.seconds, settings),
        "prompts": prompts.prompts,
        "tokens": dict(prompts.tokens),
        "saved": {
            "seconds": round(prompts.seconds.saved, 3),
            "seconds_spent": round(prompts.seconds.spent, 3),
            "gpu_hours": round(gpu_hours, 6),
            "money": round(gpu_hours * price, 4) if price else None,
            "currency": settings.currency,
        },
        "last": {
            name: {
                "seconds": round(one.seconds, 3),
                "cut": one.cut,
                "prompts": one.prompts,
                "tokens": dict(one.tokens),
                "hit_share": one.hit_share,
                "gpu_seconds_saved": round(one.gpu_seconds, 3),
            }
            for name, one in windows.items()
        },
    }
