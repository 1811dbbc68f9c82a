"""Weights as other programs store them, from their files and layouts to the operands of our ops."""
