"""The parts of tools/bench, each of which can be read and tested alone.

presets   sizes of published models, patterns of keys
inputs    the tensors of one measured case, drawn when first asked for
calls     this package's ops as calls without arguments, and the work that each of them has to do
truth     the same results in float64 on a few rows and keys, and how far a result is from them
measure   the clock, the memory, the machine's ceilings
probes    two Triton kernels that find the ceilings of gathers and reductions
peers     other implementations of the same work, one small function each
report    table, JSON, plot
"""
