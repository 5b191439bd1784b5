"""A config names a variant with its options: it round-trips through YAML and JSON, and everything that takes a name takes it."""

import json

import pytest
import torch
import yaml

import attnlab
from attnlab import InvalidInput
from attnlab.integrations.torch_mha import MultiheadAttention
from attnlab.layers.choice import choice, in_words, storable

CONFIG = {"name": "sliding_window", "left": 2, "right": 1}
TRIPS = {
    "yaml": lambda config: yaml.safe_load(yaml.safe_dump(config)),
    "json": lambda config: json.loads(json.dumps(config)),
}


def full(name):
    """A config with every option that the registry lists for `name`."""
    return {"name": name, **attnlab.info(name).options}


def seeded(**config):
    torch.manual_seed(7)
    return attnlab.create(**config, num_heads=2, head_dim=8)


def test_some_registered_variants_list_options():
    assert sum(len(full(name)) > 1 for name in attnlab.names()) > 10


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("name", [n for n in attnlab.names() if attnlab.info(n).unavailable is None])
def test_a_config_round_trips_and_makes_the_variant_of_that_name(name, trip):
    config = full(name)
    back = TRIPS[trip](config)
    assert back == config
    made, plain = seeded(**back), seeded(name=name)
    assert (made.name, made.capabilities) == (plain.name, plain.capabilities)
    found, wanted = made.state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert made.options == plain.options


@pytest.mark.parametrize("trip", TRIPS)
def test_an_option_of_a_config_reaches_the_variant(trip):
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    made = attnlab.create(**TRIPS[trip](CONFIG), num_heads=2, head_dim=8)
    wanted = attnlab.attention(query, key, value, window=(2, 1))
    assert torch.equal(made(query, key, value).out, wanted)


@pytest.mark.parametrize("module", [attnlab.MultiHeadAttention, MultiheadAttention])
def test_a_module_takes_a_config_in_the_place_of_a_name(module):
    by_name = module(16, 2, variant="sliding_window", left=2, right=1)
    by_config = module(16, 2, variant=CONFIG)
    mixed = module(16, 2, variant={"name": "sliding_window", "left": 2}, right=1)
    for made in (by_config, mixed):
        made.load_state_dict(by_name.state_dict())
        tokens = torch.randn(1, 9, 16)
        found, wanted = (layer(tokens, tokens, tokens, need_weights=False)[0] for layer in (made, by_name))
        assert torch.equal(found, wanted)
    assert CONFIG == {"name": "sliding_window", "left": 2, "right": 1}


def test_a_config_carries_an_option_that_an_argument_of_torchs_module_has_the_name_of():
    made = MultiheadAttention(16, 2, bias=False, variant={"name": "additive", "bias": True})
    assert made.in_proj_bias is None
    assert made.attention.options["bias"] is True


@pytest.mark.parametrize("module", [attnlab.MultiHeadAttention, MultiheadAttention])
@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ({"left": 2}, {}, r"variant must be a registered name or a mapping such as .* got \{'left': 2\}"),
        (7, {}, r"variant must be a registered name or a mapping such as .* got 7"),
        ({"name": "sliding_window", 3: 2}, {}, r"names of a variant's options must be text, got 3"),
        (CONFIG, {"left": 3}, r"left is given twice"),
        ({"name": "dot_product", "num_heads": 2}, {}, r"num_heads is the module's, not the variant's"),
        ({"name": "dot_product", "head_dim": 8}, {}, r"head_dim is the module's, not the variant's"),
        ({"name": "sliding_window", "lfet": 2}, {}, r"sliding_window: unknown option 'lfet'"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(module, variant, options, message):
    with pytest.raises(InvalidInput, match=message) as raised:
        module(16, 2, variant=variant, **options)
    assert "\n" not in str(raised.value)


def test_options_that_json_cannot_hold_are_not_stored():
    assert storable("install", choice("install", "dot_product", {"sizes": (1, 2)})) == {
        "name": "dot_product",
        "sizes": [1, 2],
    }
    for value in (torch.zeros(1), float("nan"), {1, 2}):
        with pytest.raises(InvalidInput, match=r"install: .* such as JSON can hold"):
            storable("install", {"name": "dot_product", "option": value})


def test_a_config_is_told_in_words():
    assert in_words({"name": "dot_product"}) == "dot_product"
    assert in_words(CONFIG) == "sliding_window(left=2, right=1)"
