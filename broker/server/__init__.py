"""The stateless broker process.

admin         Requests that are no actor's: status of the run, revocation and enrolment of keys
audit         Audit of joins, refusals and revocations
dispatch      Dispatch: reads messages of a socket, has each answered in a task of its own
flow_control  Flow control: bounds on requests, on replies that wait for a peer
key_watch     Watch over the keys folder while the broker serves
lanes         Lanes of requests: heartbeats never wait behind work
leasing       Leases of tasks: grant, wait for work, take back a lost grant, reap what expired
liveness      Liveness of actors: the incarnations that the broker serves
server        The broker's process: a ROUTER between actors and the store
service       Answers to actors: each message is checked, costs at most one call of the store
store_cache   Facts of the store that every request needs, read at intervals by one call each
validation    Validation of messages: ranges, and records that are what they claim and possible
              in this run
"""
