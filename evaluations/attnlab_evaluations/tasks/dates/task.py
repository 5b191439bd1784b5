"""Dates in words, within filler text, and the same date in ISO form. Needs Babel when examples are drawn; no torch.

An example's source is `filler date filler`: the date as Babel writes it in one of `LOCALES` and `FORMATS`, in whole by its
locale's own rules; its target is the date as YYYY-MM-DD. The month is always a word and the year has four digits, so the date
means one day only. Filler is made of words of random small letters: it has no digit, and none of its words is one that the
locales write dates with. Without filler a decoder needs no attention, as the encoder's last state holds ten digits.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from types import ModuleType

from attnlab import VariantUnavailable

LOCALES = (
    "en_GB", "en_US", "de_DE", "fr_FR", "es_ES", "it_IT", "pt_BR", "nl_NL", "sv_SE", "pl_PL", "tr_TR", "hu_HU",
)  # fmt: skip
"""hu_HU alone writes year, month, day: its alignment is monotone, that of the others is swapped."""
FORMATS = ("long", "full")
FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST_WORD = 8
TRAINING_FILLER, TEST_FILLER = (0, 30), (60, 80)
"""The least and the most characters of filler on a side."""
VERSION = 1
"""Grows when the examples of a seed change; it is part of every record's key."""


@dataclass(frozen=True)
class Example:
    """One pair, and how it was made: `source[start:stop]` is the date."""

    source: str
    target: str
    locale: str
    form: str
    start: int
    stop: int


def babel_dates() -> ModuleType:
    """The module `babel.dates`; `VariantUnavailable` says what to install where it is missing."""
    try:
        import babel.dates
    except ImportError:
        raise VariantUnavailable(
            "dates: the formats of dates come from the package Babel, which is not installed; "
            "pip install 'attnlab[dates]'"
        ) from None
    return babel.dates


def written(day: date, locale: str, form: str) -> str:
    """`day` as Babel writes it: `Monday, 1 September 2014` for en_GB and full."""
    return str(babel_dates().format_date(day, form, locale=locale))


@functools.cache
def date_words() -> frozenset[str]:
    """Every word, in small letters, that occurs in a date of any of the locales."""
    texts = (written(day, locale, form) for locale in LOCALES for form in FORMATS for day in _a_year())
    return frozenset(word for text in texts for word in re.findall(r"[^\W\d_]+", text.lower()))


@functools.cache
def source_letters() -> str:
    """Every character that a source can hold, sorted."""
    texts = (written(day, locale, form) for locale in LOCALES for form in FORMATS for day in _a_year())
    return "".join(sorted({*" 0123456789", *LETTERS}.union(*texts)))


def _a_year() -> list[date]:
    """Days with every month, weekday and number of the month."""
    return [date(2004, 1, 1) + timedelta(days=n) for n in range(366)]


def filler(draw: random.Random, length: int) -> str:
    """Exactly `length` characters: words of small letters with one space between them, none a word of a date."""
    words: list[str] = []
    left = length
    while left > 0:
        size = min(draw.randint(1, LONGEST_WORD), left)
        size = left if left - size == 1 else size  # one more letter, where a space would end it
        word = "".join(draw.choices(LETTERS, k=size))
        if word in date_words():
            continue
        words.append(word)
        left -= size + 1
    return " ".join(words)


def examples(
    seed: int | str,
    count: int,
    filler_length: tuple[int, int],
    *,
    locales: Sequence[str] = LOCALES,
    forms: Sequence[str] = FORMATS,
) -> list[Example]:
    """`count` examples; the same seed gives the same ones on every machine with the same release of Babel.

    filler_length: the least and the most characters on a side, the space beside the date included; one alone is none.
    """
    draw = random.Random(seed)
    least, most = filler_length
    return [_example(draw, least, most, locales, forms) for _ in range(count)]


def _example(draw: random.Random, least: int, most: int, locales: Sequence[str], forms: Sequence[str]) -> Example:
    day = FIRST + timedelta(days=draw.randrange((LAST - FIRST).days + 1))
    locale, form = draw.choice(locales), draw.choice(forms)
    before, after = (filler(draw, max(0, draw.randint(least, most) - 1)) for _ in range(2))
    text = written(day, locale, form)
    head = f"{before} " if before else ""
    tail = f" {after}" if after else ""
    return Example(head + text + tail, day.isoformat(), locale, form, len(head), len(head) + len(text))
