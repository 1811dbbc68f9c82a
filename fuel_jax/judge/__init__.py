"""Measuring: how near an op comes to its peers and to what the hardware allows."""
