"""All that crosses a process boundary: messages, sockets, keys, weights, and the stateless server.

__main__      `python -m broker --config runs/x/config.yaml`: serve one run until SIGTERM
client        Client of the broker: calls sent again until answered, and release of leases granted
              too late
connection    Connection of a client to one of the run's brokers: one DEALER and the state of its
              handshake
metrics_page  The broker's page of `/metrics`: its actors, and the counts of the store that it
              serves
protocol/     Messages that cross a process boundary, and their wire form
server/       The stateless broker process
transport/    CURVE keys, authentication and ZeroMQ sockets
weights/      The weight plane between learner and actors: ports, sparse updates, memory
"""
