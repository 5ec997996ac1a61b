"""CUDA graphs: capture and replay for torch (`capture`), command buffers for JAX (`xla`).

Nothing is imported here, so that choosing one backend never loads the other.
"""
