"""What becomes codes, and how: helpers of the passes that place codecs."""
