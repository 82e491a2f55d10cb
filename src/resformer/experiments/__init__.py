"""Suites of runs: declare them, run them side by side, compare the curves, and write the report."""
