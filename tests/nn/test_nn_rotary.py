"""Rotations: by position in both conventions, and by the Hadamard matrix."""

import pytest
import torch

import layer_oracle
from dsa_ops.nn import rotary_table
from dsa_ops.nn.rotary import hadamard, rotate, rotate_slice


def test_table_is_the_formula():
    positions = torch.tensor([[0, 1, 7], [5, 100, 1000]])
    cos, sin = rotary_table(positions, 8, 50.0)
    assert cos.shape == sin.shape == (2, 3, 4)
    assert cos.dtype == sin.dtype == torch.float32
    for pair in range(4):
        angle = positions.double() * 50.0 ** (-2 * pair / 8)
        torch.testing.assert_close(cos[..., pair].double(), angle.cos(), atol=1e-4, rtol=0)
        torch.testing.assert_close(sin[..., pair].double(), angle.sin(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_complex_multiplication(interleaved):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 1, 4, 1, 5]])
    cos, sin = (t[:, :, None] for t in rotary_table(positions, 8, 50.0))
    got = rotate(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got, layer_oracle.turn(x, positions, 50.0, interleaved), atol=1e-6, rtol=0)
    other = layer_oracle.turn(x, positions, 50.0, not interleaved)
    assert (got - other).abs().max() > 0.5


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_distance_alone(interleaved):
    q, k = torch.randn(2, 8, dtype=torch.float64)
    tables = [rotary_table(torch.tensor(p), 8, 50.0) for p in (2, 5, 12, 15)]
    a, b, c, d = (rotate(x, *table, interleaved=interleaved) for x, table in zip((q, k, q, k), tables, strict=True))
    torch.testing.assert_close(a @ b, c @ d, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.norm(), q.norm(), atol=1e-6, rtol=0)


def test_slice_first_or_last():
    x = torch.randn(4, 10)
    cos, sin = rotary_table(torch.arange(4), 6, 50.0)
    front = rotate_slice(x, cos, sin, first=True, interleaved=False)
    back = rotate_slice(x, cos, sin, first=False, interleaved=False)
    assert torch.equal(front, torch.cat((rotate(x[:, :6], cos, sin, interleaved=False), x[:, 6:]), -1))
    assert torch.equal(back, torch.cat((x[:, :4], rotate(x[:, 4:], cos, sin, interleaved=False)), -1))
    assert torch.equal(rotate_slice(x[:, :6], cos, sin, first=False, interleaved=True)[0], x[0, :6])


def test_half_precision_turns_in_float32():
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    table = rotary_table(torch.arange(64), 8, 50.0)
    got = rotate(x, *table, interleaved=True)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), *table, interleaved=True).bfloat16())


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_sylvesters_and_orthonormal(width):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    matrix = matrix * width**-0.5
    x = torch.randn(3, 5, width, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "rope_dim must be even", lambda: rotary_table(torch.arange(3), 5)),
        (ValueError, "rope_dim must be even and at least 2, got 0", lambda: rotary_table(torch.arange(3), 0)),
        (TypeError, "positions must be integers or real numbers", lambda: rotary_table(torch.ones(3) == 1, 4)),
        (TypeError, "positions must be a tensor", lambda: rotary_table([0, 1], 4)),
        (ValueError, "power of two", lambda: hadamard(torch.ones(2, 12))),
    ],
)
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        call()
