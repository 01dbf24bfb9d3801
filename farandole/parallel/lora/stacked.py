"""Convert the adapters of stacked layers to and from the shapes of PEFT's `target_parameters`.

A stack of E layers has the adapters A (E, rank, in) and B (E, out, rank).  PEFT stores A as (E * rank, in) and B as
(out, rank * E).  In A, the rows of each expert are adjacent; in B, the columns of the experts are interleaved.
"""

from __future__ import annotations

from torch import Tensor

_A, _B = ".lora_A.weight", ".lora_B.weight"


def matrix_for_peft(name: str, matrix: Tensor) -> Tensor:
    """Flatten the A or B of stacked layers to PEFT's two dimensions; return other tensors unchanged."""
    if name.endswith(_A) and matrix.dim() == 3:
        return matrix.flatten(0, 1)
    if name.endswith(_B) and matrix.dim() == 3:
        return matrix.permute(1, 2, 0).flatten(1)
    return matrix


def matrix_from_peft(name: str, matrix: Tensor, experts: int) -> Tensor:
    """Reshape the A or B of `experts` stacked layers from PEFT's two dimensions to three dimensions.

    Raises:
        ValueError: if the matrix cannot be divided into `experts` equal parts.
    """
    dim = 0 if name.endswith(_A) else 1
    if matrix.dim() != 2 or matrix.shape[dim] % experts:
        shape = " x ".join(map(str, matrix.shape))
        raise ValueError(
            f"{name} is {shape}: expected a matrix whose dimension {dim} is a multiple of {experts}, the number of experts"
        )
    if dim == 0:
        return matrix.unflatten(0, (experts, -1))
    return matrix.unflatten(1, (-1, experts)).permute(2, 0, 1)
