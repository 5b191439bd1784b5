"""Characters as numbers: there and back, padding, and what a vocabulary lacks."""

import pytest

from attnlab import InvalidInput
from attnlab_evaluations.tasks.dates import symbols, task


def test_a_text_comes_back_from_its_numbers_and_ends_at_the_end_symbol():
    iso = symbols.target_vocabulary()
    numbers = iso.encode("2014-09-01")
    assert min(numbers) >= symbols.RESERVED
    assert max(numbers) < iso.size
    assert iso.decode([*numbers, symbols.EOS, *numbers]) == "2014-09-01"
    assert iso.decode([symbols.PAD, *numbers[:2]]) == "?20"


def test_a_character_that_the_vocabulary_lacks_is_named():
    with pytest.raises(InvalidInput, match=r"got 'x' in '20x'"):
        symbols.target_vocabulary().encode("20x")


def test_a_batch_is_padded_on_the_right_and_every_target_ends():
    chosen = task.examples(0, 5, (0, 9))
    source, target = symbols.source_vocabulary(), symbols.target_vocabulary()
    numbers, lengths, wanted = symbols.batch(chosen, source, target)
    assert lengths.tolist() == [len(e.source) for e in chosen]
    assert numbers.shape == (5, max(lengths))
    for row, length, example in zip(numbers, lengths, chosen, strict=True):
        assert source.decode(row[:length].tolist()) == example.source
        assert (row[length:] == symbols.PAD).all()
    assert wanted.shape == (5, 11)
    assert (wanted[:, -1] == symbols.EOS).all()
