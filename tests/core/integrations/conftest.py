"""What the tests of adapters share: everything that an operation could leave behind in a model."""

from __future__ import annotations

import pytest


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
        "configs": [
            (path, id(one), sorted((w, _plain(v)) for w, v in vars(one).items())) for path, one in configs
        ],
        "tensors": [
            (name, id(x), x.double().sum().item()) for name, x in model.state_dict(keep_vars=True).items()
        ],
    }


@pytest.fixture(name="state_of", scope="session")
def _state_of():
    return state_of
