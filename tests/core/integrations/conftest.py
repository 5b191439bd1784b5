"""A seam at which one call is held while another runs, for tests of calls that overlap."""

import threading

import pytest
import torch

WAIT = 60  # seconds until a test that hangs fails


class Seam:
    """Holds the first of two calls where `pause` is called in it, until the second is `inside` there too, or `over`."""

    def __init__(self, until):
        self.until, self.first = until, None
        self.arrived, self.reached, self.done = threading.Event(), threading.Event(), threading.Event()

    def pause(self, *_, **__):
        if threading.current_thread() is self.first:
            self.arrived.set()
            assert (self.reached if self.until == "inside" else self.done).wait(WAIT)
        elif self.first is not None and not self.reached.is_set():
            self.reached.set()
            if self.until == "inside":  # the first goes on to its end while this one is held
                self.first.join(WAIT)

    def run(self, first, second):
        """What both give, the second begun while the first is held."""
        found = {}

        def kept(name, call):
            try:
                found[name] = call()
            except Exception as error:
                found[name] = error

        self.first = threading.Thread(target=kept, args=("first", first))
        other = threading.Thread(target=kept, args=("second", second))
        self.first.start()
        assert self.arrived.wait(WAIT), found.get("first")
        other.start()
        other.join(WAIT)
        self.done.set()
        self.first.join(WAIT)
        return found["first"], found["second"]

    def assert_alone(self, first, second):
        """Both calls give, overlapping, what each gives alone."""
        wanted = first(), second()
        for one, other in zip(self.run(first, second), wanted, strict=True):
            assert not isinstance(one, Exception), one
            torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.fixture(params=["inside", "over"])
def seam(request):
    """`Seam` in both ways: the second call is held at the seam too, or runs to its end while the first is held."""
    return Seam(request.param)


@pytest.fixture
def seam_over():
    """A `Seam` whose second call runs to its end while the first is held."""
    return Seam("over")
