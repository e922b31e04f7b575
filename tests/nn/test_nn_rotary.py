"""Rotations: by position in both conventions, and by the Hadamard matrix."""

import pytest
import torch

import layer_oracle
from dsa_ops.nn import LightningIndexer, deepseek_v32, rotary_table
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


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "rope_dim must be an int, got 4.0", (4.0,)),
        (TypeError, "theta must be a float, got 'x'", (4, "x")),
        (ValueError, "theta must be finite and above 0, got 0", (4, 0)),
        (ValueError, "theta must be finite and above 0, got nan", (4, float("nan"))),
    ],
)
def test_sizes_and_bases_that_give_no_angle_are_named(error, message, arguments):
    with pytest.raises(error, match=f"^rotary_table: {message}"):
        rotary_table(torch.arange(3), *arguments)


@pytest.mark.parametrize(
    ("error", "message", "hidden", "q_resid"),
    [
        (TypeError, "q_resid must be a tensor, got NoneType", (2, 5, 16), None),
        (ValueError, r"hidden must be of shape \[..., 16\], got \[2, 5, 3\]", (2, 5, 3), (2, 5, 8)),
        (ValueError, r"q_resid must be of shape \[2, 5, 8\], got \[2, 4, 8\]", (2, 5, 16), (2, 4, 8)),
    ],
)
def test_an_indexer_names_what_does_not_fit(error, message, hidden, q_resid):
    sizes = dict(hidden_size=16, num_heads=2, q_lora_rank=8, kv_lora_rank=8, index_n_heads=2, index_head_dim=8)
    config = deepseek_v32(**sizes, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, index_topk=2)
    indexer = LightningIndexer(config)
    hidden, q_resid = (None if shape is None else torch.randn(shape) for shape in (hidden, q_resid))
    with pytest.raises(error, match=f"^LightningIndexer: {message}"):
        indexer(hidden, q_resid, rotary_table(torch.arange(5), 4))
