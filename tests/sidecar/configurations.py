"""Variants of the configuration that `config_in` (`client.py`) makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidecar.config.model import Config
from tests.sidecar.client import config_in


def with_events(directory: Path, **sections: Any) -> Config:
    """The same with the stream of KV events on."""
    sections["events"] = {"enabled": True, **sections.get("events", {})}
    return config_in(directory, **sections)
