"""Steps that the tests of faults share. Each of those tests says in its first line where the fault was seen.

T query rows, S keys, K slots; other sizes are those of `inputs.Case`.
"""

import torch

import calls
import inputs
import oracle

ID_OPS = ["indexer_scores", "sparse_mla", "attention_target"]  # the ops that read the key of an id
KEYS = {"indexer_scores": "k", "indexer_topk": "k", "sparse_mla": "kv", "attention_target": "kv"}


def ids(rows, repeat=1):
    return torch.tensor(rows, dtype=torch.int32).repeat(repeat, 1)


def bounds(starts, ends, device="cpu"):
    return {n: torch.as_tensor(b, dtype=torch.int32).to(device) for n, b in (("starts", starts), ("ends", ends))}


def causal(T, device="cpu"):
    return bounds([0] * T, range(1, T + 1), device)


def arguments(name, indices=None, *, device="cpu", **changes):
    """The op's arguments with these ids (or bounds, among the changes), differentiable ones with requires_grad.

    A change that names an argument replaces it, every other is a field of the case. attention_target gets the lse that
    belongs to its ids.
    """
    if indices is not None:
        changes |= {"indices": indices}
        changes = {"T": indices.shape[0], "K": indices.shape[1], "topk_length": None} | changes
    names = set(inputs.arguments(name, T=1))
    fields = {n: x for n, x in changes.items() if n in inputs.Case.__dataclass_fields__}
    args = inputs.arguments(name, device=device, grad=True, **fields)
    for n, x in changes.items():
        if n in names:
            grad = isinstance(args[n], torch.Tensor) and args[n].requires_grad
            args[n] = x.to(device).requires_grad_(grad) if isinstance(x, torch.Tensor) else x
    if name == "attention_target":
        names = ("q", "kv", "indices", "softmax_scale", "topk_length")
        _, lse = oracle.sparse_mla(d_v=1, **calls.on_cpu({n: args[n] for n in names}))
        args["lse"] = lse.to(args["lse"].dtype).to(device)
    return args


def run(name, args, incoming=None):
    """Outputs by name and gradients by "grad_" + name; `incoming` defaults to a random gradient of every output."""
    outputs = calls.run(name, args)
    found = {n: x.detach() for n, x in outputs.items()}
    if name in inputs.DIFFERENTIABLE:
        incoming = calls.incoming(name, outputs) if incoming is None else incoming
        gradients = calls.gradients(name, args, incoming, outputs)
        found |= {f"grad_{n}": g for n, g in gradients.items()}
    return found


def check(name, args, tolerance=None, gradient_tolerance=None):
    """Outputs and gradients agree with the oracle's; returns both as `run` does."""
    outputs = calls.run(name, args)
    calls.assert_all_near(outputs, calls.reference(name, args), tolerance)
    if name not in inputs.DIFFERENTIABLE:
        return outputs
    incoming = calls.incoming(name, outputs)
    gradients = calls.gradients(name, args, incoming, outputs)
    calls.assert_all_near(gradients, calls.reference_gradients(name, args, incoming), gradient_tolerance)
    return {n: x.detach() for n, x in outputs.items()} | {f"grad_{n}": g for n, g in gradients.items()}
