--- @include keys
-- -> dropped group, the group that repeats its prompt or '', ...   (key `again`)
return call('HGETALL', AGAIN)
