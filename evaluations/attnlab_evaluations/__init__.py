"""The evaluation harness: workloads, metrics, runs and tables behind `attnlab compare`.

It uses only what `attnlab` exports. Importing this package imports no torch.
"""
