"""`attnlab gpu-check`: conformance and speed on a CUDA device. Importing this imports no torch."""
