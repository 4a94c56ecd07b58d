--- @include keys
-- -> the learner's newest bulletin, or false
return call('HGET', run .. ':bulletin', 'text')
