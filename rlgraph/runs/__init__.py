"""The life of a run: train, resume, evaluate; its folder, checkpoints and metrics."""
