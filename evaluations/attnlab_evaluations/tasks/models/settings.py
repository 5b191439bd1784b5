"""The settings of `attnlab models`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest

MODELS = (
    "bert", "roberta", "t5", "bart", "gpt2", "llama", "mistral", "gemma2", "qwen3", "gpt-oss", "vit", "clip", "whisper",
)  # fmt: skip
FORMS = ("table", "markdown", "json")
EXAMPLES = f"""\
examples:
  attnlab models                                    every variant in every model; minutes
  attnlab models flash 'linearised*' --models bert llama
  attnlab models --format markdown --write MODELS.md

models: {", ".join(MODELS)}

Tiny models with random weights take each variant by its name, through attnlab.integrations.transformers; variants that learn or
take gates are installed into every layer. A cell says
  equal     exact variants: logits, gradients and generated tokens (dynamic and static cache, beams) are the model's own
  works     every layer called the variant; answers are finite; rows, padding and, in decoders, the future do not show in what they
            must not; gradients arrive; generating with a cache gives the tokens of generating without
  forward   as works, but it cannot generate from a cache; the reason is given
  refused   the reason is given
  WRONG     what does not hold; the exit code is then 1"""


@dataclass(frozen=True)
class ModelsSettings:
    """A run, fully spelled out."""

    variants: tuple[str, ...]
    models: tuple[str, ...] = MODELS
    form: str = "table"
    write: Path | None = None
    threads: int | None = None


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help="variants: names or patterns; default: all")
    add("--models", metavar="M", nargs="+", help="names or patterns of models; default: all")
    add("--format", choices=FORMS, default="table", dest="form", help="on stdout; default: %(default)s")
    add("--write", metavar="FILE", help="also write what is printed to FILE, whole or not at all")


def settle(args: Namespace) -> ModelsSettings:
    """`ModelsSettings` from parsed arguments; `UnknownVariant` or `InvalidInput` for what names nothing."""
    known = attnlab.names()
    variants = [name for word in args.names or ["*"] for name in _matching(word, known)]
    models: list[str] = []
    for word in args.models or ["*"]:
        results = [name for name in MODELS if fnmatchcase(name, word)]
        if not results:
            raise InvalidInput(f"models: no model is called {word!r}; {nearest(word, MODELS)}")
        models += results
    write = None if args.write is None else Path(args.write)
    if write is not None and (write.is_dir() or not write.parent.is_dir()):
        what = "it is a folder" if write.is_dir() else f"there is no folder {write.parent}"
        raise InvalidInput(f"models: --write must name a file, got {args.write!r}: {what}")
    return ModelsSettings(tuple(dict.fromkeys(variants)), tuple(m for m in MODELS if m in models), args.form, write)


def _matching(word: str, known: list[str]) -> list[str]:
    results = [name for name in known if fnmatchcase(name, word)]
    if not results:
        raise UnknownVariant(f"models: no variant is called {word!r}; {nearest(word, known)}")
    return results
