--- @include keys
-- ARGV: run_id of the server that answers.  -> state of the run, NONE if the store has no such run
-- A server with another run_id than the confirmed one began again from its files, or is a replica that
-- took over: it may have lost its last seconds. Leasing and claiming stay closed until the learner has
-- restored what this store lost.
local meta = call('HMGET', META, 'state', 'gen')
if not meta[1] then return 'NONE' end
if meta[2] == ARGV[1] then return meta[1] end
draw_on_reserve()
call('HSET', META, 'seen', ARGV[1])
if meta[1] == 'ENDED' then return 'ENDED' end -- a learner that goes on has to recover first
call('HSET', META, 'state', 'RECOVERING')
return 'RECOVERING'
