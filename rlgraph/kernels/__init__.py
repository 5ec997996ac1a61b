"""Kernels generated from environments.

See `trace` for how one is read, into a graph of `nodes`; `rollouts` for how a kernel is written.
"""
