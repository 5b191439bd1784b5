"""A recurrent encoder-decoder around any registered variant. Importing this package imports no torch."""
