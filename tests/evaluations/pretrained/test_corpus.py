"""The text to learn from: real sentences, none held out, and batches that need no padding."""

import pytest

from attnlab import VariantUnavailable
from attnlab_evaluations.tasks.compare.workloads.minilm import prose, topics_text
from attnlab_evaluations.tasks.minilm import corpus

pytestmark = pytest.mark.no_torch


def test_the_training_text_holds_no_sentence_of_the_help_topics(sentences):
    assert len(sentences) > 3000
    assert len(set(sentences)) == len(sentences)
    assert not set(sentences) & set(prose(topics_text()))


def test_docstrings_of_modules_classes_and_functions_are_read_and_a_broken_file_is_passed_over(tmp_path):
    text = '"""Of the module."""\nclass C:\n    """Of the class."""\n    async def f(self):\n        """Of f."""\n'
    (tmp_path / "good.py").write_text(text, encoding="utf-8")
    (tmp_path / "bad.py").write_text("def", encoding="utf-8")
    found = list(corpus.docstrings(sorted(tmp_path.iterdir())))
    assert found == ["Of the module.", "Of the class.", "Of f."]


def test_a_library_without_sources_is_one_sentence(tmp_path):
    with pytest.raises(VariantUnavailable, match="its sources are not in "):
        corpus.training_sentences(tmp_path)


def test_batches_hold_sentences_of_one_length_each_once_in_an_order_of_their_seed():
    tokens = [[n] * (1 + n % 3) for n in range(20)]
    found = corpus.batches(tokens, 2, seed=0)
    assert all(len(batch) == 2 and len(batch[0]) == len(batch[1]) for batch in found)
    numbers = [sentence[0] for batch in found for sentence in batch]
    assert len(set(numbers)) == len(numbers) == 18  # 7, 7 and 6 of a length: one is left of each odd group
    assert found == corpus.batches(tokens, 2, seed=0)
    assert found != corpus.batches(tokens, 2, seed=1)
