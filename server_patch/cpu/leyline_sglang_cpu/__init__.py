"""What SGLang 0.5.23 from PyPI lacks to run on a CPU-only torch.

For development and tests without a GPU; see README.md beside this package. It gives way to the real packages wherever
they are installed, and does nothing unless `SGLANG_USE_CPU_ENGINE=1` or, for torchvision, its library cannot be loaded.
"""
