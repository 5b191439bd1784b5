"""Validation of a request: the stages before and after `attend`, refusals with reasons, and the fast path. Private to attnlab."""
