"""Messages that cross a process boundary, and their wire form.

agent_calls      Content of calls and replies of live agents, as door and actor write it
codec            Codec of messages and task specs: one msgpack map {v, run, inc, seq, message} in
                 one frame
fields           Building blocks of messages: structs that msgspec turns into msgpack and back,
                 within limits
manifest         The weight manifest: layout, digests and probe of a policy version, and updates
                 that lead to it
conversation_messages
                 Messages of conversations with live agents: their actors and hosts on both sides
                 of the broker
messages         Messages between the broker and its actors, observers and operators
weight_messages  Messages of the weight plane, between an actor's receiver and the weight publisher
"""
