"""What the tests of adapters share: a seam at which one call is held while another runs, and all that an operation could leave in a model."""

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


def _configs(value, path, found):
    from transformers import PreTrainedConfig

    if isinstance(value, PreTrainedConfig) and id(value) not in {id(one) for _, one in found}:
        found.append((path, value))
        for word, inner in vars(value).items():
            _configs(inner, f"{path}.{word}", found)


def _plain(value):
    """A value that compares by `==` and holds nothing of the model: containers by their contents, other objects by identity."""
    if isinstance(value, dict):
        return [(str(key), _plain(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def state_of(model):
    """Everything of `model` that an operation could leave behind: modules, attributes, hooks, parameters, and its configs' trees."""
    configs = []
    for path, module in model.named_modules():
        for word, value in vars(module).items():
            if type(value).__name__.endswith("Config"):
                _configs(value, f"{path}.{word}", configs)
    return {
        "modules": [(path, id(module), type(module)) for path, module in model.named_modules()],
        "attributes": [
            (path, word, _plain(value))
            for path, module in model.named_modules()
            for word, value in sorted(vars(module).items())
        ],
        "configs": [(path, id(one), sorted((w, _plain(v)) for w, v in vars(one).items())) for path, one in configs],
        "tensors": [(name, id(x), x.double().sum().item()) for name, x in model.state_dict(keep_vars=True).items()],
    }


@pytest.fixture(name="state_of", scope="session")
def _state_of():
    return state_of
