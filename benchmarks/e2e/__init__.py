"""The registry's part ``e2e``: training steps of whole models."""
