"""Moving cached keys: row layouts, delta tables and the rotation. Needs torch; knows nothing of SGLang or of agents."""

from leyline_kernels.layout import KeyLayout, MlaLayout, RowLayout, check_rows
from leyline_kernels.reference import copy_rotate_, rotate_, rotate_rows
from leyline_kernels.rope_tables import delta_table, move_table

__all__ = [
    "KeyLayout",
    "MlaLayout",
    "RowLayout",
    "check_rows",
    "copy_rotate_",
    "delta_table",
    "move_table",
    "rotate_",
    "rotate_rows",
]
