from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.sizes import (
    approximate_size,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("2gb", 2 * 10**9),
        ("100", 100),
        ("7B", 7),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(written: object, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    "written", ["8 gigs", "", "GiB", "-1", -1, "1.5B", True, None, 1.5, "8GiBB", "1e3"]
)
def test_invalid_sizes(written: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("5s", 5.0),
        ("2m", 120.0),
        ("1 h", 3600.0),
        ("30d", 2_592_000.0),
        (5, 5.0),
        (0.25, 0.25),
        ("3", 3),
    ],
)
def test_durations(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written", ["fast", "5 M", "-5s", -5, float("nan"), float("inf"), False, None, "5sec"]
)
def test_invalid_durations(written: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(written)


@given(st.integers(min_value=0, max_value=2**52))
def test_a_formatted_size_parses_equal(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=10**10))
def test_a_formatted_duration_parses_equal(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


def test_formats() -> None:
    assert format_size(8 << 30) == "8GiB"
    assert format_duration(0.5) == "500ms"
    assert format_duration(120) == "2m"
    assert approximate_size(1.25 * (1 << 30)) == "1.25 GiB"
    assert approximate_size(0) == "0 B"
    assert approximate_size(1023 << 10) == "1023 KiB"
    assert approximate_size(999.7 * 1024) == "1000 KiB"
