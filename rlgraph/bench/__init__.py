"""The benchmark: variants on the same work, checked against each other before they are timed, in turns.

`variants` is the table of variants and what each must provide; `torch_variants`, `jax_variants` and `peers` fill it;
`worker` holds one variant in a process of its own; `harness` drives them; `overhead` measures launches; `report`
makes tables, plots and comparisons; `results` is the files' layout, `provenance` where figures come from; `solve` times
training to a mark; `cli` is the command. docs/benchmarks.md explains the columns, the JSON file and how to add a
variant.
"""
