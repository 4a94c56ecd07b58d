"""The stateless broker process.

admin         Requests that no actor sends: status of the run, revocation and enrolment of keys,
              drains
audit         Audit of joins, refusals and revocations: counted, logged, and kept in a bounded file
dispatch      Dispatch: reads messages of a socket, has each answered in a task of its own, sends
              replies
flow_control  Flow control: bounds on requests, on replies that wait for a peer, on HELLOs and
              failures
key_watch     Watch over the keys folder while the broker serves: revoked peers, and the broker's
              own new key
lanes         Lanes of requests: heartbeats never wait behind work, and work that would wait too
              long is shed
leasing       Leases of tasks: grant, wait for work, take back a lost grant, reap what expired
liveness      Liveness of actors: the incarnations that the broker serves, and when each was last
              heard
server        The broker's process: a ROUTER between actors and the store, and periodic chores
              beside it
service       Answers to actors: each message is checked, costs at most one call of the store, and
              is answered
store_cache   Facts of the store that every request needs, read at intervals by one call each
validation    Validation of messages: ranges, and records that match their claims and are possible
              in this run
"""
