"""Timing with a fake clock: what is counted, paired, dropped and flagged."""

import math
import random

import pytest

from attnlab_evaluations.measure import timing


class Machine:
    """A clock that moves only when an operation runs, and counts synchronisations."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def clock(self):
        return self.now

    def synchronize(self):
        self.log.append("sync")

    def operation(self, name, seconds):
        durations = iter(seconds) if isinstance(seconds, list) else None

        def run():
            self.log.append(name)
            self.now += next(durations) if durations is not None else seconds

        return run


def measured(machine, operations, **more):
    options = {"reference": "a", "budget": 100.0, "seed": 0, "clock": machine.clock}
    return timing.measure(operations, **{**options, "synchronize": machine.synchronize, **more})


@pytest.mark.parametrize("seconds", [0.0001, 0.005, 1.0])
def test_a_sample_is_the_time_of_one_call_however_often_it_was_repeated(seconds):
    machine = Machine()
    found = measured(machine, {"a": machine.operation("a", seconds)})
    assert found.samples["a"] == pytest.approx([seconds] * len(found.samples["a"]))


def test_the_device_is_synchronised_before_both_readings_of_the_clock():
    machine = Machine()
    measured(machine, {"a": machine.operation("a", 1.0), "b": machine.operation("b", 1.0)})
    log = machine.log
    assert log.count("sync") == 2 * (log.count("a") + log.count("b"))
    for at, word in enumerate(log):
        if word != "sync":
            assert log[at - 1] == "sync"
            assert log[at + 1] == "sync"


def test_a_slow_first_call_does_not_reach_the_samples():
    machine = Machine()
    found = measured(machine, {"a": machine.operation("a", [5.0] + [0.01] * 999)})
    assert max(found.samples["a"]) == pytest.approx(0.01)


def test_every_round_runs_every_operation_in_a_new_order():
    machine = Machine()
    operations = {name: machine.operation(name, 0.2) for name in "abcd"}
    found = measured(machine, operations, max_rounds=12)
    calls = [word for word in machine.log if word != "sync"][8:]  # two warm-ups each
    rounds = [tuple(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 1
    assert {len(s) for s in found.samples.values()} == {len(rounds)}


def test_steady_operations_stop_as_converged():
    machine = Machine()
    found = measured(machine, {name: machine.operation(name, 0.5) for name in "ab"})
    assert found.stopped == "converged"
    assert len(found.samples["a"]) == timing.MIN_ROUNDS


def test_noisy_operations_go_on_until_the_rounds_are_used_up():
    machine = Machine()
    noise = random.Random(0)
    jumps = [0.01 * noise.uniform(1, 4) for _ in range(1000)]
    found = measured(machine, {"a": machine.operation("a", 0.01), "b": machine.operation("b", jumps)}, max_rounds=20)
    assert found.stopped == "rounds"
    assert len(found.samples["b"]) == 20


def test_rounds_stop_before_the_budget_is_overrun():
    machine = Machine()
    noise = [1.0, 3.0] * 500
    found = measured(machine, {"a": machine.operation("a", 1.0), "b": machine.operation("b", noise)}, budget=60.0)
    assert found.stopped == "budget"
    assert machine.now <= 2 * 1.0 + (1.0 + 3.0) + 60.0  # two warm-ups each, then the rounds


def test_what_is_known_not_to_fit_is_never_started():
    machine = Machine()
    operations = {"a": machine.operation("a", 0.01), "slow": machine.operation("slow", 1e9)}
    found = measured(machine, operations, expected={"a": 0.01, "slow": 60.0})
    assert "slow" not in machine.log
    assert found.over_budget == {"slow": 60.0}
    assert found.samples["a"]


def test_what_shows_in_its_warm_up_that_it_does_not_fit_is_left_out_of_the_rounds():
    machine = Machine()
    operations = {"a": machine.operation("a", 0.01), "slow": machine.operation("slow", 60.0)}
    found = measured(machine, operations)
    assert machine.log.count("slow") == 2  # the first call alone might carry one-time costs
    assert found.warm["slow"] == pytest.approx(60.0)
    assert set(found.over_budget) == {"slow"}
    assert "slow" not in found.samples


@pytest.mark.parametrize("first", [0.5, 29.0, 1000.0])
def test_one_slow_first_call_is_not_the_estimate_and_is_told_apart(first):  # F25
    machine = Machine()
    compiled = machine.operation("compiled", [first] + [0.00026] * 100_000)
    found = measured(machine, {"a": machine.operation("a", 0.01), "compiled": compiled}, budget=10.0)
    assert found.over_budget == {}
    assert found.first["compiled"] == first
    assert max(found.samples["compiled"]) == pytest.approx(0.00026)


def test_a_small_budget_measures_fewer_operations_with_all_their_rounds():  # F27
    machine = Machine()
    operations = {name: machine.operation(name, seconds) for name, seconds in (("a", 0.1), ("b", 0.2), ("c", 0.4))}
    found = measured(machine, operations, budget=7.0, min_rounds=20)
    assert set(found.samples) == {"a", "b"}
    assert found.over_budget == pytest.approx({"c": 0.4})
    assert len(found.samples["b"]) >= 20


def test_the_reference_and_its_control_come_before_cheaper_operations():
    kept = timing.choose(
        {"ref": 5.0, "null": 5.0, "cheap": 0.1, "dear": 9.0}, always=["ref", "null"], budget=41.0, calls=4
    )
    assert kept == ["ref", "null", "cheap"]


def test_an_estimate_that_one_call_can_settle_is_put_to_the_test():
    machine = Machine()
    operations = {"a": machine.operation("a", 0.01), "b": machine.operation("b", 0.02)}
    found = measured(machine, operations, expected={"a": 0.01, "b": 40.0})  # rounds of 40 s would not fit
    assert found.samples["b"]


def test_an_operation_that_fails_in_a_round_leaves_no_samples_and_the_others_stay_paired():
    machine = Machine()
    calls = []

    def breaks():
        calls.append(1)
        machine.now += 1.0
        if len(calls) == 4:
            raise MemoryError("not enough memory")

    found = measured(machine, {"a": machine.operation("a", 1.0), "b": breaks, "c": machine.operation("c", 2.0)})
    assert isinstance(found.failed["b"], MemoryError)
    assert set(found.samples) == {"a", "c"}
    assert len(found.samples["a"]) == len(found.samples["c"])


def test_a_failing_reference_leaves_nothing():
    machine = Machine()

    def breaks():
        raise ValueError("no")

    found = measured(machine, {"a": breaks, "b": machine.operation("b", 1.0)})
    assert found.samples == {}
    assert isinstance(found.failed["a"], ValueError)


def test_ratios_are_paired_within_a_round_so_common_drift_cancels():
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    found = timing.paired_ratio([2 * d for d in drift], drift)
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 6, 8, 12, 17, 40])
def test_the_interval_covers_the_true_median_as_often_as_its_level_says(rounds):  # F50
    rng = random.Random(rounds)
    draws = 2000
    found = [timing.median_interval([rng.lognormvariate(0, 0.2) for _ in range(rounds)]) for _ in range(draws)]
    level = found[0].level
    hits = sum(f.contains(1.0) for f in found)
    allowed = 4 * math.sqrt(draws * max(level * (1 - level), 1e-3))  # four binomial standard deviations
    assert abs(hits - draws * level) <= allowed
    assert (level >= timing.LEVEL) == (rounds >= 6)


def test_few_rounds_and_wide_spreads_are_flagged():
    assert timing.summarise([1.0] * 5).noisy
    assert not timing.summarise([1.0] * 6).noisy
    assert timing.summarise([1.0, 1.3, 0.8, 1.2, 0.7, 1.0]).noisy
    assert timing.summarise([1.0]).noisy


def test_the_exponent_has_an_interval_that_widens_with_the_noise():  # F50
    def found(noise, rounds=20):
        rng = random.Random(0)
        samples = [[n**1.5 * rng.lognormvariate(0, noise) for _ in range(rounds)] for n in (256, 512, 1024)]
        return timing.exponent_interval([256, 512, 1024], samples)

    for noise in (0.01, 0.1):
        assert found(noise).contains(1.5)
    assert found(0.1).high - found(0.1).low > 3 * (found(0.01).high - found(0.01).low)
    assert found(0.01).level == timing.LEVEL
    assert found(0.01, rounds=11).level == 0.0
    assert timing.exponent_interval([256], [[1.0]]) is None


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_its_power(power):
    lengths = [256, 512, 1024, 2048]
    assert timing.exponent(lengths, [3e-6 * n**power for n in lengths]) == pytest.approx(power)


def test_the_exponent_looks_at_the_longest_lengths_only():
    seconds = [1.0, 1.0, 1.0, 2.0, 4.0]
    assert timing.exponent([1, 2, 4, 8, 16], seconds) == pytest.approx(1.0)


def test_one_length_has_no_exponent():
    assert timing.exponent([256], [1.0]) is None
    assert timing.exponent([], []) is None


def test_a_gap_of_the_garbage_collector_is_restored_after_an_error():
    import gc

    machine = Machine()
    assert gc.isenabled()
    measured(machine, {"a": machine.operation("a", math.pi)})
    assert gc.isenabled()
