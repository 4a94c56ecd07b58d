#!/bin/sh
# Actors on a partition of Slurm whose jobs may be preempted, one for each member of the array; written by
# `nyala fleet render`, started as hub.sh says. Arguments are further settings of the actor. Every exit code: docs/fleet.md.
# The partition's GraceTime and KillWait must be at least @@{grace} s: actors.drain_s, and some to end engine and rewards.
#SBATCH --job-name=nyala-actor-@@{run}
#SBATCH --ntasks=1
#SBATCH --gres=gpu:@@{actor_gpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@@{out}/nyala-actor-%j.log
# Before the time limit the same happens as at a preemption.
#SBATCH --signal=TERM@60

# A step gets SIGTERM at once, this shell only when the grace time is over: hence srun. By then the
# actor has drained and the job ended by itself, which Slurm never requeues: hence a code of its
# own for an actor that was told to go, and the requeue here; `scancel` ends a job for good.
told=75
code=0
hub=$(cat @@{out}/hub) || hub=the-hub-has-not-started.invalid
srun nyala actor --config=@@{out}/config.yaml --set "broker.endpoint=tcp://$hub:5757" --set broker.keys=@@{out}/keys \
  "$@" --set "actors.exit_when_told=$told" || code=$?
case $code in
  "$told" | 143) scontrol requeue "$SLURM_JOB_ID" ;; # 143: it was told before it could listen
esac
exit "$code"
