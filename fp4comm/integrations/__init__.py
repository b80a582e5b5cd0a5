"""Adapters into frameworks, one a file; each is imported only when it is used."""
