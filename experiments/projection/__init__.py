"""Analytic step time of a tensor-parallel decoder with adapters (bytes, FLOPs, kernels, collectives)."""
