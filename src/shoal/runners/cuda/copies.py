"""What the copy engine of a GPU is told about a matrix."""

from __future__ import annotations

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def boxes(
    matrix: torch.Tensor, rows: int, columns: int, box: tuple[int, int], stride: int | None = None
) -> TensorDescriptor:
    """bf16 [rows, columns] from the first element of `matrix` on, taken or written in boxes of that size.

    Zeros come from beyond, and nothing is written there. `stride` is from row to row, where it is not `columns`.
    """
    layout = NVMMASharedLayout(swizzle_byte_width=min(2 * box[1], 128), element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, [rows, columns], [stride or columns, 1], list(box), layout)
