"""The stateless broker process.

admin         Requests of observers, operators and enrolling actors: run status, revocation, drains,
              enrolment
audit         Audit of joins, refusals and revocations: counted, logged, and kept in a bounded file
conversations
              Conversations of live agents: their mailboxes in the store, and long polls for what is
              new there
dispatch      Dispatch of requests: read from a socket, each answered in a task of its own; a
              broker's parts
flow_control  Flow control: bounds on requests, on replies that wait for a peer, on HELLOs and
              failures
key_watch     Watch over the keys folder while the broker serves: revoked peers, and the broker's
              own new key
lanes         Lanes of requests: heartbeats before work, late work shed; the clock that silence is
              measured by
leasing       Leases of tasks: grant, wait for work, share between actors, take back a lost grant,
              reap
liveness      Liveness of actors: who is served, when each was last heard, how soon others have its
              work
server        The broker's process: a ROUTER between actors and the store, and periodic chores
              beside it
service       Answers to actors: each message is checked, costs at most one call of the store, and
              is answered
store_cache   State of the store that every request needs, read at intervals by one call each
validation    Validation of messages: permissions, ranges, and records that are possible in this run
"""
