"""Sizes, shares and counts as people write and read them."""

from __future__ import annotations

import pytest

from lading.errors import ConfigError
from lading.units import format_count, parse_bytes, share_or_bytes

WHOLE = 10**9


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("256MB", 256_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("1B", 1),
        (4096, 4096),
        (256e6, 256_000_000),
        ("256000000", 256_000_000),
        ("50%", WHOLE // 2),
        (0.5, WHOLE // 2),
        ("0.5", WHOLE // 2),
        ("100%", WHOLE),
        (0, 0),
    ],
)
def test_what_a_size_means(size: str | float, size_bytes: int) -> None:
    assert share_or_bytes(size, WHOLE) == size_bytes


@pytest.mark.parametrize("size", [1, 1.0, "1", 50, "50", 1.5, 1023])
def test_a_number_that_may_mean_several_things_is_refused(size: str | float) -> None:
    with pytest.raises(ConfigError, match=r"expected a unit: .* may mean .*'\S+MB' or '\S+GB'; write the one"):
        share_or_bytes(size, WHOLE)
    with pytest.raises(ConfigError, match=r"--host: expected a unit: [^%]*; write"):
        parse_bytes(size, "--host")


@pytest.mark.parametrize("size", [None, True, -1, -0.5, float("nan"), float("inf"), "", "much", "-5%", [1], 1 << 64])
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        share_or_bytes(size, WHOLE)  # pyright: ignore[reportArgumentType]


def test_a_share_is_above_nothing_and_at_most_all() -> None:
    for share in ("0%", "150%"):
        with pytest.raises(ConfigError, match="above 0% and up to 100%"):
            share_or_bytes(share, WHOLE)


def test_counts_have_the_word_of_their_size() -> None:
    numbers = (0, 999, 8192, 999_999, 4_560_000, 70_553_706_496, 1.2e12)
    words = ["0", "999", "8,192", "1 million", "4.56 million", "70.6 billion", "1.2 trillion"]
    assert [format_count(number) for number in numbers] == words
