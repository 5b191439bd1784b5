"""F01: calls that overlap do not meet: each gets what it gets alone, from threads, from within itself, and after an error.

A hook or a function that the call itself runs, the seam, holds the first call between what was noted of it and its attention.
"""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab.catalogue import use_registry
from attnlab.integrations.timm import TimmAttention
from attnlab.integrations.torch_mha import MultiheadAttention

WAIT = 60  # seconds until a test that hangs fails


def module_of(kind):
    """`(call, where the seam is put)` for one entrance; `call(n, causal)` attends over n tokens."""
    torch.manual_seed(0)
    if kind == "attend":

        def call(n, causal):
            q = torch.linspace(-1, 1, 2 * n * 4).view(1, 2, n, 4)
            return attnlab.attend(q, q, q, score_mod=seams.get("mod"), causal=causal, need_weights=n == 5)

        seams = {}
        return call, lambda pause: seams.update(mod=lambda score, *_: (pause(), score)[1])
    if kind == "variant":
        made = attnlab.create("additive", num_heads=2, head_dim=4)

        def call(n, causal):
            q = torch.linspace(-1, 1, 2 * n * 4).view(1, 2, n, 4)
            return made(q, q, q, causal=causal, need_weights=n == 5)[:2]

        return call, made.register_forward_pre_hook
    if kind == "MultiHeadAttention":
        layer = attnlab.MultiHeadAttention(8, 2, variant="gated_delta", conv_size=3)
        x = torch.randn(1, 9, 8)
        return (
            lambda n, causal: layer(x[:, :n], causal=True, state=layer.init_state(1)).out,
            layer.attention.register_forward_pre_hook,
        )
    if kind == "drop-in":
        layer, x = MultiheadAttention(8, 2, variant="gated", batch_first=True).eval(), torch.randn(1, 9, 8)

        def call(n, causal):
            mask = nn.Transformer.generate_square_subsequent_mask(n)
            return layer(x[:, :n], x[:, :n], x[:, :n], attn_mask=mask, is_causal=True, need_weights=False)[0]

        return call, layer.attention.register_forward_pre_hook
    if kind == "replace":
        inner = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        model, x = nn.TransformerEncoder(inner, 2, enable_nested_tensor=False).eval(), torch.randn(1, 9, 8)
        attnlab.replace(model, "additive")

        def call(n, causal):
            mask = nn.Transformer.generate_square_subsequent_mask(n) if causal else None
            return model(x[:, :n], mask=mask, is_causal=causal)

        return call, model.layers[0].self_attn.attention.register_forward_pre_hook
    assert kind == "timm"
    layer, x = TimmAttention(timms(), "gated"), torch.randn(1, 9, 8)
    return lambda n, causal: layer(x[:, :n], is_causal=True), layer.attention.register_forward_pre_hook


