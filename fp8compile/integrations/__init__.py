"""What a trainer needs beside ``torch.compile``: one module a trainer, each of which imports its trainer only when used."""
