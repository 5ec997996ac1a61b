"""Decided by the device: loops, branches, graphs that it launches; all calls of cuda-bindings."""
