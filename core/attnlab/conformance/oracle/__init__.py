"""The inputs of a case and the right answer to them: definitions in float64 and a scalar visibility."""
