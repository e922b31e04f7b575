"""Peak memory of forward and backward, each op in a process of its own, where the dense form needs more than 4 GiB."""

import json
import os
import subprocess
import sys

import pytest

from inputs import OPS

MIB = 1 << 20

SCRIPT = """
import json, resource, sys
import torch, dsa_ops

def inputs(op, T, S=1, H=1, D=1, Hi=1, Di=1, K=1):
    i32, zeros = torch.int32, lambda *n: torch.zeros(*n, dtype=torch.int32)
    index = lambda: (torch.randn(T, Hi, Di), torch.randn(S, Di), torch.randn(T, Hi))
    ids = lambda: torch.randint(0, S, (T, K), dtype=i32)
    if op == "indexer_topk":
        return (*index(), zeros(T), zeros(T) + S, K), 3
    if op == "indexer_scores":
        return (*index(), ids()), 3
    if op == "sparse_mla":
        return (torch.randn(T, H, D), torch.randn(S, D), ids(), 0.1, D), 2
    if op == "attention_target":
        return (torch.randn(T, H, D), torch.randn(S, D), torch.randn(T, H), ids(), 0.1), 0
    if op == "indexer_kl":  # expanded: inputs of this size would be most of the peak
        wide = lambda x: x.expand(T, K)
        return (wide(torch.rand(1, K)), wide(torch.randn(1, K)), wide(torch.arange(K, dtype=i32)[None])), 2
    q, k = torch.randn(T, H, D), torch.randn(S, D)
    bounds = zeros(T), zeros(T) + S
    return (*index(), q, k, torch.full((T, H), 9.0), *bounds, 0.1, torch.ones(T)), 3

def step(op, **sizes):
    # peak bytes over those of the inputs, and bytes of the results, after the forward and after the backward
    args, differentiable = inputs(op, **sizes)
    leaves = [x.requires_grad_() for x in args[:differentiable] if x.is_floating_point()]
    start = peak()
    outputs = getattr(torch.ops.dsa, op)(*args)
    results = list(outputs) if isinstance(outputs, tuple) else [outputs]
    report = [(peak() - start, size(results))]
    if leaves:
        through = [o for o in results if o.requires_grad]
        grads = [torch.ones(()).expand(o.shape) for o in through]
        results += [g for g in torch.autograd.grad(through, leaves, grads, allow_unused=True) if g is not None]
        report.append((peak() - start, size(results)))
    return report

def size(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

op, sizes = json.loads(sys.argv[1])
step(op, **{n: min(x, 8) for n, x in sizes.items()})  # loads what is loaded on first use
print(json.dumps(step(op, **sizes)))
"""

# Sizes, and elements (of 4 bytes) that the dense form holds at once: products [T, Hi, S] of the top-k; gathered keys
# [T, K, D] of the target; in the others' backward such a tensor and its gradient; for the KL of a list eight of [T, K].
LARGE = {
    "indexer_topk": (dict(T=2048, S=16384, Hi=33, Di=8, K=64), 2048 * 16384 * 33),
    "indexer_scores": (dict(T=2048, S=2048, Di=136, K=2048), 2 * 2048 * 2048 * 136),
    "sparse_mla": (dict(T=2048, S=2048, D=576, K=512), 2 * 2048 * 512 * 576),
    "attention_target": (dict(T=4096, S=4096, D=576, K=512), 4096 * 512 * 576),
    "indexer_kl": (dict(T=140_000, K=1024), 8 * 140_000 * 1024),
    "dense_indexer_kl": (dict(T=1024, S=16384, Hi=33, Di=8, H=4, D=8), 2 * 1024 * 16384 * 33),
}


def assert_bounded(op, sizes, budget_mib=256, slack_mib=64):
    """The slack is for the allocator, GEMM buffers and code that is loaded on first use."""
    env = {**os.environ, "DSA_OPS_WORKSPACE_MB": str(budget_mib)}
    command = [sys.executable, "-c", SCRIPT, json.dumps([op, sizes])]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    for extra, results in json.loads(done.stdout):
        print(f"{op}: {extra / MIB:.0f} MiB at the peak, {results / MIB:.0f} MiB of them results")
        assert extra < (budget_mib + slack_mib) * MIB + 2 * results  # a gradient and its float32 accumulator


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_peak_memory(op):
    """With the default budget on CPU."""
    sizes, elements = LARGE[op]
    assert elements * 4 > 4 << 30
    assert_bounded(op, sizes)


@pytest.mark.parametrize("op", ["indexer_topk", "dense_indexer_kl"])
def test_peak_memory_with_very_many_keys(op):
    """One head makes row tiles tall: a few rows of a tile by all the keys would not fit this budget."""
    assert_bounded(op, dict(T=8, S=1 << 17, Di=4, H=1, D=4, K=64), budget_mib=32, slack_mib=32)
