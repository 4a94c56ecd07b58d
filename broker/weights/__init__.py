"""The weight plane between learner and actors: ports, sparse updates, shared memory, object store."""
