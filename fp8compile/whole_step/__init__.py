"""Forward, backward and the optimizer's update as one compiled graph."""
