"""The evaluations, one folder each; every folder holds the settings, the run and the report of one command."""
