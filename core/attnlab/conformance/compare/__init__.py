"""Comparison of an answer with the right one: tolerances, messages and advice."""
