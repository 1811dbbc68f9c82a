"""Measuring: how fast ops are and how near to float64, and choosing kernels by that.

Nothing is measured unless asked for, and nothing measured changes a choice unless asked to.
"""

from .choosing import (
    Criterion as Criterion,
    by_report as by_report,
    cached as cached,
    default_path as default_path,
    invalidate as invalidate,
    populate_dispatch_table as populate_dispatch_table,
    tiles_path as tiles_path,
    tuned as tuned,
    untuned as untuned,
)
from .report import Entry as Entry, ProfileReport as ProfileReport, Timing as Timing
