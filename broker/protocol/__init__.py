"""Messages that cross a process boundary, and their wire form.

codec            Codec of messages: one msgpack map {v, run, inc, seq, message} in one frame
fields           Building blocks of messages: structs that msgspec turns into msgpack and back,
                 within limits
manifest         The weight manifest: layout and digests of the bytes of a policy version
messages         Messages between the broker and its actors, observers and operators
weight_messages  Messages of the weight plane, between an actor's receiver and the weight publisher
"""
