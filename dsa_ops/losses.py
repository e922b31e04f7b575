"""The indexer's training loss, and a way to hang a loss onto an activation."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsa_ops import api, checks
from dsa_ops.layouts import expand_topk


def indexer_loss(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    indices: Tensor,
    scores: Tensor,
    softmax_scale: float | None,
    *,
    coeff: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    group: Any = None,
    topk_length: Tensor | None = None,
) -> Tensor:
    """How far the indexer is from attention over the selected keys: KL(attention || indexer), one number.

    attention_target -> sum over the tensor-parallel group -> indexer_kl -> mean or sum over rows -> times coeff. The
    teacher's side (q, kv, lse) is detached: gradients go to `scores` alone.

    Shapes: T query rows, S key rows, H heads on this rank, D width, K slots; batched [B, L, ...] as everywhere.

    Args:
        q [T, H, D], kv [S, D], lse [T, H]: attention's own queries, latent rows and log-sum-exp over the selected keys,
            as `sparse_mla` takes and returns them.
        indices [T, K]: int32 or int64, the selected keys; slots < 0 are empty.
        scores [T, K]: the indexer's scores of these keys, from `indexer_topk` or `indexer_scores`.
        softmax_scale: attention's; None is D ** -0.5.
        coeff: factor of the loss: a finite number, or a real tensor of one element where it changes from step to step
            in a compiled region (a second number recompiles it once). A constant to autograd: it may not require grad,
            and the loss keeps its dtype. 0 gives zero gradients, not absent ones.
        row_mask [T]: bool, rows that count. The others add nothing to the sum nor to the number of rows, whatever they
            hold, and get zero gradients. None: all rows count, also those without a key (their KL is 0).
        reduction: "mean" over the rows that count (0 if there are none), or "sum", which adds up over any split of the
            rows, for loops that divide by their own number of tokens.
        group: tensor-parallel group over whose ranks the heads are sharded: a ProcessGroup, a one-dimensional
            DeviceMesh or (DeviceMesh, dimension). Every rank must hold the same keys in the same slots, as
            `indexer_topk` and `layouts.sort_topk_by_index` give them. Every rank returns the whole loss.
        topk_length [T]: int32 or int64, number of leading slots in use per row.

    Returns:
        A tensor of shape [], float32 (float64 for float64 scores). It hangs on the graph of `scores` also when no row
        counts; without requires_grad there, no graph is built and nothing is saved. No host sync.

    Raises:
        ValueError, TypeError: an argument's type, shape, dtype, device or value does not fit.
        IndexError: an id >= S in a slot in use, on CPU.

    Source: DeepSeek-V3.2 report, indexer training of the sparse stage.
    """
    op = "indexer_loss"
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{op}: reduction must be "mean" or "sum", got {reduction!r}')
    for name, x in (("q", q), ("kv", kv), ("lse", lse), ("indices", indices), ("scores", scores)):
        api._tensor(op, name, x)
        checks.check_strided(op, name, x)
    _check_coeff(op, coeff, scores)
    _check_per_row(op, "row_mask", row_mask, indices, (torch.bool,))
    _check_per_row(op, "topk_length", topk_length, indices, (torch.int32, torch.int64))
    if group is not None and not torch.compiler.is_compiling():
        _check_group(op, group)

    if topk_length is not None and indices.dim() and indices.dtype in (torch.int32, torch.int64):  # checked below
        indices = expand_topk(indices, topk_length)
    if row_mask is not None:
        # A row that does not count becomes a row without keys. Masking its KL instead would send 0 * NaN to its scores.
        indices = torch.where(row_mask.unsqueeze(-1), indices, -1)

    args, batch = api._target_args(op, q.detach(), kv.detach(), lse.detach(), indices, softmax_scale)
    packed_q, packed_kv, packed_lse, indices, scale, _ = args
    autocast = not packed_q.is_meta and torch.is_autocast_enabled(packed_q.device.type)  # which casts both
    if packed_q.dtype == packed_kv.dtype or not autocast:
        checks.check_attention_target(packed_q, packed_kv, packed_lse, indices, scale, op=op)
    if api._readable(indices):
        checks.check_ids(op, indices, packed_kv.shape[0])
    if batch is not None:
        scores = batch.pack("scores", scores)
    target = api._call(api._attention_target, args)
    checks.check_indexer_kl(target, scores, indices, op=op)
    if group is not None:
        target = _sum_over_group(target, group)
    kl = api._call(api._indexer_kl, (target, scores, indices))

    loss = kl.sum()
    if reduction == "mean":
        loss = loss / (max(kl.numel(), 1) if row_mask is None else row_mask.sum().clamp(min=1))
    return loss * (coeff.reshape(()).to(loss.dtype) if isinstance(coeff, Tensor) else coeff)


def attach_loss(x: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    """Returns x; when a gradient comes back through it, `loss` gets the gradient `scale` besides.

    So an auxiliary loss made deep inside a model is trained by the main loss's `backward()`, with no list of losses to
    pass around. Under activation checkpointing the loss is made again together with x and counted once; in a pipeline
    it travels with the activation.

    Args:
        x: floating point, any shape: an activation that the main loss depends on. Its gradient passes unchanged.
        loss: floating point; usually one number; with more, each element gets the gradient.
        scale: one number, or of the shape of `loss`; default 1. A tensor, since a Python number would be frozen into a
            compiled region. Nothing is copied: the value that the tensor has when backward runs counts, so a gradient
            scaler or a schedule may change it in place after the forward pass. It gets no gradient itself.

    Returns:
        x as a view, that requires grad if `x` or `loss` does. An in-place operation on a view from a custom function is
        an error in PyTorch: write `y = f(y)`, not `f_(y)`. Where `loss` does not require grad, or grad mode is off: x.
        A copy of an x made in inference mode, of every x in an exported program, and in a compiled region of one that
        does not require grad.

    Second derivatives are right (`scale` is a constant to them), so are torch.func.grad and vmap. Forward-mode AD, and
    vmap inside a compiled region, raise RuntimeError. With torch.compile, change `scale` outside the compiled region:
    where the region itself writes to it, an older value may count. An old torch (2.9, say) checks the version of every
    tensor that a compiled region saves: there a change of `scale` between its forward and its backward raises torch's
    error about in-place modification.

    Raises:
        TypeError, ValueError: an argument is not a tensor, not floating point, or of the wrong shape or device.
    """
    op = "attach_loss"
    for name, value in (("x", x), ("loss", loss)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{op}: {name} must be floating point, got {value.dtype} {[*value.shape]}")
    if loss.device != x.device:
        raise ValueError(f"{op}: loss must be on {x.device} like x, got {loss.device}")
    if scale is not None:
        _check_scale(op, scale, loss)
    compiling = torch.compiler.is_compiling()
    if not compiling and _has_tangent(loss):
        raise RuntimeError(_NO_FORWARD_MODE)
    if compiling and (torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_batchedtensor(loss)):
        raise RuntimeError(f"{op}: torch.vmap inside torch.compile would lose the loss; use one of the two")
    # inside vmap a tensor does not show that it requires grad
    if not (torch.is_grad_enabled() and (loss.requires_grad or torch._C._are_functorch_transforms_active())):
        return x
    if not x.requires_grad and (compiling or x.is_inference()):  # a question that cannot be traced
        x = x.clone()  # an inference tensor cannot hold a graph, and would lose the loss
    if torch.compiler._is_exporting_flag:  # is_exporting() of torch 2.9 is true in every compiled region
        exported: Tensor = torch.ops.dsa.attach_loss.default(x, loss, scale)
        return exported
    attached: Tensor = (_AttachLoss if compiling else _AttachLossEager).apply(x, loss, scale)
    return attached


_NO_FORWARD_MODE = (
    "attach_loss: forward-mode AD is not supported: the loss acts on gradients alone and has no place in a tangent"
)


class _AttachLoss(torch.autograd.Function):
    """What torch.compile traces. It refuses functions with a `jvp`, which is why there is another for eager."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        _, loss, scale = inputs
        ctx.scale = scale  # not save_for_backward, which forbids a change in place until backward
        ctx.loss_shape, ctx.loss_dtype = loss.shape, loss.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype = ctx.loss_shape, ctx.loss_dtype
        if ctx.scale is None:
            grad_loss = torch.ones(shape, dtype=dtype, device=grad.device)
        elif torch.compiler.is_compiling():
            # What depends on no incoming gradient may move to the forward graph, where `scale` has its old value. An
            # opaque op that takes the gradient stays behind; an empty slice of it need not be written to memory.
            grad_loss = _attach_loss_backward(grad[:0] if grad.dim() else grad, ctx.scale, shape, dtype)
        else:
            grad_loss = _loss_gradient(grad, ctx.scale, shape, dtype)
        return grad, grad_loss, None


