"""What is true of a graph. Nothing here changes one."""
