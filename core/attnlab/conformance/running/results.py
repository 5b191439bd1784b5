"""What a check run returns. Needs only the standard library, so reports can be made without torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "refused", "known failure", "not applicable", "error"]
BAD: frozenset[str] = frozenset({"failed", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check on one case.

    status: passed; failed (the message says what differed); refused (an undeclared askable was refused, as
    it must be); known failure (declared with the variant); not applicable (the message says why); error
    (the check could not be run: an unexpected exception). seconds: wall time. smallest: the smallest request found that fails
    in the same way, whose message this is; alike: how many failures of the check it explains, this one included. options: global ones of the command
    that repeats it, such as registry files.
    """

    variant: str
    check: str
    topic: str
    case: str
    status: Status
    message: str = ""
    seconds: float = 0.0
    device: str = "cpu"
    smallest: str = ""
    alike: int = 1
    options: str = ""

    @property
    def ok(self) -> bool:
        """Whether this result lets the variant pass."""
        return self.status not in BAD

    @property
    def repeat(self) -> str:
        """The shell command that runs this one case again; without a case, all of the check."""
        line = self.smallest or self.case
        case = f" --case {shlex.quote(line)}" if line else ""
        device = "" if self.device == "cpu" else f" --device {self.device}"
        options = f" {self.options}" if self.options else ""
        return f"attnlab{options} check {shlex.quote(self.variant)} --only {self.check}{case}{device}"
