--- @include keys, rounds
-- ARGV: lineage, step.  -> unfinished tasks removed
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local round = ARGV[1] .. ':' .. ARGV[2]
local removed = end_round_tasks(round, 1000000)
close_round(round)
return removed
