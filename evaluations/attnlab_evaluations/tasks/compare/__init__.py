"""`attnlab compare`: every variant on every workload. Importing this imports no torch."""
