"""Running checks: which check runs on which cases, in which process, and its results."""
