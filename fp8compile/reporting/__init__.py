"""What the passes did, as data and as text."""
