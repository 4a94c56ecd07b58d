"""The weight plane between learner and actors: ports, sparse updates, memory, object store."""
