"""The body of a write: a slot that reads as a file, until it is given back."""

from __future__ import annotations

import os

import pytest

from tests.tiers.tier_suite import image_of
from tiers.fsspec_clients import SlotBody


class TestSlotBody:
    def test_it_reads_as_a_file_does(self) -> None:
        image = image_of(1000)
        body, whole = SlotBody(image), image.tobytes()
        assert len(body) == 1000
        assert body.read(10) == whole[:10]
        assert body.tell() == 10
        assert body.read() == whole[10:]
        assert body.read(10) == b""
        assert body.seek(-5, os.SEEK_END) == 995
        assert body.read(100) == whole[995:]
        assert body.seek(0) == 0
        assert body.read(None) == whole
        body.seek(7)
        assert body.seek(3, os.SEEK_CUR) == 10
        with body.getbuffer() as view:
            assert view.nbytes == 1000

    def test_once_detached_it_holds_nothing(self) -> None:
        body = SlotBody(image_of(1000))
        body.detach_slot()
        for touch in (body.read, body.getbuffer):
            with pytest.raises(ValueError, match="given back"):
                touch()
