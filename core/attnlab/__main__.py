"""`python -m attnlab`: the same as the command `attnlab`."""

from __future__ import annotations

import sys

from attnlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
