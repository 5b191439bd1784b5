"""The dates task: dates in words to ISO by an encoder-decoder (`attnlab dates`). Importing this imports no torch."""
