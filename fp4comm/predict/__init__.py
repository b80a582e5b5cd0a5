"""Predictions: how long dispatch and combine take on a topology, by wire format and route."""
