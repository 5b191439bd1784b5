"""What the task is for: whole trainings, a minute together."""

import pytest

from attnlab_evaluations.frame.chosen import Chosen
from attnlab_evaluations.tasks.capacity import task, training
from attnlab_evaluations.tasks.capacity.recipe import Recipe

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["dot_product", "linearised"])
def test_eight_keys_fit_into_a_memory_of_width_sixteen(name):
    assert training.train(Chosen(name), 0, 8, task.CAPACITY, Recipe()).best.accuracy == 1


def test_the_delta_rule_overwrites_and_a_sum_that_knows_no_order_cannot():
    found = {
        name: training.train(Chosen(name), 0, 6, task.OVERWRITE, Recipe()).best.accuracy
        for name in ("delta_rule", "dot_product", "linearised")
    }
    assert found["delta_rule"] >= 0.99
    # Of a key that comes m times one value is the last: below 1/m on average, and more by chance where values repeat.
    assert found["dot_product"] < 0.8
    assert found["linearised"] < 0.8
