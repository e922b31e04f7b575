"""Fused TileLang kernels, one file per kernel, each readable alone.

A kernel file knows tensors and TileLang. It neither imports `dsa_ops` nor registers anything with torch:
`dsa_ops.dispatch` imports it, and only once it is about to ask it, so that `import dsa_ops` works without TileLang. A
kernel is a row of the table in `dsa_ops.dispatch` and a file here that offers:

    refuse(...) -> str | None
        Takes the op's arguments in the order of its schema. None if the kernel serves the call, else the reason in
        words, such as "q is float32, the kernel takes bfloat16". It looks at shapes, dtypes, strides, address
        alignment, device and compute capability, and at nothing else: never at values, never with a host sync. An
        error raised here is a bug and is not taken for a refusal.

    build(...) -> the compiled kernel
        Compiles for one (heads, widths, dtype, architecture, variant), cached. Lengths, the number of selected keys
        and the softmax scale are run-time arguments of what it returns, so that a new length never compiles.

    launch(...) -> the op's outputs
        Takes the op's arguments again. Allocates outputs and workspace with torch, builds, and runs on the current
        stream of the inputs' device. Outputs are written in full, contiguous, and share no memory with each other or
        with an input.

    compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None
        For `dsa_ops.warmup`: builds what a model of these widths needs. None when built, else a reason as in `refuse`.

The docstring at the top of a kernel file says what one block computes, the tile sizes and why, the shared memory and
register budget, the limits that `refuse` tests, what becomes of empty slots, the order in which sums are taken, and
what a compilation depends on.
"""


class CompileError(RuntimeError):
    """A kernel could not be compiled here, say because there is no nvcc. Dispatch takes it for a refusal."""
