"""What runs in FP32: where islands begin and end."""
