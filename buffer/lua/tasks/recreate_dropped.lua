--- @include keys
-- ARGV: lineage, then dropped group, the group that repeats its prompt or '' while there is none, ...
-- Stored in the key `again`: the learner that dropped a group may die before it has created the other.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
draw_on_reserve()
for i = 2, #ARGV, 2 do call('HSET', AGAIN, ARGV[i], ARGV[i + 1]) end
return #ARGV
