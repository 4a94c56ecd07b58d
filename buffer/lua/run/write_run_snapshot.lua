--- @include keys
-- ARGV: lineage, text  -> 1   The learner's newest run snapshot, in place of the one before.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
draw_on_reserve()
call('HSET', run .. ':bulletin', 'text', ARGV[2])
return 1
