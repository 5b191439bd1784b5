"""Measurements: time, memory, accuracy, analytic costs, and the statistics of ratios."""
