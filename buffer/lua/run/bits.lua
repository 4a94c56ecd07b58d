-- ARGV: name of a bitmap of the run.  -> its bytes, '' if there is none
return redis.call('GET', KEYS[1] .. ':' .. ARGV[1]) or ''
