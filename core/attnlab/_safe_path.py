"""Takes the working directory off Python's path where `python -m attnlab` put it there. Imported first; imports only `sys`.

A folder that holds a `yaml.py`, say, would otherwise run it: `python -m` looks in the working directory before everything else,
and so does the `-c` by which Python starts child processes. The command `attnlab` never does. This module and the package's
`__init__` therefore import nothing else before it has run, not even `__future__`.
"""

import sys

# In front of what a child process runs by `-c`: the same for it.
WITHOUT_WORKING_DIRECTORY = "import sys; sys.path[:] = [p for p in sys.path if p]\n"


def run_as_a_module(words: list[str]) -> bool:
    """Whether an interpreter's own command line says `-m attnlab`, with other options or without, or a submodule of it."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return False
        if word.startswith("--") or word[1:2] in ("W", "X"):
            if word in ("-W", "-X", "--check-hash-based-pycs"):
                next(rest, None)  # what the option takes
            continue
        letters, m, module = word[1:].partition("m")
        if "c" in letters:
            return False
        if m:
            return (module or next(rest, "")).partition(".")[0] == "attnlab"
    return False


def _without_working_directory() -> None:
    """`-P` of Python 3.11 for this process, on every Python, unless attnlab itself is run from the working directory."""
    here = sys.path[0] if sys.path else ""
    home = __file__.replace("\\", "/").rpartition("/")[0].rpartition("/")[0]
    # While `-m` looks for its module, argv[0] says so. A safe path has no folder in front that could be meant.
    safe = getattr(sys.flags, "safe_path", False)
    as_module = sys.argv[:1] == ["-m"] and run_as_a_module(sys.orig_argv)
    if as_module and not safe and here.replace("\\", "/") != home:
        del sys.path[0]


_without_working_directory()
