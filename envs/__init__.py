"""The environments that ship: one file each, one definition for every backend.

The contract is in `rlgraph.environment`; the table of names in `rlgraph.registry`. The files import nothing
of rlgraph, so any of them can be copied as the start of a new environment.
"""
