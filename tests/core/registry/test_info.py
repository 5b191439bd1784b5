"""What listing tells, and that availability is judged without running any of a variant's code."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab import API_VERSION
from attnlab.errors import AttnlabError, PluginError, UnknownVariant, VariantUnavailable
from attnlab.registry import Registry, devices, info

pytestmark = [pytest.mark.no_torch, pytest.mark.usefixtures("pretend_torch")]

Write = Callable[[str, str], Path]
Install = Callable[..., Path]
HEAD = "version: 1\nvariants:\n"


def one(write: Write, fields: str) -> Registry:
    return Registry.from_files(write("one.yaml", f"{HEAD}  x: {{{fields}}}\n"))


def unavailable(registry: Registry, error: type[AttnlabError]) -> str:
    """The reason in the listing, which using the variant must repeat under its name."""
    reason = registry.info("x").unavailable
    assert reason is not None
    with pytest.raises(error) as caught:
        registry.variant_class("x")
    assert str(caught.value) == f"x: {reason}"
    return reason


def test_what_a_row_does_not_state_is_empty(write: Write) -> None:
    found = one(write, "target: 'json:JSONDecoder'").info("x")
    assert (found.summary, found.family, found.formula, found.source, found.owner) == ("", "", "", "", "")
    assert (found.capabilities, found.hf_name, found.api_version, found.extends) == (None, None, None, None)
    assert (found.dtypes, found.devices, found.requires, found.options) == ((), (), (), {})
    assert not found.lists_options
    assert found.unavailable is None


def test_an_info_can_be_turned_into_a_dictionary_and_changes_nothing_in_the_registry(write: Write) -> None:
    registry = one(write, "target: 'json:JSONDecoder', options: {sizes: [1]}")
    dataclasses.asdict(registry.info("x"))["options"]["sizes"].append(2)
    registry.info("x").options["sizes"].append(3)
    assert registry.info("x").options == {"sizes": [1]}
    assert registry.info("x").lists_options


def test_a_module_that_is_missing_says_what_to_install(write: Write) -> None:
    said = unavailable(one(write, "target: 'no_such_pkg.attn:C'"), VariantUnavailable)
    assert "there is no module 'no_such_pkg.attn'" in said
    assert "one.yaml:3" in said
    assert said.endswith("install the package that has 'no_such_pkg'")


@pytest.mark.parametrize("module", ["json.no_such_part", "json.decoder.deeper", "keyword.deeper", "attnlab.no_such"])
def test_a_part_of_a_package_that_is_missing_is_told_without_importing_the_package(write: Write, module: str) -> None:
    said = unavailable(one(write, f"target: '{module}:C'"), VariantUnavailable)
    assert f"there is no module {module!r}" in said
    assert said.endswith("correct the target")


def test_a_package_that_only_an_import_could_resolve_is_given_the_benefit_of_the_doubt(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("a foreign import hook")

    registry = one(write, "target: 'some_pkg.part:C'")
    monkeypatch.setattr(info.importlib.util, "find_spec", fail)
    assert registry.info("x").unavailable is None


def test_a_required_module_that_is_missing_is_named_with_what_to_do(write: Write) -> None:
    said = unavailable(one(write, "target: 'json:C', requires: [json, no_such_kernels]"), VariantUnavailable)
    assert said == "needs the module 'no_such_kernels', which is not installed; try: pip install no_such_kernels"


def test_a_required_module_may_be_installed_under_another_name(write: Write) -> None:
    registry = one(write, "target: 'json:C', requires: {json: json, no_such_fla: no-such.linear_attention}")
    assert registry.info("x").requires == ("json", "no_such_fla")
    said = unavailable(registry, VariantUnavailable)
    assert said.endswith(
        "needs the module 'no_such_fla', which is not installed; try: pip install no-such.linear_attention"
    )


class Torch:
    """A stand-in for the module `torch`: what it says of its devices."""

    def __init__(self, available: bool) -> None:
        self.cuda = self.xpu = self
        self.is_available = lambda: available


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_a_variant_of_a_device_that_is_not_here_says_so(
    write: Write, monkeypatch: pytest.MonkeyPatch, imported: bool, here: bool
) -> None:
    """Torch is asked where the program has imported it, else the system where it shows a driver."""
    monkeypatch.setitem(sys.modules, "torch", Torch(here) if imported else None)
    monkeypatch.setattr(devices.sys, "platform", "linux")
    monkeypatch.setattr(devices.os.path, "exists", lambda path: here and path == "/dev/nvidiactl")
    assert one(write, "target: 'json:C', devices: [cpu, cuda]").info("x").unavailable is None
    assert one(write, "target: 'json:C'").info("x").unavailable is None, "nothing is said of devices"
    said = one(write, "target: 'json:C', devices: [cuda]").info("x").unavailable
    sentence = "computes on cuda alone, and there is no such device here; `attnlab doctor` shows the devices"
    assert said == (None if here else sentence)


def test_a_device_that_only_torch_could_tell_of_is_given_the_benefit_of_the_doubt(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert one(write, "target: 'json:C', devices: [xpu]").info("x").unavailable is None
    monkeypatch.setitem(sys.modules, "torch", Torch(False))
    assert "computes on xpu alone" in str(one(write, "target: 'json:C', devices: [xpu]").info("x").unavailable)


def test_a_required_module_of_python_itself_is_not_something_to_install(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = one(write, "target: 'json:C', requires: [tkinter]")
    monkeypatch.setitem(sys.modules, "tkinter", None)  # type: ignore[arg-type]
    said = unavailable(registry, VariantUnavailable)
    assert said == "needs the module 'tkinter', which belongs to Python itself and is not part of this one"


def test_a_required_module_is_looked_for_and_not_imported(install: Install, write: Write) -> None:
    install("stranger-kernels", "stranger_kernels", {"__init__.py": "raise SystemExit"}, entry_points="[x]\n")
    assert one(write, "target: 'json:C', requires: [stranger_kernels]").info("x").unavailable is None
    assert "stranger_kernels" not in sys.modules


def test_without_torch_every_variant_says_so(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = one(write, "target: 'json:C'")
    monkeypatch.setattr(info, "exists", lambda module: module != "torch")
    assert "needs the module 'torch'" in unavailable(registry, VariantUnavailable)


def test_a_module_that_the_program_has_blocked_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blocked_module", None)  # type: ignore[arg-type]
    assert info.exists("json")
    assert not info.exists("blocked_module")


def test_an_interface_version_that_does_not_fit_holds_plugin_required_and_found(
    install: Install, nothing_built_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = f"{HEAD}  x: {{target: 'stranger_new:C', api_version: 99}}\n  y: {{target: 'stranger_new:C'}}\n"
    install("stranger-new", "stranger_new", {"registry.yaml": rows})
    registry = Registry.default()
    said = unavailable(registry, PluginError)
    assert said.startswith(
        f"the plugin stranger-new is written for api_version 99, this attnlab provides {API_VERSION}; "
    )
    assert "stranger_new" not in sys.modules
    assert registry.info("y").unavailable is None


@pytest.mark.parametrize("listed", ["x", "other, X", "x,"])
def test_a_disabled_variant_stays_listed_and_is_not_imported(
    write: Write, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("ATTNLAB_DISABLE", listed)
    registry = one(write, "target: 'json:C'")
    assert unavailable(registry, VariantUnavailable) == "'x' is disabled by ATTNLAB_DISABLE"


def test_a_preset_of_a_disabled_variant_is_disabled_with_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("a.yaml", f"{HEAD}  base: {{target: 'json:C'}}\n  x: {{extends: base}}\n")
    monkeypatch.setenv("ATTNLAB_DISABLE", "base")
    assert "'base' is disabled" in unavailable(Registry.from_files(file), VariantUnavailable)


def test_disabling_what_does_not_exist_is_a_problem_with_the_nearest_name(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLAB_DISABLE", "xx,pytest")
    problems = one(write, "target: 'json:C'").problems
    assert len(problems) == 1, "pytest is installed, so naming it is no mistake"
    assert "ATTNLAB_DISABLE names 'xx', which is neither a variant nor a plugin; did you mean 'x'?" in problems[0]


def test_the_parts_of_a_container_agree(write: Write) -> None:
    registry = Registry.from_files(write("a.yaml", f"{HEAD}  b: {{target: 'm:C'}}\n  a: {{target: 'm:C'}}\n"))
    assert registry.names() == list(registry) == ["a", "b"]
    assert len(registry) == 2
    assert "a" in registry
    assert "c" not in registry
    assert 3 not in registry
    assert repr(registry) == "Registry(2 variants from 1 files)"


@pytest.mark.parametrize("name", [None, 3, ["x"], ""])
def test_a_name_of_the_wrong_kind_is_an_unknown_variant(write: Write, name: object) -> None:
    registry = one(write, "target: 'json:C'")
    with pytest.raises(UnknownVariant, match="there is no variant"):
        registry.info(name)  # type: ignore[arg-type]


def test_an_empty_registry_says_that_it_knows_none() -> None:
    with pytest.raises(UnknownVariant, match="there is no variant 'x'; known: none"):
        Registry.from_files().info("x")


def test_listing_imports_neither_torch_nor_a_plugin() -> None:
    script = (
        "import sys, attnlab\n"
        "infos = [attnlab.info(n) for n in attnlab.names()]\n"
        "assert infos\n"
        "loaded = [m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'attnlab_plugins')]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
