"""Rotations of query and key columns: by position (rope) and by the Hadamard matrix."""

import math

import torch
from torch import Tensor

__all__ = ["hadamard", "rotary_table", "rotate", "rotate_slice"]


def rotary_table(positions: Tensor, rope_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotated pair's angle, float32 of shape [*positions.shape, rope_dim / 2].

    Pair i of position p turns by p * theta ** (-2 i / rope_dim), whichever columns form the pair.
    """
    if isinstance(rope_dim, bool) or not isinstance(rope_dim, int):
        raise TypeError(f"rotary_table: rope_dim must be an int, got {rope_dim!r}")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise TypeError(f"rotary_table: theta must be a float, got {theta!r}")
    if not 0 < theta < math.inf:
        raise ValueError(f"rotary_table: theta must be finite and above 0, got {theta}")
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rotary_table: rope_dim must be even and at least 2, got {rope_dim}")
    if not isinstance(positions, Tensor):
        raise TypeError(f"rotary_table: positions must be a tensor, got {type(positions).__name__}")
    if positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"rotary_table: positions must be integers or real numbers, got {positions.dtype}")
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=positions.device) / rope_dim
    angle = positions.to(torch.float32).unsqueeze(-1) * (1.0 / theta**exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [..., R] with every pair turned; cos, sin [..., R / 2] broadcast against x.

    A pair is columns (2i, 2i + 1) if interleaved, else (i, i + R / 2). Columns keep their places and x its dtype; the
    arithmetic is float32 for half-precision x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide), sin.to(wide)
    dim = -1 if interleaved else -2
    first, second = x.to(wide).unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(dim)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim)
    return turned.flatten(-2).to(x.dtype)


def rotate_slice(x: Tensor, cos: Tensor, sin: Tensor, *, first: bool, interleaved: bool) -> Tensor:
    """x [..., E] with its first or last R columns rotated, R = 2 * cos.shape[-1]."""
    width = 2 * cos.shape[-1]
    rest = x.shape[-1] - width
    if rest == 0:
        return rotate(x, cos, sin, interleaved=interleaved)
    if first:
        turning, still = x.split((width, rest), -1)
        return torch.cat((rotate(turning, cos, sin, interleaved=interleaved), still), -1)
    still, turning = x.split((rest, width), -1)
    return torch.cat((still, rotate(turning, cos, sin, interleaved=interleaved)), -1)


def hadamard(x: Tensor) -> Tensor:
    """x [..., E] times the E x E Hadamard matrix in Sylvester's order over sqrt(E): orthonormal and its own inverse.

    E is a power of two. Float32 arithmetic for half-precision x, whose dtype is kept.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"hadamard: the last size of x must be a power of two, got {list(x.shape)}")
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    step = 1
    while step < width:
        left, right = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((left + right, left - right), -2).flatten(-3)
        step *= 2
    return (y * width**-0.5).to(x.dtype)


def pair_tables(
    name: str, position_embeddings: tuple[Tensor, Tensor], x: Tensor, rope_dim: int
) -> tuple[Tensor, Tensor]:
    """Checks a caller's (cos, sin) against tokens x [..., hidden] and returns one column per pair.

    Tables as wide as the rotated slice hold every angle twice, first half equal to second half.
    """
    if not isinstance(position_embeddings, (tuple, list)) or len(position_embeddings) != 2:
        raise TypeError(
            f"{name}: position_embeddings must be a pair (cos, sin), got {type(position_embeddings).__name__}"
        )
    tokens = tuple(x.shape[:-1])
    fits = (tokens,) if len(tokens) == 1 else (tokens, tokens[1:], (1, *tokens[1:]))
    tables = []
    for part, table in zip(("cos", "sin"), position_embeddings, strict=True):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            got = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{name}: position_embeddings ({part}) must be a floating-point tensor, got {got}")
        if tuple(table.shape[:-1]) not in fits or table.shape[-1] not in (rope_dim // 2, rope_dim):
            raise ValueError(
                f"{name}: position_embeddings ({part}) must be of shape {list(tokens)} + [{rope_dim // 2}] or + "
                f"[{rope_dim}], got {list(table.shape)}"
            )
        if table.device != x.device:
            raise ValueError(
                f"{name}: position_embeddings ({part}) must be on {x.device} like the tokens, got {table.device}"
            )
        tables.append(table.narrow(-1, 0, rope_dim // 2))
    return tables[0], tables[1]
