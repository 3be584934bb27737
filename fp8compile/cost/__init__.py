"""What devices can do in a second: the rates that predictions are made of. No file here has met a device by itself."""
