"""Codes on the links between ranks that a graph does not see: between pipeline stages, and of DDP's gradients."""
