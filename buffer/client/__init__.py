"""The client of one Redis server: address, identity, connection, scripts, errors.

address          Redis clients from a URL: one server, one behind TLS, a pair that sentinels watch
connection       Pipelined connection of an event loop to Redis: many calls at once, answered in
                 order
errors           Errors of Redis as errors of Nyala, naming the setting or server to look at
scripts          Lua scripts by name: the files of `lua/`, each behind the libraries it includes
server_identity  Identity of a Redis server, checked on every connect; releases of Redis and Valkey
                 that are safe
server_state     State of a Redis server: version, eviction, durability, memory, clock
"""
