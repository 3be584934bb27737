"""The registry's part ``layers``: a decoder layer, forward and backward."""
