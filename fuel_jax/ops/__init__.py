"""Primitive ops: one module per family; a table where a row is the whole definition."""
