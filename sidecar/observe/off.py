"""What the settings switch off: a sentence for each that is 0, which every face shows instead.

Owns the words. Does not own the settings (`config/sections.py`).
"""

from typing import Final

from sidecar.config.sections import LimitsSettings

_LACKS: Final = {
    "gone_keys_max": "why a chunk left is not remembered, so that it counts as new",
    "prompts_kept": "no prompts are kept one by one",
    "transfers_kept": "no transfers are kept one by one",
    "curve_keys_max": "what host memory of another size would bring is not estimated",
    "history_seconds": "there is no history beyond the last minute",
}


def switched_off(limits: LimitsSettings) -> dict[str, str]:
    """By setting that is 0: what is lacking, and the remedy."""
    usual = LimitsSettings()
    return {
        name: f"{lacks}: limits.{name} is 0; set it to {getattr(usual, name):g} or another number, "
        "and restart the sidecar"
        for name, lacks in _LACKS.items()
        if not getattr(limits, name)
    }
