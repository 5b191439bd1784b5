"""Validation of a request: argument types and shapes, refusals with reasons, padding, the fast path and its cache. Private to attnlab."""
