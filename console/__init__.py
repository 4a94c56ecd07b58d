"""The `nyala` command: verbs, supervision of runs, displays, fault injection."""
