"""Measuring: workloads, the timed run, its check against the reference, its rows and reports."""
