"""Episode records: fields, wire form, rules, large payloads elsewhere.

codec         Episodes and completions to bytes and back, each checked on both sides
episode       The episode record: what an actor makes and the learner trains on
filesystems   Folders and buckets by their URL, as fsspec writes it
object_store  Large records outside of Redis, in a folder or a bucket
rules         Rules of a record that its schema cannot state
summaries     Summaries of records and chunks for a broker
wire          Records to msgpack and back, by msgspec; a refusal is worded once all else has
              failed
"""