def timms():
    """What `TimmAttention` looks at of timm's own class."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim, self.scale = 2, 4, 0.5
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.q_norm, self.k_norm, self.proj_drop = nn.Identity(), nn.Identity(), nn.Identity()
            self.attn_drop = nn.Dropout(0.0)

    Attention.__module__, Attention.__qualname__ = "timm.layers.attention", "Attention"
    return Attention()


@pytest.mark.parametrize("kind", ["attend", "variant", "MultiHeadAttention", "drop-in", "replace", "timm"])
def test_calls_from_two_threads_give_what_each_gives_alone(kind, seam):
    call, put = module_of(kind)
    put(seam.pause)
    with torch.no_grad():
        seam.assert_alone(lambda: call(9, False), lambda: call(5, True))


def test_an_output_with_a_graph_and_one_without_do_not_meet(seam):
    """Modes of torch belong to the thread: the first call records a graph, the second does not."""
    call, put = module_of("variant")
    put(seam.pause)

    def without():
        with torch.no_grad():
            return call(5, True)[0]

    first, second = seam.run(lambda: call(9, False)[0], without)
    assert (first.requires_grad, second.requires_grad) == (True, False)


# -- capture ------------------------------------------------------------------------------------------------


def test_each_thread_captures_its_own_calls(seam):
    layer, x = attnlab.MultiHeadAttention(8, 2), torch.randn(1, 9, 8)
    layer.out_projection.register_forward_pre_hook(seam.pause)

    def captured(n):
        with attnlab.capture(layer) as kept:
            layer(x[:, :n])
        return dict(kept.maps)

    seam.assert_alone(lambda: captured(9), lambda: captured(5))
    assert not layer.attention._forward_hooks


def test_a_call_of_another_thread_within_a_capture_is_left_alone(seam):
    """The variant has no weights to give, so that asking for some in the other thread would refuse its call."""
    layer, x = attnlab.MultiHeadAttention(8, 2, variant="flash"), torch.randn(1, 9, 8)
    layer.query_projection.register_forward_pre_hook(seam.pause)

    def captured():
        with contextlib.suppress(attnlab.UnsupportedRequest), attnlab.capture(layer):
            layer(x)
        return "refused"

    first, second = seam.run(captured, lambda: layer(x))
    assert first == "refused"
    assert second.weights is None


def test_weights_asked_for_by_one_thread_come_to_that_thread_alone(seam):
    layer, x = attnlab.MultiHeadAttention(8, 2), torch.randn(1, 9, 8)

    def asked(n, want):
        with attnlab.capture(layer) as kept:
            layer.attention.register_forward_pre_hook(seam.pause)  # behind the one that asks
            return layer(x[:, :n], need_weights=want).weights is not None, kept.maps["attention"].shape[-1]

    assert seam.run(lambda: asked(9, True), lambda: asked(5, False)) == ((True, 9), (False, 5))


def test_captures_within_one_another_and_calls_within_calls_are_kept_apart():
    layer, x, inner = attnlab.MultiHeadAttention(8, 2), torch.randn(1, 9, 8), []

    def again(module, args):
        if not inner:
            inner.append(None)
            inner.append(layer(x[:, :4], need_weights=True).weights)

    with attnlab.capture(layer) as outside, attnlab.capture(layer) as inside:
        layer.attention.register_forward_pre_hook(again)
        output = layer(x)
    assert output.weights is None
    assert inner[1].shape[-1] == 4
    assert outside.maps["attention"].shape[-1] == inside.maps["attention"].shape[-1] == 9


def test_a_call_that_fails_within_a_capture_leaves_nothing_behind():
    layer, x = attnlab.MultiHeadAttention(8, 2), torch.randn(1, 9, 8)
    with attnlab.capture(layer) as kept:
        with pytest.raises(attnlab.InvalidInput):
            layer(x, need_weights=True, key_mask=torch.ones(3, 3, dtype=torch.bool))
        assert layer(x).weights is None
    assert kept.maps["attention"].shape[-1] == 9


# -- the registry -------------------------------------------------------------------------------------------


def test_a_name_that_changes_while_it_is_looked_up_serves_its_old_meaning_to_no_later_call(seam_over):
    from attnlab.registry import Registry

    registry, seam = Registry.default(), seam_over

    class Old(type(attnlab.create("dot_product", num_heads=1, head_dim=2))):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            seam.pause()

    class New(Old):
        pass

    registry.register("overlapping", Old)
    q = torch.randn(1, 1, 3, 2)
    before = attnlab.default_registry()
    use_registry(registry)
    try:
        first, second = seam.run(
            lambda: attnlab.attend(q, q, q, "overlapping").out,
            lambda: registry.register("overlapping", New, replaces=True),
        )
        assert second is None
        assert torch.equal(first, attnlab.attend(q, q, q, "overlapping").out)
        assert type(attnlab.create("overlapping", num_heads=1, head_dim=2)) is New
        assert type(_instance_of("overlapping")) is New
    finally:
        use_registry(before)


def _instance_of(name):
    from attnlab import functional

    return next(made for key, made in functional._instances.items() if key[0] == name)


def test_a_class_that_is_imported_while_its_name_is_registered_anew_is_forgotten(monkeypatch, seam_over):
    from attnlab.registry import Registry, loading

    registry, load = Registry.default(), loading.load_class
    monkeypatch.setattr(loading, "load_class", lambda entry: (load(entry), seam_over.pause())[0])

    class New(type(attnlab.create("flash", num_heads=1, head_dim=2))):
        pass

    first, _ = seam_over.run(
        lambda: registry.variant_class("dot_product"), lambda: registry.register("dot_product", New, replaces=True)
    )
    assert first is not New
    assert registry.variant_class("dot_product") is New


def test_names_that_two_threads_register_are_both_there(monkeypatch):
    from attnlab.registry import Registry, _registry

    registry, kind = Registry.default(), type(attnlab.create("dot_product", num_heads=1, head_dim=2))
    merge, started = _registry.merge, []

    def slow(reads):
        if not started:
            started.append(threading.Thread(target=registry.register, args=("second", kind)))
            started[0].start()
            started[0].join(0.2)  # it waits for this registration to end, or it is over by then
        return merge(reads)

    monkeypatch.setattr(_registry, "merge", slow)
    registry.register("first", kind)
    started[0].join(WAIT)
    assert {"first", "second"} <= set(registry.names())


# -- recomputation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "drop-in"])
def test_what_is_computed_again_in_a_thread_that_goes_back_is_what_was_computed(kind, reentrant):
    if kind == "drop-in":
        layer = MultiheadAttention(8, 2, variant="additive", batch_first=True)

        def run(x):
            return layer(x, x, x, need_weights=False)[0]

    else:
        layer = attnlab.MultiHeadAttention(8, 2, variant="gated_delta")

        def run(x):
            return layer(x, causal=True).out

    inputs = [torch.randn(1, n, 8, requires_grad=True) for n in (9, 5)]
    wanted = [torch.autograd.grad(run(x).square().sum(), x)[0] for x in inputs]
    outputs = [checkpoint(run, x, use_reentrant=reentrant).square().sum() for x in inputs]
    threads = [threading.Thread(target=output.backward) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    torch.testing.assert_close([x.grad for x in inputs], wanted)
