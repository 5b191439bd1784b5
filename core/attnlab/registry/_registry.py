"""The Registry: variants by name, read from layered files, imported one by one when used. Needs no torch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab._entry_points import disabled, installed, normalised
from attnlab._quoting import quoted
from attnlab.cache import forget_all
from attnlab.errors import AttnlabError, InvalidInput, RegistryFileError, UnknownVariant, nearest
from attnlab.registry import process, trust
from attnlab.registry.fields import CREATE_ARGUMENTS, NAME, NAME_RULE, Spot
from attnlab.registry.info import VariantInfo, describe, refuse
from attnlab.registry.layers import DISABLED, LayerFile, find_layers, named_layers
from attnlab.registry.merge import Entry, Read, merge
from attnlab.registry.rows import CHECKS, Row, read_rows
from attnlab.registry.yaml_reader import parse, read_file

if TYPE_CHECKING:
    from attnlab.interface import Attention

_log = logging.getLogger("attnlab.registry")

# Facts that register() takes beside summary and replaces; the class itself is the target.
_FACTS = tuple(k for k in CHECKS if k not in ("target", "extends", "summary", "replaces", "api_version"))

_registering = threading.Lock()  # of all registries: it takes milliseconds


class Registry:
    """Variants by name. Listing and asking for facts reads files only; `variant_class` and `create` import.

    A file that was discovered and is broken is skipped, with a sentence in `problems`; a file that was named is
    raised, as `RegistryFileError`. `files` holds the files in order, lowest layer first.
    """

    def __init__(self, layers: Iterable[LayerFile] = ()) -> None:
        self.files: list[LayerFile] = []
        self._reads: list[Read] = []
        self._file_problems: list[str] = []
        # With the entry that each came from: another thread may register the name anew while a class is imported.
        self._classes: dict[str, tuple[Entry, type[Attention]]] = {}
        self._failures: dict[str, tuple[Entry, str]] = {}
        for layer in layers:
            self._read(layer)
        self._entries, self._row_problems = merge(self._reads)

    @classmethod
    def default(cls, extra_files: Iterable[str | os.PathLike[str]] = (), project_dir: Path | None = None) -> Registry:
        """Every layer: packages' files, the user's, `./attnlab.yaml`, `ATTNLAB_REGISTRY`, then `extra_files`.

        `project_dir` takes the place of the working directory. Only a named file raises `RegistryFileError`.
        """
        return cls(find_layers(extra_files, project_dir))

    @classmethod
    def from_files(cls, *paths: str | os.PathLike[str]) -> Registry:
        """Exactly these files, a later one above an earlier one; nothing is discovered."""
        return cls(named_layers(paths))

    @property
    def problems(self) -> list[str]:
        """One sentence for each file and row that could not be used."""
        return [*self._file_problems, *self._row_problems, *self._unknown_disabled()]

    def names(self) -> list[str]:
        """All names, sorted; also those that cannot be used, whose `info(name).unavailable` says why."""
        return sorted(self._entries)

    def info(self, name: str) -> VariantInfo:
        """What is known about `name` without importing it. Raises `UnknownVariant`."""
        entry = self._entry(name)
        failed = self._failures.get(name)
        return describe(entry, failed[1] if failed is not None and failed[0] is entry else None)

    def variant_class(self, name: str) -> type[Attention]:
        """The class behind `name`, imported now if it was not.

        Raises `UnknownVariant`; `VariantUnavailable` (something is missing, disabled or not trusted);
        `PluginError` (the plugin is broken); `RegistryFileError` (the name's rows are).
        """
        return self._class_of(self._entry(name))

    def _class_of(self, entry: Entry) -> type[Attention]:
        name = entry.name
        known = self._classes.get(name)
        loaded = known[1] if known is not None and known[0] is entry else None
        if refusal := refuse(entry, loaded=loaded is not None):
            raise refusal.raised_for(name)
        if loaded is not None:
            return loaded
        from attnlab.registry.loading import load_class

        try:
            result = load_class(entry)
        except AttnlabError as error:
            self._failures[name] = entry, str(error)
            raise
        self._failures.pop(name, None)
        self._classes[name] = entry, result
        _say_where_from(entry)
        return result

    def create(
        self,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        **options: Any,
    ) -> Attention:
        """The variant `name` as a module, under that name; arguments as in `attnlab.create`.

        The row's options apply under `options`, except where the row says null: the class's own default holds
        then. A None from the caller is passed on. Raises as `variant_class`, and `InvalidInput` for an option
        that the variant does not accept.
        """
        entry = self._entry(name)
        if not entry.spoiled:
            from attnlab.registry.making import check_options

            check_options(entry, options)
        cls = self._class_of(entry)
        from attnlab.registry.making import make

        dims = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
        variant = make(entry, cls, {**dims, "key_dim": key_dim, "value_dim": value_dim}, options)
        variant._registry = process.Maker(self)
        return variant

    def register(
        self, name: str, target_class: type, *, summary: str = "", replaces: bool = False, **facts: Any
    ) -> None:
        """Add a class of the running program, above every file.

        `facts` are the fields of a registry row (family, formula, source, options, ...); family and formula
        default to the class's, `requires` is modules, or a mapping of modules to distributions. Raises `InvalidInput` for a bad name, an unknown fact, a name that is taken
        (unless `replaces`), what is no class of a variant, or a name that `replaces` nothing.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidInput(f"register: a name is {NAME_RULE}; got {quoted(name)}")
        from attnlab.registry.loading import fault_of_class, unwritten

        if fault := fault_of_class(target_class) or unwritten(target_class):
            raise InvalidInput(f"register: {name}: {fault}")
        for fact in facts:
            if fact not in _FACTS:
                raise InvalidInput(f"register: {name}: unknown fact {quoted(fact)}; {nearest(fact, _FACTS)}")
        if taken := set(facts.get("options") or ()) & set(CREATE_ARGUMENTS):
            raise InvalidInput(
                f"register: {name}: {sorted(taken)[0]!r} is an argument of create() and cannot be an option"
            )
        if name in self._entries and self._entries[name].read.trusted and not replaces:
            where = self._entries[name].where
            raise InvalidInput(f"register: {name!r} is already registered by {where}; give replaces=True to replace it")
        if replaces and name not in self._entries:
            raise InvalidInput(f"register: there is no {name!r} to replace; {nearest(name, self._entries)}")
        known = {fact: getattr(target_class, fact, "") for fact in ("family", "formula")}
        arguments = {"summary": summary, "replaces": replaces, **known, **facts}
        for fact in ("capabilities", "dtypes", "devices"):
            if arguments.get(fact) is not None:
                arguments[fact] = tuple(arguments[fact])
        if (needed := arguments.get("requires")) is not None:
            arguments["requires"] = dict(needed) if isinstance(needed, Mapping) else {m: m for m in needed}
        row = Row(
            name,
            Spot(Path(), 0, 0, name),
            {k: v for k, v in arguments.items() if v not in (None, "")},
            cls=target_class,
        )
        with _registering:
            level = max((read.layer.level for read in self._reads), default=0) + 1
            read = Read(LayerFile(Path(), "program", level=level), "", [row], [])
            # Registering is all or nothing: the new entries take over only once they are complete.
            entries, problems = merge([*self._reads, read])
            self._reads.append(read)
            self._entries, self._row_problems = entries, problems
        self._classes.clear()
        self._failures.clear()
        forget_all()

    def declaring(self, formula: str, features: Iterable[str], dtype: str, device: str) -> list[str]:
        """The names of the available variants of a formula whose rows declare all `features`, the dtype and the device."""
        rows = [self.info(name) for name in self.names()]
        return [
            row.name
            for row in rows
            if row.formula == formula
            and row.capabilities is not None
            and row.unavailable is None
            and set(features) <= set(row.capabilities)
            and (not row.dtypes or dtype in row.dtypes)
            and (not row.devices or device in row.devices)
        ]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({len(self)} variants from {len(self.files)} files)"

    def _read(self, layer: LayerFile) -> None:
        """Take a file in, or keep the sentence for why not."""
        if layer.problem:
            self.files.append(layer)
            if layer.problem != DISABLED:
                self._file_problems.append(layer.problem)
            return
        try:
            data = read_file(layer.path)
            rows, faults = read_rows(parse(data, layer.path), layer.path)
        except RegistryFileError as error:
            if layer.named:
                by = f" (named by {layer.named_by})" if layer.named_by else ""
                raise RegistryFileError(f"{error}{by}") from None
            self.files.append(replace(layer, problem=str(error)))
            self._file_problems.append(f"{error} (from {layer.owner})" if layer.owner else str(error))
            return
        digest, trusted = trust.digest(data), True
        if layer.named:
            trust.name(layer.path)
        elif layer.discovered:
            trusted = trust.yaml_trusted(layer.path, digest)
            targets = list(dict.fromkeys(row.target.path for row in rows if row.target and row.target.path))
            layer = replace(layer, trusted=trust.all_trusted(layer.path, digest, targets))
        self.files.append(layer)
        self._reads.append(Read(layer, digest, rows, faults, trusted))

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None:
            tail = nearest(name, self._entries) if isinstance(name, str) else "a name is text"
            problems = self.problems
            if problems:
                tail += f"; {len(problems)} problem(s) in the registry files, the first: {problems[0]}"
            raise UnknownVariant(f"there is no variant {quoted(name)}; {tail}")
        return entry

    def _unknown_disabled(self) -> list[str]:
        """A sentence for each name in `ATTNLAB_DISABLE` that is neither a variant nor installed."""
        owners = {normalised(layer.owner) for layer in self.files if layer.owner}
        known = {normalised(name) for name in self._entries} | owners
        unknown = sorted(name for name in disabled() - known if not installed(name))
        return [
            f"ATTNLAB_DISABLE names {quoted(n)}, which is neither a variant nor a plugin; {nearest(n, known)}"
            for n in unknown
        ]


process.read = Registry.default

_announced: set[tuple[str, str]] = set()  # names and places that this process has logged


def _say_where_from(entry: Entry) -> None:
    """Log once in a process which file a name comes from, where a file that was discovered decides it or would like to."""
    words = entry.rival
    if not words and entry.read.layer.discovered:
        instead = f", in the place of {entry.replaced}" if entry.replaced else ""
        words = f"the variant {entry.name!r} comes from {entry.where}, a file that was discovered{instead}"
    if words and (entry.name, words) not in _announced:
        _announced.add((entry.name, words))
        _log.warning("attnlab: %s", words)
