"""Episode records: fields, wire form, rules, large payloads elsewhere.

codec         Episodes and completions to bytes and back, each checked on both sides
demonstrations
              Demonstrations in tokens: rows to imitate, with a mask of the tokens that are
              trained
episode       The episode record, which an actor makes and the learner trains on
filesystems   Folders and buckets by their URL, as fsspec writes it: `file:///folder`,
              `s3://bucket/folder`
object_store  Large records outside of Redis, in a folder or a bucket, named after task and content
rules         Rules of a record that its schema cannot state: parts that agree, valid numbers,
              limits of a run
summaries     Summaries of records and chunks for a broker, checked together without their episodes
wire          Records to msgpack and back, by msgspec, with refusals that name the field
"""
