"""Kernels generated from environments: see `trace` for how one is read, `rollouts` for how a kernel is written."""
