"""Tables and text of a run, rendered from its records."""
