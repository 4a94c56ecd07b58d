#!/bin/sh
# Makes what the services of compose.yaml prove themselves with; what exists is left as it is.
#   keys/            CURVE keys of broker and learner, and the one with which actors enrol
#   redis_auth.conf  the password, as redis-server reads it
#   redis.url        the same, as our processes read it
#   hf_token         empty: put a token of the Hugging Face hub here where models need one
# The folder is closed to other users. redis-server runs under a user of its own in its container,
# where only the file is mounted: hence the wider mode of that one file.
set -eu
folder=${1:?usage: make_secrets.sh FOLDER}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"
nyala keys "$folder/keys"
if [ ! -f "$folder/redis.url" ]; then
  password=$(python -c 'import secrets; print(secrets.token_hex(32))')
  echo "requirepass $password" >"$folder/redis_auth.conf"
  chmod 644 "$folder/redis_auth.conf"
  echo "redis://:$password@redis:6379/0" >"$folder/redis.url"
fi
[ -f "$folder/hf_token" ] || : >"$folder/hf_token"
