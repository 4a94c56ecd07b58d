-- -> {bytes used, limit in bytes; 0 = none}
local figures = redis.call('INFO', 'memory')
return { tonumber(string.match(figures, 'used_memory:(%d+)')), tonumber(string.match(figures, 'maxmemory:(%d+)')) }
