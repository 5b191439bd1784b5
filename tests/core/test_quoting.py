"""A caller's value in a message: whole where it is short, cut where it is long, and never the cause of an error."""

from __future__ import annotations

import pytest

from attnlab._quoting import LONGEST, abridged, quoted, short

pytestmark = pytest.mark.no_torch

HUGE = "x" * 900_000


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_a_short_text_stays_as_it_is() -> None:
    assert short("x" * LONGEST) == "x" * LONGEST
    assert quoted("café's") == repr("café's")
    assert quoted([1, None, 2.5]) == "[1, None, 2.5]"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert short(HUGE) == "x" * (LONGEST - 3) + "..."
    assert quoted(HUGE) == repr("x" * (LONGEST - 3) + "...")
    assert short(HUGE, 10) == "xxxxxxx..."


def test_a_long_value_of_another_kind_is_cut() -> None:
    assert quoted(list(range(10**5))).startswith("[0, 1, 2,")
    assert len(quoted(list(range(10**5)))) == LONGEST


def test_a_value_of_many_lines_becomes_one_line() -> None:
    class Tall:
        def __repr__(self) -> str:
            return "a\n  b"

    assert quoted(Tall()) == "a b"


def test_a_value_that_cannot_be_written_is_named_by_its_type() -> None:
    assert quoted(Mute()) == "a value of type Mute"
    assert quoted(10**5000) == "a value of type int"  # more digits than Python converts


def test_a_message_of_others_repeats_a_long_value_cut_and_its_closing_quote() -> None:
    said = abridged(f"choose a or b, got {HUGE!r}; see the manual", [HUGE])
    assert said == f"choose a or b, got '{'x' * (LONGEST - 4)}...'; see the manual"
    assert len(abridged(f"no such file: {HUGE}", [HUGE])) < 100


def test_a_message_of_others_keeps_short_values_and_what_is_not_a_value() -> None:
    message = f"{'long words ' * 50} got 'short' and 3"
    assert abridged(message, ["short", 3, Mute(), 10**5000]) == message
