--- @include keys, replay
-- ARGV: lineage, k, units, sampling, then numbers in [0, 1), one per draw
-- -> {group id, earlier uses, task id, ...}, ...   Draws until batch k has so many kept units: each draw is
-- one rank of one sorted set. What the batch has stays in it; once it is sealed it gets no more.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local k, sampling = ARGV[2], ARGV[4]
local missing = tonumber(ARGV[3]) - #call('ZRANGEBYSCORE', REUSED, k, k)
if call('HEXISTS', claim_state_key(k), 'sealed') == 1 then missing = 0 end

local function draw_rank(number, kept)
  if sampling == 'newest' then return 0 end
  if sampling == 'uniform' then return math.floor(number * kept) end
  -- P(rank r) = log((r + 2) / (r + 1)) / log(kept + 1), about 1 / r: the first are likelier, all can be.
  return math.floor((kept + 1) ^ number) - 1
end

for i = 5, math.min(#ARGV, 4 + missing) do
  local kept = call('ZCARD', REPLAY)
  if kept == 0 then break end
  local rank = math.min(draw_rank(tonumber(ARGV[i]), kept), kept - 1)
  local gid = call('ZRANGE', REPLAY, rank, rank)[1]
  call('ZREM', REPLAY, gid)
  call('ZREM', AGES, gid)
  call('ZADD', REUSED, k, gid)
end

local answer = {}
for i, gid in ipairs(call('ZRANGEBYSCORE', REUSED, k, k)) do
  answer[i] = { gid, tonumber(call('HGET', kept_key(gid), 'uses') or '0'), unpack(ids_of_kept(gid)) }
end
return answer
