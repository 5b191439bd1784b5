"""What a table claims, on simulated machines: planted slowdowns are found, equal things are not told apart (F47, F48)."""

import math
import random

import pytest

from attnlab_evaluations.measure import claims
from attnlab_evaluations.measure.claims import OPEN, SAME, SLOWER

pytestmark = pytest.mark.no_torch
RUNS = 20
PLACE = 0.0045
"""The spread that a pair of instances has from its places in memory, which more rounds do not average out."""


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch):
    monkeypatch.setattr(claims, "RESAMPLES", 200)


def simulated(seed, *, noise, planted=0.0, rounds=40, groups=12, twin=0.0, place=PLACE):
    """A run's null controls and words. Group 0 holds the planted variant; beside it are equal and slow ones."""
    rng = random.Random(seed)

    def series(shift):
        middle = shift + rng.gauss(0, place)
        return [middle + rng.gauss(0, noise) for _ in range(rounds)]

    null = claims.pool(
        {(g,): [series(math.log1p(twin)) for _ in range(3)] for g in range(groups)}, claims=3 * groups + 1, seed=seed
    )
    measured = {(g, v): ((g,), series(shift)) for g in range(groups) for v, shift in enumerate((0.0, 0.5, 1.0))}
    measured["planted"] = ((0,), series(math.log1p(planted)))
    words = claims.decide(measured, null)
    equal = [words[g, 0] for g in range(groups)]
    return null, words["planted"], sum(w not in (SAME, OPEN) for w in equal)


@pytest.mark.parametrize(("planted", "least"), [(0.02, 10), (0.05, 19), (0.10, 20)])
def test_planted_slowdowns_are_found_and_large_ones_are_never_the_same(planted, least):
    found = [simulated(seed, noise=0.005, planted=planted, rounds=60)[1] for seed in range(RUNS)]
    assert found.count(SLOWER) >= least
    if planted > 0.02:
        assert SAME not in found


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03])
def test_runs_of_equal_things_claim_nothing(noise):
    found = [simulated(seed, noise=noise) for seed in range(RUNS)]
    assert sum(claimed > 0 or word == SLOWER for _, word, claimed in found) <= 1
    assert all(null.quiet for null, _, _ in found)


@pytest.mark.parametrize(("groups", "controls", "variants"), [(2, 1, 3), (10, 3, 8)])
@pytest.mark.parametrize("place", [0.005, 0.02])
def test_neither_few_controls_nor_many_ratios_make_equal_things_differ(groups, controls, variants, place):
    """All ratios of a group share the reference's place in memory (F48)."""
    rounds, claiming = claims.rounds_for(groups * variants) + 8, 0
    for seed in range(2 * RUNS):
        rng = random.Random(seed)

        def series(rng=rng):
            middle = rng.gauss(0, place)
            return [middle + rng.gauss(0, 0.005) for _ in range(rounds)]

        nulls, measured = {}, {}
        for g in range(groups):
            names = [series() for _ in range(variants + 1)]
            nulls[g,] = [claims.log_ratios(map(math.exp, series()), map(math.exp, n)) for n in names[:controls]]
            for v, name in enumerate(names[1:]):
                measured[g, v] = ((g,), [a - b for a, b in zip(name, names[0], strict=True)])
        words = claims.decide(measured, claims.pool(nulls, claims=len(measured), seed=seed))
        claiming += any(word not in (SAME, OPEN) for word in words.values())
    assert claiming <= RUNS // 5  # one run in ten: one in twenty, and two standard deviations of that count


def test_few_rounds_on_a_busy_machine_call_no_slowdown_the_same():
    for rounds in (3, 6, 12):
        words = [simulated(seed, noise=0.05, planted=0.1, rounds=rounds)[1] for seed in range(RUNS)]
        assert SAME not in words


def test_a_noisy_machine_claims_nothing_however_wide_its_null():
    for seed in range(RUNS):
        null, word, claimed = simulated(seed, noise=0.4, planted=0.1)
        assert not null.quiet
        assert null.sentence().startswith("machine too noisy")
        assert (word, claimed) == (OPEN, 0)


def test_a_twin_that_is_three_per_cent_slower_is_noise():
    assert not any(simulated(seed, noise=0.005, twin=0.03)[0].quiet for seed in range(RUNS))


def test_a_narrow_null_that_excludes_one_is_quiet():  # 1.006 [1.001, 1.010] on a quiet machine
    null = claims.pool({(g,): [[0.006 + 0.001 * (-1) ** n for n in range(20)]] for g in range(5)})
    assert null.pooled.low > 1
    assert null.quiet


def test_rounds_of_one_group_are_not_evidence_for_others():
    one = claims.pool({(0,): [[0.03] * 1000], **{(g,): [[0.0] * 12] for g in range(1, 4)}})
    assert one.pooled.high == pytest.approx(math.exp(0.03), rel=0.2)  # groups are drawn, not samples


def test_a_group_with_a_wide_null_of_its_own_or_none_claims_nothing():
    rng = random.Random(0)
    quiet = {(g,): [[rng.gauss(0, 0.003) for _ in range(20)] for _ in range(3)] for g in range(20)}
    null = claims.pool({**quiet, ("wide",): [[0.2 * (-1) ** n for n in range(20)]]})
    assert null.quiet
    slow = [1.0] * 20
    words = claims.decide({1: ((0,), slow), 2: (("wide",), slow), 3: (("without",), slow)}, null)
    assert words == {1: SLOWER, 2: OPEN, 3: OPEN}


def test_the_more_is_claimed_the_more_each_claim_needs():
    null = claims.Null({(0,): [[0.0] * 20]}, claims.Interval(1, 1, 1))
    ten_of_twelve = [0.1] * 11 + [-0.1]
    assert claims.decide({0: ((0,), ten_of_twelve)}, null) == {0: SLOWER}
    many = {n: ((0,), ten_of_twelve if n == 0 else [0.1, -0.1] * 6) for n in range(40)}
    assert set(claims.decide(many, null).values()) == {OPEN}


def test_too_few_rounds_for_95_per_cent_claim_nothing():
    null = claims.pool({(g,): [[0.0, 0.001, -0.001]] for g in range(30)})
    assert not null.quiet
    assert "from too few rounds" in null.sentence()
    assert "not measured" in claims.pool({}).sentence()


def test_rounds_suffice_for_the_first_claim_of_a_table():
    for count in (1, 20, 200, 2000):
        n = claims.rounds_for(count)
        ratios = [0.1] * (n - claims.SPARE_ROUNDS) + [-0.1] * claims.SPARE_ROUNDS
        assert claims.chance(ratios, claims.LEAST_FLOOR)[0] <= claims.ERROR_RATE / count
    assert claims.rounds_for(1) == 12
