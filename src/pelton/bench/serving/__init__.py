"""Load over HTTP on any OpenAI-compatible server: throughput, and the times a user feels.

`load` says what is asked of a server, `drive` asks it, `result` makes figures of the answers, `compare` runs several
servers in turn, `table` and `plot` show what came of it. docs/benchmarking.md defines every figure.
"""
