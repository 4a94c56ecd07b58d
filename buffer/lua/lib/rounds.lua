--- @include keys, conversations
-- Evaluation rounds: removing their unfinished tasks, and closing them.

-- Removes up to `limit` unfinished tasks of an evaluation round. Returns how many.
local function end_round_tasks(round, limit)
  local ids = call('SRANDMEMBER', round_key(round, ':u'), limit)
  for _, id in ipairs(ids) do
    call('SREM', round_key(round, ':u'), id)
    call('ZREM', round_key(round, ':r'), id)
    call('ZREM', EVAL_LEASES, id)
    drop_mailbox(id)
    call('UNLINK', task_key(id), chunks_key(id))
  end
  return #ids
end

-- Closes a round without unfinished tasks; its results stay readable for an hour.
local function close_round(round)
  call('ZREM', ROUNDS, round)
  for _, id in ipairs(call('HKEYS', round_key(round))) do call('UNLINK', task_key(id)) end
  call('EXPIRE', round_key(round), 3600)
  call('EXPIRE', round_key(round, ':x'), 3600)
end
