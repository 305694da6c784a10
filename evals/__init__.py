"""Measurements: replays of real trajectories, benchmarks, the test models. Nothing imports this package."""
