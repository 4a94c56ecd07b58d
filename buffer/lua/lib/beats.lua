--- @include keys, tasks, conversations
-- Renewal of leases with chunks, for BEAT and SAY. Their ARGV begin alike: ttl ms, max chunks, progress timeout ms (0 =
-- none), max attempts, most bytes of a task's chunks, longest lease ms (0 = no limit).
-- A chunk counts only where the stored length ends, or replaces all of them where it starts at 0 and is longer, or is
-- of an episode that was begun again: its first token was made under this lease, and none of those stored. TAKEN: the
-- lease is over and its task was charged, because it brought more bytes than one episode can have, or tokens of earlier
-- leases than those stored, which nobody could go on with, stood still, or lasted too long; what it stored stays. TAKEN
-- without a charge: its tokens are older than the lease allows, and nothing of them is stored. GAP 0: all tokens are
-- wanted in one chunk, or with more of its holder's own, or once its agent's calls are stored. Nothing stood still or
-- lasted too long while no broker reaped: the server was stopped or cut off, or its clock jumped. Time in which a task
-- waits for its agent does not count.
local now, max_chunks, timeout = now_ms(), tonumber(ARGV[2]), tonumber(ARGV[3])
local max_attempts, max_bytes, longest = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local deadline = whole(now + tonumber(ARGV[1]))
local watch = call('HMGET', META, 'grace_until', 'reaped_at', 'ttl')
local grace_until, gap = tonumber(watch[1] or '0'), now - tonumber(watch[2] or now)
local is_watched = gap >= 0 and gap <= tonumber(watch[3] or '0') / 2

local function store(id, chunk, length, bytes, last_fence, replaces, begins_anew)
  local chunks = chunks_key(id)
  if begins_anew then call('HSET', task_key(id), 'given', '0', 'from', '0') end
  call('HSET', task_key(id), 'len', whole(length), 'progress', whole(now), 'bytes', whole(bytes),
    'lastfence', last_fence)
  if replaces then call('UNLINK', chunks) end
  if call('RPUSH', chunks, chunk) >= max_chunks then
    local joined = table.concat(call('LRANGE', chunks, 0, -1))
    call('DEL', chunks)
    call('RPUSH', chunks, joined)
  end
end

-- Why a lease is taken away that brings no tokens now, or lasts too long; nil = it is not.
local function is_overdue(id, fence, progress, grows)
  local function exceeds(since, limit) return limit > 0 and now - math.max(since, grace_until) > limit end
  local function why_since(began)
    if not grows and exceeds(math.max(tonumber(progress or now), began), timeout) then return 'no progress' end
    if exceeds(math.max(fence / 1000, began), longest) then return 'too slow' end -- a fence is a time in microseconds
  end
  if not is_watched or not why_since(0) then return nil end
  return why_since(turn_began(id, now))
end

-- The bytes that a task may have now, and whether one that is sent whole has more than any holder of a possible episode
-- can have added. What came with the lease is not its holder's doing: it may add twice what its own tokens take, and
-- never adds half of the limit, which is what the longest episode takes. `given` and `from` outlive chunks that were
-- dropped for memory: whoever resumed them has them still, and sends them again.
local BYTES_OF_A_TOKEN = 9
local function allowance(id, bytes, length, begins_anew)
  if bytes <= max_bytes or begins_anew then return max_bytes, true end
  local task = call('HMGET', task_key(id), 'given', 'from')
  local given, own = tonumber(task[1] or '0'), length - tonumber(task[2] or '0')
  local most = math.min(given + 2 * BYTES_OF_A_TOKEN * own, 2 * max_bytes)
  return math.max(most, max_bytes), bytes - given > max_bytes / 2
end

-- Renews a lease and stores the chunk that came with it, if any. Returns the verdict and the length.
local function renew(id, fence, offset, tokens, chunk, oldest, first_fence, last_fence, key)
  local verdict, state, length, progress, bytes, least, stored_fence, teacher = judge(id, fence, key)
  if verdict ~= 'OK' then return verdict, length or 0 end
  local is_whole = offset == 0 and length > 0
  local begins_anew = is_whole and first_fence == fence and stored_fence < tonumber(fence)
  local replaces = begins_anew or (is_whole and tokens > length)
  local grows = tokens > 0 and not teacher and (offset == length or replaces)
  local why, most = is_overdue(id, fence, progress, grows), nil
  if grows then
    bytes = #chunk + (replaces and 0 or bytes)
    if length > 0 and not replaces and tonumber(first_fence) < stored_fence then why = 'tokens out of order' end
    local is_too_large
    most, is_too_large = allowance(id, bytes, offset + tokens, begins_anew)
    if offset > 0 then is_too_large = #chunk > max_bytes end
    if bytes > most and is_too_large then why = 'too many bytes' end
  end
  if grows and tonumber(oldest) < least then
    return_uncharged(id, state)
    return 'TAKEN', length
  end
  if why then
    take_away(id, state, max_attempts, why)
    return state == 'L' and 'TAKEN' or 'STALE', length -- one that was reaped has been charged before
  end
  if begins_anew and tokens > 0 and has_replies(id) then
    lose_conversation(id, max_attempts, 'begun again after its agent was answered', key)
    return 'TAKEN', length
  end
  if state == 'R' then
    call('ZREM', ready_key(id, teacher), id)
    call('HSET', task_key(id), 'st', 'L')
  end
  call('ZADD', lease_key(id, teacher), deadline, id)
  if grows and bytes <= most and not is_uncalled(id) then
    store(id, chunk, offset + tokens, bytes, last_fence, replaces, begins_anew)
    return 'OK', offset + tokens
  end
  if grows then return 'GAP', 0 end -- all its tokens in one chunk are smaller than in many, and have their calls then
  return tokens > 0 and offset + tokens > length and 'GAP' or 'OK', length
end
