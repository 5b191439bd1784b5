"""Base classes from which a variant is written with one method: a score, a feature map, or a recurrence."""
