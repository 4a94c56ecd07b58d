--- @include keys, conversations
-- ARGV: number of the newest change that a broker knows.  -> {newest, wanted conversations, {task that changed, ...}}
-- A store that was set back has lower numbers: then every conversation may have changed.
local newest, known = tonumber(call('HGET', META, 'news') or '0'), tonumber(ARGV[1])
if known > newest then known = 0 end
return { newest, call('ZCARD', WANTED), call('ZRANGEBYSCORE', NEWS, '(' .. whole(known), '+inf') }
