"""What becomes of a user's definition before it is an environment.

`files` finds its text, `modules` loads it, `contract` checks its constants and spaces, `trial` runs it, and `errors` says
in one line what it raised, where, and what to write instead. The contract itself is in `rlgraph.environment`.
"""
