"""A page in one file that shows what was done to a model: its graphs, its bytes, and what was left and why."""
