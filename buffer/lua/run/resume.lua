--- @include keys
-- -> 1 if leasing was paused or a key suspended   Both end; deaths are counted anew.
return call('HDEL', META, 'paused') + call('UNLINK', SUSPENDED, DEATHS) > 0 and 1 or 0
