"""Values that are computed chunk by chunk, so that they never exist as a whole."""
