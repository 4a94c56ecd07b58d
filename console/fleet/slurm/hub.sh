#!/bin/sh
# Redis, broker and learner of a run, written by `nyala fleet render`: a job that is not preempted.
#   sbatch @@{out}/hub.sh
#   sbatch --partition=spot --array=0-@@{last_actor} @@{out}/actor.sh
# The first again goes on from the run's newest checkpoint; Slurm does so by itself where the node is taken away or the time
# is over. The second starts actors where jobs may be preempted. In its place, as many as the run wants, until it has ended:
#   nyala fleet follow @@{folder} @@{out}/actor.sh --partition spot
# The folder is on a file system that all nodes have, and so are Nyala and the run's own files. keys/ is secret.
#SBATCH --job-name=nyala-hub-@@{run}
#SBATCH --ntasks=1
#SBATCH --gres=gpu:@@{hub_gpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@@{out}/nyala-hub-%j.log
# Before the time limit, and a minute to write a checkpoint.
#SBATCH --signal=TERM@90

{ hostname -f || hostname; } >@@{out}/hub.new && mv @@{out}/hub.new @@{out}/hub # where actors look
hub=$(cat @@{out}/hub)
code=0
srun nyala up --plain --config=@@{out}/config.yaml --set actors.count=0 --set broker.keys=@@{out}/keys \
  --set broker.endpoint=tcp://0.0.0.0:5757 --set "broker.advertise=$hub" \
  --set learner.publisher_endpoint=tcp://0.0.0.0:5758@@{publisher} "$@" || code=$?
case $code in
  130 | 143) scontrol requeue "$SLURM_JOB_ID" ;; # it was told to go: as in actor.sh
esac
exit "$code"
