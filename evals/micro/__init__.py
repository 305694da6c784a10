"""Benchmarks of single parts; each prints JSON lines."""
