"""The replay buffer: the episode record and the Redis store with its leases.

admin         Administration of a whole Redis server: its runs, deletion of a run, another port,
              maxmemory
client/       The client of one Redis server: address, identity, connection, scripts, errors
live_brokers  Live brokers of a run, from the figures that each leaves in the store
operations/   Operations on the store, as values that `Store` and `AsyncStore` can run
record/       Episode records: fields, wire form, rules, large payloads elsewhere
sampling      Sampling as the store shows it: groups under way, and the reason if no actor samples
store         Clients of a run's store: `Store` for threads, `AsyncStore` for an event loop
"""
