"""What SGLang 0.5.23 from PyPI lacks to run on a CPU-only torch.

For development and tests without a GPU; see README.md beside this package. Everything here does nothing unless
`SGLANG_USE_CPU_ENGINE=1`, and gives way to the real package wherever one is installed.
"""
