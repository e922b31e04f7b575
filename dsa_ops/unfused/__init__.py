"""Unfused implementations in plain PyTorch: any device, any floating dtype, any strides, memory bounded by one budget.

They are the bodies that run where no fused kernel does. Nothing is registered here.
"""
