"""Formats of optimizer states: one file a format."""
