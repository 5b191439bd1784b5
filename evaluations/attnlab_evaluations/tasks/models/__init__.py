"""`attnlab models`: every variant by its name in tiny models of transformers, cell by cell."""
