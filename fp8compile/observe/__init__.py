"""Statistics that leave a graph, and what is read from them."""
