--- @include keys, replay
-- ARGV: lineage, most units to move in one call.  -> {units forgotten, 1 if there are more}
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local forgotten = 0
for _, units in ipairs({ REPLAY, REUSED }) do
  for _, gid in ipairs(call('ZRANGE', units, 0, ARGV[2] - 1)) do
    forget_kept(gid)
    forgotten = forgotten + 1
  end
end
return { forgotten, call('ZCARD', REPLAY) + call('ZCARD', REUSED) > 0 and 1 or 0 }
