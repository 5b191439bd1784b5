"""Adapters to other libraries. Each module is imported only when asked for; this package imports nothing."""
