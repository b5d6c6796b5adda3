"""Inverse roots of symmetric matrices that are no less than zero."""

from __future__ import annotations

import torch

from lading.errors import LadingError

#: As in Anil et al., https://arxiv.org/abs/2002.09018 (their code's ridge_epsilon).
_RESOLVED = 1e-6


class RootError(LadingError):
    """Raised where an inverse root cannot be taken."""


def eigen_root(matrix: torch.Tensor, root: int, eps: float) -> torch.Tensor:
    """``(matrix + eps)^(-1 / root)`` by decomposition; eigenvalues are moved up by what the least is below zero.

    Args:
        matrix: (n, n), symmetric.
    Source: Shi et al., https://arxiv.org/abs/2309.06497, section 3.2.1.
    """
    values, vectors = torch.linalg.eigh(matrix)
    values = values - torch.clamp(values[0], max=0) + eps
    return (vectors * values.pow(-1 / root)) @ vectors.T


def newton_root(
    matrix: torch.Tensor, root: int, eps: float, *, tolerance: float = 1e-6, most: int = 100
) -> torch.Tensor:
    """Take the root ``(matrix + eps)^(-1 / root)`` by coupled Newton iteration.

    Args:
        matrix: (n, n), symmetric.
        eps: At least ``_RESOLVED`` of the matrix's norm is taken: below it, rounding decides.
        tolerance: Limit of the largest element of ``M - 1``, where M goes to 1.
        most: Most iterations.
    Raises:
        RootError: it stopped above 1e-3 of an element, as with a matrix too near to a singular one for its dtype.
    Source: Guo and Higham, https://doi.org/10.1137/050643374, iteration (3.9), for p = -root.
    """
    n = matrix.shape[0]
    identity = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    ridged = matrix + torch.linalg.matrix_norm(matrix).mul(_RESOLVED).clamp(min=eps) * identity
    scale = (1 + root) / (2 * torch.linalg.matrix_norm(ridged))
    inverse_root, coupled = identity * scale ** (1 / root), ridged * scale
    error = torch.linalg.vector_norm(coupled - identity, torch.inf)
    for _ in range(most):
        if error <= tolerance:
            break
        step = (identity * (root + 1) - coupled) / root
        next_root, next_coupled = inverse_root @ step, torch.linalg.matrix_power(step, root) @ coupled
        next_error = torch.linalg.vector_norm(next_coupled - identity, torch.inf)
        if not next_error < 1.2 * error:  # rounding has the last word; on the way errors rise a little
            break
        inverse_root, coupled, error = next_root, next_coupled, next_error
    if not error < 1e-3:
        raise RootError(
            f"the inverse root of a factor of {n} rows: expected an iteration ending below 1e-3, got {float(error):g}; "
            "take a larger eps, or the root by eigenvalues"
        )
    return inverse_root
