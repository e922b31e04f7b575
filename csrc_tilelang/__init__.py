"""Fused kernels, one file per kernel, each readable alone: TileLang, and Triton for small steps bound by memory.

A kernel file knows tensors and TileLang or Triton. It neither imports `dsa_ops` nor registers anything with torch:
`dsa_ops.dispatch` imports it, and only once it is about to ask it, so that `import dsa_ops` works without either. A
kernel is a row of the table in `dsa_ops.dispatch` and a file here that offers:

    refuse(...) -> str | None
        Takes the op's arguments in the order of its schema. None if the kernel serves the call, else the reason in
        words, such as "q is float32, the kernel takes bfloat16". It looks at shapes, dtypes, strides, address
        alignment, device and compute capability, and at nothing else: never at values, never with a host sync. An
        error raised here is a bug and is not taken for a refusal.

    factories
        Functions that take constants (heads, widths, a variant) and return a TileLang prim_func, made into kernels by
        `_compile.kernel`: compiled at the first call with these constants, kept in the process and on the machine.
        Lengths, the number of selected keys and the softmax scale are run-time arguments, so that a new length never
        compiles. A Triton kernel needs no factory.

    launch(...) -> the op's outputs
        Takes the op's arguments again. Allocates outputs and workspace with torch, and runs on the current stream of
        the inputs' device, which dispatch has made the current one. Outputs are written in full, contiguous, and share
        no memory with each other or with an input.

    compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None
        For `dsa_ops.warmup`: compiles what a model of these widths needs. None when done, else a reason as in `refuse`.

    VARIANTS
        [(kernel, constants), ...]: what tools/lower_check compiles, every path through the file once.

The docstring at the top of a kernel file says what one block computes, the tile sizes and why, the shared memory and
register budget, the limits that `refuse` tests, what becomes of empty slots, the order in which sums are taken, and
what a compilation depends on.
"""


class CompileError(RuntimeError):
    """A kernel could not be compiled here, say because there is no nvcc. Dispatch takes it for a refusal."""
