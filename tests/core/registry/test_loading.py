"""From a name to a module: what is imported when, and how each way of going wrong is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab.errors import InvalidInput, PluginError, RegistryFileError, VariantUnavailable
from attnlab.registry import Registry, devices, loading
from attnlab.registry.trust import trust

Write = Callable[[str, str], Path]
HEAD = "version: 1\nvariants:\n"
MEAN = '''
from attnlab import Attention, AttentionOutput, Capabilities, InvalidInput

class Mean(Attention):
    """The mean of the values."""
    formula = "mean_of_values"
    capabilities = Capabilities(
        cross_lengths=True, backward=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"})
    )

    def __init__(self, *, power=1.0, sizes=(1,), mode="plain", **dims):
        super().__init__(**dims)
        self.options = {"power": power, "sizes": sizes, "mode": mode}
        if mode == "own":
            raise InvalidInput("mean: mode 'own' is refused by the class itself")
        if mode == "crash":
            raise KeyError("lost")
        power is None or power < 0

    def attend(self, query, key, value, call):
        mean = value.mean(-2, keepdim=True)
        return AttentionOutput(mean.expand(*query.shape[:-1], value.shape[-1]).clone())

class Fixed(Attention):
    attend = Mean.attend
    def __init__(self, *, rank, **dims):
        super().__init__(**dims)

class Greedy(Attention):
    attend = Mean.attend
    def __init__(self, **anything):
        super().__init__(num_heads=anything["num_heads"], head_dim=anything["head_dim"])
        self.options = anything

class Newer(Attention):
    attend = Mean.attend
    api_version = 99

function = lambda: None
number = 3
'''
DIMS: dict[str, Any] = {"num_heads": 2, "head_dim": 4}


@pytest.fixture
def make(write: Write) -> Callable[[str], Registry]:
    """A registry with the one row `x`, whose target file holds the classes above."""
    write("code/mean.py", MEAN)

    def registry(fields: str = "target: 'code/mean.py:Mean'", more: str = "") -> Registry:
        return Registry.from_files(write("reg.yaml", f"{HEAD}  x: {{{fields}}}\n{more}"))

    return registry


def test_a_path_target_runs_under_its_registry_name(make: Callable[..., Registry]) -> None:
    variant = make().create("x", **DIMS)
    assert isinstance(variant, attnlab.Attention)
    assert variant.name == "x"
    value = torch.randn(1, 2, 3, 4)
    out = variant(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 4), value).out
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(1, 2, 5, 4))


def test_the_rows_options_apply_under_the_callers(make: Callable[..., Registry]) -> None:
    registry = make("target: 'code/mean.py:Mean', options: {power: 1e-6, sizes: [1, 2], mode: null}")
    variant = registry.create("x", **DIMS, mode="given")
    assert variant.options == {"power": 1e-6, "sizes": [1, 2], "mode": "given"}
    assert registry.create("x", **DIMS).options["mode"] == "plain", "null means the class's own default"
    assert registry.create("x", **DIMS, power=None).options["power"] is None, "the caller's None is passed on"


def test_two_instances_share_no_option_value(make: Callable[..., Registry]) -> None:
    registry = make("target: 'code/mean.py:Mean', options: {sizes: [1]}")
    registry.create("x", **DIMS).options["sizes"].append(2)
    assert registry.create("x", **DIMS).options["sizes"] == [1]


def test_a_preset_creates_its_parents_class_with_its_own_options(make: Callable[..., Registry]) -> None:
    registry = make("target: 'code/mean.py:Mean', options: {power: 2}", "  p: {extends: x, options: {power: 3}}\n")
    assert registry.variant_class("p") is registry.variant_class("x")
    preset = registry.create("p", **DIMS)
    assert (preset.name, preset.options["power"]) == ("p", 3)


def test_an_unknown_option_is_refused_before_any_import_where_the_row_lists_options(write: Write) -> None:
    write("code/bomb.py", "raise SystemExit('imported')")
    registry = Registry.from_files(
        write("r.yaml", f"{HEAD}  x: {{target: 'code/bomb.py:C', options: {{hidden_size: 3}}}}\n")
    )
    with pytest.raises(
        InvalidInput, match=r"x: unknown option 'hiden_size'; did you mean 'hidden_size'\? accepted: hidden_size"
    ):
        registry.create("x", **DIMS, hiden_size=3)


@pytest.mark.parametrize("listed", ["", ", options: {}"])
def test_an_unknown_option_is_refused_by_the_class_where_the_row_lists_none(
    make: Callable[..., Registry], listed: str
) -> None:
    tail = "it accepts none" if listed else r"did you mean 'power'\? accepted: mode, power, sizes"
    with pytest.raises(InvalidInput, match=f"x: unknown option 'powr'; {tail}"):
        make(f"target: 'code/mean.py:Mean'{listed}").create("x", **DIMS, powr=3)


def test_an_option_of_the_file_that_the_class_does_not_accept_names_its_place(make: Callable[..., Registry]) -> None:
    registry = make("target: 'code/mean.py:Mean', options: {powr: 1}")
    with pytest.raises(
        RegistryFileError,
        match=r"reg\.yaml:3:52: variants\.x\.options\.powr: Mean accepts no such option; did you mean 'power'",
    ):
        registry.create("x", **DIMS)


def test_an_option_without_a_default_is_asked_for(make: Callable[..., Registry]) -> None:
    with pytest.raises(InvalidInput, match="x: the option 'rank' has no default; give rank="):
        make("target: 'code/mean.py:Fixed'").create("x", **DIMS)
    assert make("target: 'code/mean.py:Fixed'").create("x", **DIMS, rank=1).name == "x"


def test_a_class_that_takes_anything_is_given_what_its_row_lists(make: Callable[..., Registry]) -> None:
    registry = make("target: 'code/mean.py:Greedy', options: {whatever: null}")
    assert registry.create("x", **DIMS, whatever=1).options["whatever"] == 1
    with pytest.raises(InvalidInput, match="unknown option 'whatever'; it accepts none"):
        make("target: 'code/mean.py:Greedy'").create("x", **DIMS, whatever=1)


def test_an_error_of_the_class_itself_passes_under_the_registry_name(make: Callable[..., Registry]) -> None:
    with pytest.raises(InvalidInput, match=r"^x: mode 'own' is refused by the class itself$"):
        make().create("x", **DIMS, mode="own")
    with pytest.raises(InvalidInput, match="num_heads must be an int of 1 or more"):
        make().create("x", num_heads=0, head_dim=4)


def test_a_type_error_of_the_class_is_the_callers_input(make: Callable[..., Registry]) -> None:
    with pytest.raises(InvalidInput, match=r"x: '<' not supported .*\(options: power='three'\)") as caught:
        make().create("x", **DIMS, power="three")
    assert isinstance(caught.value.__cause__, TypeError)


def test_any_other_error_of_the_class_is_the_plugins(make: Callable[..., Registry]) -> None:
    with pytest.raises(
        PluginError, match=r"x \(target code/mean\.py:Mean, from .*reg\.yaml:3\): making it failed: KeyError: 'lost'"
    ):
        make().create("x", **DIMS, mode="crash")


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("function", "expected a class that derives from attnlab.Attention, got a function"),
        ("number", "expected a class that derives from attnlab.Attention, got 3"),
        ("Capabilities", "expected a class that derives from attnlab.Attention, got the class Capabilities"),
        ("Attention", "expected a class that derives from attnlab.Attention, got the class Attention"),
        ("Meen", r"the module has no class 'Meen'; did you mean 'Mean'\? known: Fixed, Greedy, Mean, Newer"),
        ("Newer", r"written for api_version 99, this attnlab provides 1"),
    ],
)
def test_a_target_that_is_no_variant_is_a_plugin_error(
    make: Callable[..., Registry], attribute: str, words: str
) -> None:
    registry = make(f"target: 'code/mean.py:{attribute}'")
    with pytest.raises(PluginError, match=words) as caught:
        registry.variant_class("x")
    assert str(caught.value).startswith(f"x (target code/mean.py:{attribute}, from ")
    assert registry.info("x").unavailable == str(caught.value), "listing tells it after the attempt"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("import no_such_thing.part", VariantUnavailable, "ModuleNotFoundError: No module named 'no_such_thing'; install 'no_such_thing', which it imports"),
        ("from json import no_such", VariantUnavailable, "a package that it imports is missing, broken or of another version; see `attnlab doctor`"),
        ("import json.no_such", VariantUnavailable, "'json' belongs to Python itself, and this Python lacks 'json.no_such'"),
        ("import pluggy.no_such", VariantUnavailable, "'pluggy' is installed and has no 'pluggy.no_such'; install a version of it that has"),
        ("import attnlab.no_such", VariantUnavailable, "this attnlab has no module 'attnlab.no_such'; install a release of the plugin that is made for it"),
        ("from . import helper", VariantUnavailable, "a file that is named by its path belongs to no package; put both into a package"),
        ("import beside", VariantUnavailable, "'beside' lies beside the target, whose folder is not on Python's path; put both into a package"),
        ("import beside_too.part", VariantUnavailable, "'beside_too' lies beside the target"),
        ("import attnlab; raise attnlab.VariantUnavailable('get a licence')", VariantUnavailable, "VariantUnavailable: get a licence$"),
        ("def broken(:", PluginError, r"SyntaxError: invalid syntax \(plug\.py, line 1\); the plugin is broken"),
        ("raise RuntimeError('no GPU\\nhere')", PluginError, "RuntimeError: no GPU here; the plugin is broken"),
        ("raise SystemExit(3)", PluginError, "SystemExit: 3; the plugin is broken"),
        ("1/0", PluginError, "ZeroDivisionError"),
        ("import warnings; warnings.warn('old')", PluginError, "UserWarning: old"),
        ("x = '\\0", PluginError, "SyntaxError"),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_be_imported_says_why_and_the_cause_is_chained(
    write: Write, source: str, error: type[Exception], words: str
) -> None:
    write("plug.py", source)
    write("beside.py", "")
    write("beside_too/part.py", "")
    file = write("reg.yaml", f"{HEAD}  x: {{target: 'plug.py:C'}}\n  y: {{target: 'json:C'}}\n")
    registry = Registry.from_files(file)
    before = set(sys.modules)
    with pytest.raises(error, match=words) as caught:
        registry.create("x", **DIMS)
    assert str(caught.value).startswith(f"x (target plug.py:C, from {file}:3): cannot be imported: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert not [m for m in set(sys.modules) - before if m.startswith("attnlab.registry.targets.")], (
        "nothing half-imported stays"
    )
    assert registry.info("y").unavailable is None


def test_a_part_that_the_plugins_own_package_lacks_is_not_something_to_install(
    install: Callable[..., Path], write: Write
) -> None:
    install("stranger-half", "stranger_half", {"attn.py": "import stranger_half.kernels"})
    registry = Registry.from_files(write("r.yaml", f"{HEAD}  x: {{target: 'stranger_half.attn:C'}}\n"))
    with pytest.raises(VariantUnavailable) as caught:
        registry.create("x", **DIMS)
    said = str(caught.value)
    assert said.endswith("there is no module 'stranger_half.kernels': reinstall 'stranger_half', or correct the name")
    assert "pip install" not in said


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "install 'torch', which it imports"),
        (
            ModuleNotFoundError("No module named 'attnlab.validation.arguments'", name="attnlab.validation.arguments"),
            "there is no module 'attnlab.validation.arguments': reinstall 'attnlab', or correct the name",
        ),
        (ModuleNotFoundError("No module named '_ctypes'", name="_ctypes"), "'_ctypes' belongs to Python itself"),
        (ImportError("cannot import name 'x' from 'torch'", name="torch"), "see `attnlab doctor`"),
        (OSError("libcublas.so.12: cannot open shared object file"), "see `attnlab doctor`"),
        (RuntimeError("operator torchvision::nms does not exist"), "see `attnlab doctor`"),
    ],
    ids=["no torch", "attnlab in pieces", "Python in pieces", "old torch", "torch in pieces", "torch that raises"],
)
def test_what_attnlab_itself_cannot_import_is_told_truthfully(
    make: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch, fault: Exception, hint: str
) -> None:
    import builtins

    plain, plain_exists = builtins.__import__, loading.exists

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "attnlab.interface":
            raise fault
        return plain(name, *rest, **named)

    registry = make()
    monkeypatch.setattr(loading, "exists", lambda module: module != "torch" and plain_exists(module))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(VariantUnavailable) as caught:
        registry.create("x", **DIMS)
    said = str(caught.value)
    assert said.startswith(f"x: attnlab.interface cannot be imported: {type(fault).__name__}: {fault}; ")
    assert hint in said
    assert "install attnlab." not in said
    assert caught.value.__cause__ is fault


def test_an_interrupt_passes(write: Write) -> None:
    write("plug.py", "raise KeyboardInterrupt")
    registry = Registry.from_files(write("reg.yaml", f"{HEAD}  x: {{target: 'plug.py:C'}}\n"))
    with pytest.raises(KeyboardInterrupt):
        registry.create("x", **DIMS)


def test_a_plugin_that_was_mended_works_without_a_new_registry(write: Write) -> None:
    write("plug.py", "raise RuntimeError")
    registry = Registry.from_files(write("reg.yaml", f"{HEAD}  x: {{target: 'plug.py:Mean'}}\n"))
    with pytest.raises(PluginError):
        registry.create("x", **DIMS)
    write("plug.py", MEAN)
    assert registry.create("x", **DIMS).name == "x"
    assert registry.info("x").unavailable is None


def test_a_compiled_file_beside_a_trusted_source_is_never_run(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_built_in: None
) -> None:
    """A clone may carry a .pyc that claims to belong to the source and needs no matching timestamp (PEP 552)."""
    import importlib.util
    import py_compile

    source = write("plug.py", "raise SystemExit('the compiled file ran')")
    cached = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    write("plug.py", MEAN)
    file = write("attnlab.yaml", f"{HEAD}  x: {{target: 'plug.py:Mean'}}\n")
    monkeypatch.chdir(tmp_path)
    trust(file)
    assert Registry.default().create("x", **DIMS).name == "x"


def test_classes_of_a_path_target_keep_their_source(make: Callable[..., Registry]) -> None:
    import inspect

    assert "The mean of the values" in inspect.getsource(make().variant_class("x"))


def test_the_same_file_is_run_once_for_several_variants(write: Write) -> None:
    write("plug.py", MEAN)
    rows = "  x: {target: 'plug.py:Mean'}\n  y: {target: 'plug.py:Greedy'}\n"
    registry = Registry.from_files(write("reg.yaml", HEAD + rows))
    assert registry.variant_class("x").__module__ == registry.variant_class("y").__module__


# Registering a class of the running program


def test_a_registered_class_is_a_variant_like_any_other(make: Callable[..., Registry]) -> None:
    registry = make()
    mean = registry.variant_class("x")
    registry.register("mine", mean, summary="of the program", options={"power": 2}, capabilities=["cross_lengths"])
    info = registry.info("mine")
    assert (info.layer, info.file, info.line, info.summary) == ("program", None, 0, "of the program")
    assert (info.family, info.formula, info.capabilities) == ("plain", "mean_of_values", ("cross_lengths",))
    assert info.target.endswith(":Mean")
    assert info.unavailable is None
    assert registry.create("mine", **DIMS).options["power"] == 2
    with pytest.raises(InvalidInput, match="unknown option 'mode'"):
        registry.create("mine", **DIMS, mode="plain")


def test_a_registered_class_takes_a_taken_name_only_when_it_says_so(make: Callable[..., Registry]) -> None:
    registry = make(more="  p: {extends: x}\n")
    greedy = make("target: 'code/mean.py:Greedy'").variant_class("x")
    with pytest.raises(InvalidInput, match=r"'x' is already registered by .*reg\.yaml:3; give replaces=True"):
        registry.register("x", greedy)
    registry.register("x", greedy, replaces=True)
    assert registry.variant_class("x") is greedy
    assert registry.variant_class("p") is greedy, "a preset follows the name that it extends"
    with pytest.raises(InvalidInput, match="there is no 'z' to replace"):
        registry.register("z", greedy, replaces=True)


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("My-Name", {}, "a name is lower-case letters"),
        (3, {}, "a name is lower-case letters"),
        ("mine", {"sumary": "x"}, "unknown fact 'sumary'"),
        ("mine", {"options": {"head_dim": 1}}, "'head_dim' is an argument of create"),
        ("mine", {"target": "a:B"}, "unknown fact 'target'"),
    ],
)
def test_a_bad_registration_changes_nothing(
    make: Callable[..., Registry], name: Any, facts: dict[str, Any], words: str
) -> None:
    registry = make()
    with pytest.raises(InvalidInput, match=words):
        registry.register(name, registry.variant_class("x"), **facts)
    assert registry.names() == ["x"]
    with pytest.raises(InvalidInput, match=r"expected a class that derives from attnlab\.Attention, got 3"):
        registry.register("mine", 3)  # type: ignore[arg-type]


def test_a_device_that_torch_alone_can_tell_of_is_asked_for_before_the_module_runs(
    make: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, "computes on cuda alone"])  # before torch is imported, and after
    monkeypatch.setattr(devices, "lacking", lambda _: next(answers))
    with pytest.raises(VariantUnavailable, match=r"^x: computes on cuda alone$"):
        make().create("x", **DIMS)


def test_every_built_in_variant_can_be_made_from_its_row() -> None:
    registry = Registry.default(project_dir=Path("/nonexistent"))
    assert registry.problems == []
    for name in registry.names():
        if registry.info(name).unavailable:
            with pytest.raises(VariantUnavailable, match=rf"^{name}: "):
                registry.create(name, num_heads=2, head_dim=8)
        else:
            assert registry.create(name, num_heads=2, head_dim=8).name == name
