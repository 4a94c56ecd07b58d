"""Experiment trackers: a process that sends what a run writes down to TensorBoard and others.

delivery            Delivery of a run to one tracker, in a thread of its own
delivery_process    The process that delivers a run to its trackers, beside learner rank 0
feed                The part of a run that a tracker has not got yet, read from the run's files
http_api            JSON over HTTP for trackers: calls with a deadline and one try, and checks
                    before a run
mlflow_run          MLflow: a run on a server, over its REST API alone, without its package
names               Figures and settings of a run under the names that trackers show, without
                    secrets
tensorboard_events  TensorBoard: events in `<run>/tensorboard`, by the package `tensorboard` alone,
                    without torch
tracker             The interface of a tracker, and what it gets: figures and sampled texts of a
                    step
tracking            Rank 0's end of the process that delivers a run to its trackers; no process
                    without trackers
trackio_run         trackio: a run on its server, over its HTTP API alone, without its package
wandb_run           Weights & Biases: a run by its own package, offline unless the settings ask for
                    more
"""
