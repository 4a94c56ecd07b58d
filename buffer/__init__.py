"""The replay buffer: the episode record and the Redis store with its leases.

admin         A whole server: its runs, their keys (`nyala up --fresh`), maxmemory (`nyala chaos`)
client/       The client of one Redis server: address, identity, connection, scripts, errors
live_brokers  Brokers of a run that serve now, from the figures that each leaves in the store
operations/   Operations on the store, as values that `Store` and `AsyncStore` can run
record/       Episode records: fields, wire form, rules, large payloads elsewhere
sampling      Sampling as the store shows it: what is under way, and why nobody samples
store         Clients of a run's store: `Store` for threads, `AsyncStore` for an event loop
"""
