"""The command ``fp8compile``."""
