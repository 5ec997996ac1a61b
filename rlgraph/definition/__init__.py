"""What becomes of a user's definition before it is an environment.

`files` finds it, `modules` loads it, `contract` checks its constants and spaces, `trial` runs it on the `arrays` of
a backend, `suspects` finds the line to blame, and `errors` says in one line what it raised, where, and what to write
instead. The contract itself is in `rlgraph.environment`.
"""
