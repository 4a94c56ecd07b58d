--- @include keys
-- ARGV: lineage, then dropped group, the group that asks its prompt again or '' while it waits for one, ...
-- Lives on beside the counts, because the learner that dropped a group may die before it has asked again.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
draw_on_reserve()
for i = 2, #ARGV, 2 do call('HSET', AGAIN, ARGV[i], ARGV[i + 1]) end
return #ARGV
