"""The kernels, and nothing else: these modules import triton.

What is known of them: under Triton's interpreter they agree with the float64 definition (tests/plugins/flash), and Triton
compiles them for sm_80, 86, 89, 90, 100 and 120 within those GPUs' limits (`make kernels`). No GPU has run them yet: speed, and
whatever only hardware shows, is unmeasured.
"""
