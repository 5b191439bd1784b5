"""What attnlab raises: one root, one leaf per kind of fault. Needs only the standard library.

Every message names the subject, what was expected, what was got and what to do. Each leaf also
derives from the built-in class that callers would expect to catch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlab.capabilities import Reason


class AttnlabError(Exception):
    """The root of every error that attnlab raises on purpose."""


class UnknownVariant(AttnlabError, LookupError):
    """No registered variant has that name; the message lists the nearest names, then all."""


class InvalidInput(AttnlabError, ValueError):
    """An argument has the wrong shape, dtype, device, range or combination."""


class UnsupportedRequest(AttnlabError, NotImplementedError):
    """The variant does not declare what was asked of it. Raised before any tensor work.

    `reasons` holds one `Reason` per undeclared thing.
    """

    def __init__(self, message: str, reasons: Sequence[Reason] = ()) -> None:
        self.args = (message,)  # not super().__init__(message): torch.compile cannot trace it
        self.reasons = tuple(reasons)


class RegistryFileError(AttnlabError, ValueError):
    """A registry file cannot be used; the message opens with `file:line:column`."""


class PluginError(AttnlabError):
    """A plugin broke a rule: it failed to import, or handed over something of the wrong kind."""


class WrongResult(PluginError):
    """A variant's `attend` returned something else than an `AttentionOutput`: no call of it can be served."""


class VariantUnavailable(AttnlabError, ImportError):
    """The variant is registered but something it needs is missing; the message says what to install."""


MOST_KNOWN = 40  # names that an error message lists


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean a, b?` where something is near, then what is known, `MOST_KNOWN` names at most: one sentence tail."""
    everything = sorted(known)
    close = get_close_matches(name, everything, n=3, cutoff=0.5)
    close += [k for k in everything if len(name) > 2 and name in k and k not in close][: 3 - len(close)]
    hint = f"did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
    more = len(everything) - MOST_KNOWN
    shown = [*everything[:MOST_KNOWN], f"and {more} more"] if more > 0 else everything
    return f"{hint}known: {', '.join(shown) or 'none'}"
