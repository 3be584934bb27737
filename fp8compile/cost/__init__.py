"""What devices can do in a second: the rates that predictions are made of. An H200's were read on one, others are assumed."""
