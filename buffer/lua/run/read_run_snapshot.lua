--- @include keys
-- -> the learner's newest run snapshot, or false
return call('HGET', run .. ':bulletin', 'text')
