#!/bin/sh
# Actors on a partition of Slurm whose jobs may be preempted; one for each member of the array.
#   sbatch --partition=spot actor.slurm.sh mine.yaml --set broker.endpoint=tcp://HUB:5757 --set broker.keys=keys
# What an actor elsewhere needs, and every exit code: docs/fleet.md. The partition's GraceTime and
# KillWait must be longer than actors.drain_s (10 s) and ten seconds more.
#SBATCH --job-name=nyala-actor
#SBATCH --array=0-3
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=nyala-actor-%A-%a.log
# Before the time limit the same happens as at a preemption.
#SBATCH --signal=TERM@60

# A step gets SIGTERM at once, this shell only when the grace time is over: hence srun. By then the
# actor has drained and the job ended by itself, which Slurm never requeues: hence a code of its
# own for an actor that was told to go, and the requeue here.
told=75
code=0
srun nyala actor "$@" --set "actors.exit_when_told=$told" || code=$?
case $code in
  "$told" | 143) scontrol requeue "$SLURM_JOB_ID" ;; # 143: it was told before it could listen
esac
exit "$code"
