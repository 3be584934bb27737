"""What is stored as codes, and how: helpers of the passes that place codecs."""
