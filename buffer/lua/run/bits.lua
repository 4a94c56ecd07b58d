-- ARGV: name of a bitmap of the run.  -> its bytes, '' if there is none
return call('GET', run .. ':' .. ARGV[1]) or ''
