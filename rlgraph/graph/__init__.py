"""CUDA graphs: capture and replay for torch (`capture`), command buffers for JAX (`xla`).
`Graph.info` says what a captured graph holds (`inspect`).

Nothing is imported here, so that choosing one backend never loads the other.
"""
