"""Recognising people's own maths, and putting fused ops in its place."""
