"""The examples: what Babel writes reads back as the same date, filler is as long as asked and means nothing."""

import itertools
import re
from datetime import date

import pytest
from babel import Locale

from attnlab_evaluations.tasks.dates import task


def read(text, locale):
    """The date that a reader finds who knows the locale's words: a number of four digits, one of fewer, one month."""
    names = Locale.parse(locale).months["format"]["wide"]
    words = re.findall(r"[^\W\d_]+", text.lower())
    (month,) = [n for n, name in names.items() if name.lower() in words]
    numbers = re.findall(r"\d+", text)
    (year,) = [int(n) for n in numbers if len(n) == 4]
    (day,) = [int(n) for n in numbers if len(n) < 3]
    return date(year, month, day)


@pytest.mark.parametrize("form", task.FORMATS)
@pytest.mark.parametrize("locale", task.LOCALES)
def test_a_date_reads_back_from_its_whole_source_by_the_locales_own_words(locale, form):
    found = task.examples(3, 60, (5, 20), locales=[locale], forms=[form])
    for example in found:
        assert read(example.source, locale).isoformat() == example.target
        assert example.source[example.start : example.stop] == task.written(
            date.fromisoformat(example.target), locale, form
        )
    assert len({example.target[5:7] for example in found}) > 6  # many months


def test_full_dates_name_the_weekday_and_long_ones_do_not():
    day = date(2014, 9, 1)
    assert task.written(day, "en_GB", "full") == "Monday, 1 September 2014"
    assert task.written(day, "en_GB", "long") == "1 September 2014"
    assert task.written(day, "hu_HU", "full") == "2014. szeptember 1., hétfő"


def test_there_are_twelve_locales_and_each_comes_with_both_formats():
    assert len(set(task.LOCALES)) == 12
    found = {(example.locale, example.form) for example in task.examples(0, 600, (0, 0))}
    assert found == {(locale, form) for locale in task.LOCALES for form in task.FORMATS}


def test_a_seed_gives_its_examples_again_and_another_seed_gives_others():
    assert task.examples(5, 20, (0, 30)) == task.examples(5, 20, (0, 30))
    assert task.examples(5, 20, (0, 30)) != task.examples(6, 20, (0, 30))
    assert task.examples(5, 30, (0, 30))[:20] == task.examples(5, 20, (0, 30))


@pytest.mark.parametrize(("least", "most"), [(0, 4), (60, 63), (7, 7)])
def test_filler_keeps_to_its_lengths_and_reaches_both_ends_on_both_sides(least, most):
    found = task.examples(0, 200, (least, most))
    for lengths in ([e.start for e in found], [len(e.source) - e.stop for e in found]):
        assert min(lengths) == least
        assert max(lengths) == most


def test_filler_is_small_letters_and_single_spaces_without_a_word_of_a_date():
    for example in task.examples(1, 400, (0, 80)):
        head, tail = example.source[: example.start], example.source[example.stop :]
        assert re.fullmatch(r"([a-z]+ )*", head)
        assert re.fullmatch(r"( [a-z]+)*", tail)
        assert not task.date_words() & {*head.split(), *tail.split()}


def test_words_of_dates_are_known_and_drawn_again(monkeypatch):
    assert {"september", "szeptember", "de", "lunes"} <= task.date_words()
    monkeypatch.setattr(task, "LETTERS", "de")  # `de` would come soon
    import random

    words = [word for seed in range(200) for word in task.filler(random.Random(seed), 12).split()]
    assert "ed" in words
    assert "de" not in words


def test_the_source_alphabet_holds_every_character_of_many_examples():
    assert {letter for e in task.examples(2, 500, (0, 30)) for letter in e.source} <= {*task.source_letters()}


def test_training_and_test_draw_different_examples_with_the_stated_filler():
    from attnlab_evaluations.tasks.dates.training import held_out, training_batches

    trained = [example for batch in training_batches(0, 10, 20) for example in batch]
    tested = held_out(200)
    assert max(max(e.start, len(e.source) - e.stop) for e in trained) == 30
    assert min(min(e.start, len(e.source) - e.stop) for e in tested) == 60
    assert not {e.source for e in trained} & {e.source for e in tested}
    assert len({e.source for e in trained}) > 195
    assert trained != [example for batch in training_batches(1, 10, 20) for example in batch]


def test_a_batch_holds_sources_of_like_length_and_long_ones_do_not_come_last():
    from attnlab_evaluations.tasks.dates.training import training_batches

    batches = list(training_batches(0, 11, 20))
    assert [len(batch) for batch in batches] == [20] * 11
    spans = [(min(lengths), max(lengths)) for b in batches for lengths in [[len(e.source) for e in b]]]
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(sorted(spans[:8])))
    assert spans[:8] != sorted(spans[:8])
