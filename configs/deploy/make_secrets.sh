#!/bin/sh
# Makes what the services of compose.yaml prove themselves with, a folder for each, at the first start;
# what exists is left as it is.
#   broker/   CURVE key of the broker, and redis.url, with the password
#   learner/  the same of the learner
#   actor/    the key with which actors enrol, and the broker's public one
#   allowed/  who may connect: `nyala keys` changes it in the broker's container
#   redis/    the password, as redis-server reads it
set -eu
secrets=${1:?usage: make_secrets.sh FOLDER}
[ ! -f "$secrets/redis/redis_auth.conf" ] || exit 0
umask 077
keys=$(mktemp -d)
nyala keys "$keys"
for role in broker learner; do
  cp "$keys/$role.key" "$keys/broker.pub" "$keys/learner.pub" "$secrets/$role/"
  mkdir -p "$secrets/$role/allowed" # where the volume of that name is mounted
done
cp "$keys/enrolment.key" "$keys/broker.pub" "$secrets/actor/"
cp -R "$keys/allowed/." "$secrets/allowed/"
password=$(python -c 'import secrets; print(secrets.token_hex(32))')
for role in broker learner; do echo "redis://:$password@redis:6379/0" >"$secrets/$role/redis.url"; done
# redis-server runs under a user of its own, in the one container that has this folder. Last, and at
# once: it says that all is there.
echo "requirepass $password" >"$secrets/redis/part"
chmod 644 "$secrets/redis/part"
chmod 755 "$secrets/redis"
mv "$secrets/redis/part" "$secrets/redis/redis_auth.conf"
