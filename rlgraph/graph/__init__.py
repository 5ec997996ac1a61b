"""CUDA graphs in torch: capture and replay; `device` holds control flow by the device, `inspect` what a graph holds.

Nothing is imported here, so that choosing one backend never loads the other.
"""
