"""DDP and FSDP2 on two ranks: every gradient is the mean of what the ranks' data gives on one process."""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dsa_ops.nn import set_mode
from dsa_ops.nn.attention import MODES
from layers import layer

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

WORLD, BATCH, ROWS, HIDDEN = 2, 2, 19, 32


class TwoLayers(torch.nn.Module):
    """The second layer has no indexer: in the sparse modes it reads what the first selected."""

    def __init__(self, dtype=torch.float64, **changes):
        super().__init__()
        self.first = layer("dense", dtype=dtype, sink=True, **changes)
        self.second = layer("dense", dtype=dtype, has_indexer=False, **changes)

    def forward(self, x):
        out, indices, _, _ = self.first(x)
        return self.second(x + out, indices=indices).out


def made(mode, **options):
    torch.manual_seed(0)  # the same on every rank
    return set_mode(TwoLayers(**options), mode)


def data(rank, dtype=torch.float64):
    return torch.randn(BATCH, ROWS, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(10 + rank))


def step(model, x):
    model(x).float().square().mean().backward()


def gradients(model):
    """By name, wrappers left out; whole where they are sharded."""
    whole = {}
    for name, p in model.named_parameters():
        name = name.replace("module.", "").replace("_checkpoint_wrapped_", "")
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert (grad is not None) == p.requires_grad, f"{name} has {'no' if grad is None else 'a'} gradient"
        whole[name] = grad
    return whole


def expected(model, dtype=torch.float64):
    """Mean over the ranks, on this process alone."""
    found = []
    for rank in range(WORLD):
        mine = copy.deepcopy(model).to(dtype)
        step(mine, data(rank, dtype))
        found.append(gradients(mine))
    wide = torch.promote_types(dtype, torch.float32)
    return {n: None if g is None else sum(f[n].to(wide) for f in found) / WORLD for n, g in found[0].items()}


def assert_same(found, want, tolerance=1e-9):
    assert found.keys() == want.keys()
    for name, grad in want.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            error = (found[name] - grad.to(found[name].dtype)).norm()
            assert error <= tolerance * grad.norm() + 1e-12, f"{name}: error {error} of {grad.norm()}"


def indexer_norm(grads):
    return sum(g.norm().item() for n, g in grads.items() if "indexer" in n and g is not None)


def sharded(model, wrap=lambda module: module, **options):
    options["mesh"] = dist.init_device_mesh("cpu", (WORLD,))  # by default one of CUDA devices, where there are any
    model.first, model.second = wrap(model.first), wrap(model.second)
    for module in (model.first, model.second, model):
        fully_shard(module, **options)
    return model


def ddp(rank):
    for mode in MODES:
        model = made(mode)
        want = expected(model)
        parallel = DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # the second step raises where a parameter took no part in the first
            parallel.zero_grad()
            step(parallel, data(rank))
        assert_same(gradients(parallel), want)
        assert (indexer_norm(want) > 0) == (mode in ("warmup", "sparse")), mode


def ddp_without_a_coefficient(rank):
    """loss_coeff 0 gives zero gradients, not absent ones that DDP would wait for."""
    for mode in ("warmup", "sparse"):
        parallel = DistributedDataParallel(made(mode, loss_coeff=0.0), find_unused_parameters=False)
        for _ in range(2):
            parallel.zero_grad()
            step(parallel, data(rank))
        assert indexer_norm(gradients(parallel)) == 0


def fsdp(rank):
    wrappers = {"plain": lambda module: module, "checkpointed": checkpoint_wrapper}
    for mode in MODES:
        want = expected(made(mode))
        for wrap in wrappers.values():
            model = sharded(made(mode), wrap)
            step(model, data(rank))
            assert_same(gradients(model), want)


def fsdp_mixed_precision(rank):
    """Parameters and activations in bfloat16, gradients summed in float32."""
    for mode in MODES:
        want = expected(made(mode, dtype=torch.float32), torch.bfloat16)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(made(mode, dtype=torch.float32), mp_policy=policy)
        step(model, data(rank, torch.bfloat16).float())
        found = gradients(model)
        assert all(g is None or g.dtype == torch.float32 for g in found.values())
        assert_same(found, want, 1e-2)


def worker(rank, checks, store):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # a rank that waits for one that failed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    try:
        for check in checks:
            check(rank)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def on_two_ranks(tmp_path, *checks):
    torch.multiprocessing.spawn(worker, args=(checks, tmp_path / "store"), nprocs=WORLD)


def test_distributed_data_parallel(tmp_path):
    on_two_ranks(tmp_path, ddp, ddp_without_a_coefficient)


@pytest.mark.slow
def test_fully_sharded_data_parallel(tmp_path):
    on_two_ranks(tmp_path, fsdp, fsdp_mixed_precision)