class _AttachLossEager(_AttachLoss):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, loss: Tensor, scale: Tensor | None) -> Any:
        """Every sample attaches its own loss; what the samples share is repeated, so that its gradients add up."""

        def spread(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(dim, 0)

        loss = spread(loss, in_dims[1])
        if scale is not None and in_dims[2] is not None:
            scale = scale.movedim(in_dims[2], 0)
            if scale.shape != loss.shape:  # one number for each sample
                scale = scale.reshape(info.batch_size, *[1] * (loss.dim() - 1))
        return _AttachLossEager.apply(spread(x, in_dims[0]), loss, scale), 0


def _loss_gradient(grad: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`scale` in the shape and dtype of the loss, in new memory: a gradient that stays around must not share it."""
    if scale.numel() == 1:
        scale = scale.reshape(())
    return (torch.ones(shape, dtype=dtype, device=grad.device) * scale).to(dtype)


@torch.library.custom_op(
    "dsa::attach_loss_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor scale, SymInt[] shape, ScalarType dtype) -> Tensor",
)
def _attach_loss_backward(grad: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return _loss_gradient(grad, scale, shape, dtype)


@_attach_loss_backward.register_fake
def _(grad: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=grad.device)


@torch.library.custom_op(
    "dsa::attach_loss", mutates_args=(), schema="(Tensor x, Tensor loss, Tensor? scale=None) -> Tensor"
)
def _attach_loss(x: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    """What torch.export keeps: of a torch.autograd.Function it takes the forward alone, and the loss would be lost."""
    return x.clone()  # an op may not return its argument


@_attach_loss.register_fake
def _(x: Tensor, loss: Tensor, scale: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


_attach_loss.register_autograd(_AttachLoss.backward, setup_context=_AttachLoss.setup_context)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _check_coeff(op: str, coeff: object, scores: Tensor) -> None:
    if isinstance(coeff, Tensor):
        checks.check_strided(op, "coeff", coeff)
        got = f"{coeff.dtype} {[*coeff.shape]} on {coeff.device}"
        if coeff.dtype == torch.bool or coeff.is_complex():
            raise TypeError(f"{op}: coeff must be a real number, got {got}")
        if coeff.numel() != 1:
            raise ValueError(f"{op}: coeff must have one element, got {got}")
        if coeff.device != scores.device and not (coeff.dim() == 0 and coeff.device.type == "cpu"):
            raise ValueError(f"{op}: coeff must be on {scores.device} like scores, or a CPU scalar, got {got}")
        if coeff.requires_grad:
            raise ValueError(f"{op}: coeff must not require grad (multiply the loss to train a factor), got {got}")
    elif isinstance(coeff, bool) or not isinstance(coeff, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: coeff must be a number or a tensor of one element, got {type(coeff).__name__}")
    elif isinstance(coeff, float) and not torch.compiler.is_compiling() and not math.isfinite(coeff):
        raise ValueError(f"{op}: coeff must be finite, got {coeff}")


def _check_per_row(op: str, name: str, x: object, indices: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x is None:
        return
    want = f"{' or '.join(map(str, dtypes))} of shape {[*indices.shape[:-1]]} on {indices.device}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be {want}, got {type(x).__name__}")
    checks.check_strided(op, name, x)
    got = f"{x.dtype} {[*x.shape]} on {x.device}"
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {want}, got {got}")
    if x.shape != indices.shape[:-1] or x.device != indices.device:
        raise ValueError(f"{op}: {name} must be {want}, got {got}")


def _check_group(op: str, group: Any) -> None:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    want = "a ProcessGroup, a one-dimensional DeviceMesh or (DeviceMesh, dimension)"
    if isinstance(group, ProcessGroup):
        return
    pair = isinstance(group, tuple) and len(group) == 2 and type(group[1]) is int
    mesh, dim = group if pair else (group, None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{op}: group must be {want}, got {type(group).__name__}")
    if mesh.ndim != 1 and dim is None:
        raise ValueError(f"{op}: group must be {want}, got a DeviceMesh of {mesh.ndim} dimensions")
    if dim is not None and not 0 <= dim < mesh.ndim:
        raise ValueError(f"{op}: group must be {want}, got dimension {dim} of {mesh.ndim}")


def _check_scale(op: str, scale: object, loss: Tensor) -> None:
    want = f"a floating-point tensor of one element or of shape {[*loss.shape]} like loss"
    if not isinstance(scale, Tensor):
        raise TypeError(f"{op}: scale must be {want} (torch.compile would freeze a number), got {type(scale).__name__}")
    got = f"{scale.dtype} {[*scale.shape]} on {scale.device}"
    if not scale.is_floating_point():
        raise TypeError(f"{op}: scale must be {want}, got {got}")
    if scale.numel() != 1 and scale.shape != loss.shape:
        raise ValueError(f"{op}: scale must be {want}, got {got}")
    if scale.device != loss.device and not (scale.dim() == 0 and scale.device.type == "cpu"):
        raise ValueError(f"{op}: scale must be on {loss.device} like loss, or a CPU scalar, got {got}")


def _sum_over_group(target: Tensor, group: Any) -> Tensor:
    # imported here: these modules cost time, and single-process users never need them
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_reduce(target, "sum", group)  # waited for by the op that reads it
