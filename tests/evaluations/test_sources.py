"""The code behind a cell: an edit anywhere in it makes the cell stale, and nothing else does (F24, F45)."""

import importlib.util
import sys
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from attnlab_evaluations.frame import identity, provenance, sources

LINE = "\n# edited\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin's package with a helper, a data row and a base class in a package of its own; the path of each file."""
    texts = {
        "f45_base/__init__.py": "",
        "f45_base/mixin.py": "class Mixin: pass",
        "f45_tools.py": "def scale(): return 1",
        "f45_plugin/__init__.py": "",
        "f45_plugin/deep/__init__.py": "",
        "f45_plugin/deep/kernel.py": "def run(): pass",
        "f45_plugin/kernel.cu": "// kernel",
        "f45_plugin/variant.py": """
            from f45_base.mixin import Mixin
            class V(Mixin):
                def attend(self):
                    import f45_tools
                    from .deep import kernel
        """,
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("f45_")]:
        del sys.modules[name]


EDITED = (
    "f45_plugin/variant.py f45_plugin/__init__.py f45_plugin/deep/kernel.py f45_plugin/kernel.cu f45_base/mixin.py "
    "f45_base/__init__.py f45_tools.py"
)


@pytest.mark.parametrize("edited", EDITED.split())
def test_an_edit_in_the_package_its_bases_or_what_it_imports_is_noticed(edited, package):
    from f45_plugin.variant import V

    before = sources.digest_of(V)
    assert before == sources.digest_of(V)
    with open(package / edited, "a", encoding="utf-8") as file:
        file.write(LINE)
    assert sources.digest_of(V) != before


def test_a_run_folder_a_cache_or_another_file_changes_nothing(package):
    from f45_plugin.variant import V

    before = sources.digest_of(V)
    for name in ("run/results.jsonl", "run/made.py", "__pycache__/x.cpython-311.pyc", ".git/hook.py", "notes.txt"):
        path = package / "f45_plugin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x", encoding="utf-8")
    assert sources.digest_of(V) == before


def test_the_place_of_a_file_target_changes_nothing(tmp_path):
    found = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text("class Mine: pass\n", encoding="utf-8")
        with loaded(tmp_path / place / "mine.py") as module:
            found.append(sources.digest_of(module.Mine))
    assert found[0] == found[1] is not None


@contextmanager
def loaded(path):
    """The file as attnlab loads a target that is given by its path."""
    spec = importlib.util.spec_from_file_location("_attnlab_target_f45", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_the_files_beside_a_file_target_belong_to_it(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: pass\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("A = 1\n", encoding="utf-8")
    with loaded(tmp_path / "mine.py") as module:
        before = sources.digest_of(module.Mine)
        (tmp_path / "notes.md").write_text("x", encoding="utf-8")
        assert sources.digest_of(module.Mine) == before
        (tmp_path / "beside.py").write_text("A = 2\n", encoding="utf-8")
        assert sources.digest_of(module.Mine) != before


def test_metrics_and_functions_have_sources_too(package):
    import f45_tools

    metric = SimpleNamespace(name="m", version=1, measure=f45_tools.scale)
    before = sources.digest_of(metric)
    (package / "f45_tools.py").write_text("def scale(): return 2", encoding="utf-8")
    assert before is not None
    assert sources.digest_of(metric) != before


def test_built_in_variants_hold_the_hash_of_attnlabs_own_packages():
    identity.forget_sources()
    found = identity.variant_identity("dot_product")["source"]
    assert found == provenance.source_digest(sources.PACKAGES)
    assert identity.variant_identity("linearised")["source"] == found


def test_commit_dirtiness_and_the_systems_release_are_no_part_of_a_key():  # a run folder makes its checkout dirty
    facts = provenance.collect(1)
    other = {**facts, "commit": "0" * 40, "dirty": not facts["dirty"], "system": "Linux 9", "time": "later"}
    assert provenance.key_inputs(facts) == provenance.key_inputs(other)
    for part in ("threads", "torch_config", "source", "processor", "cuda"):
        assert provenance.key_inputs({**facts, part: "another"}) != provenance.key_inputs(facts)
