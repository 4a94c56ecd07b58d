"""Metrics of batches, and the files of a run that record them.

advice/        Advice: rules over the evidence of many batches, each one sentence with cause and
               remedy
batch_log      The log of trained batches: a line of `batches.jsonl` and one of `metrics.jsonl` for
               each
figures        Figures of `metrics.jsonl`: what each means, and where it is shown
journal        The journal of a run: `metrics.jsonl`, `batches.jsonl`, `eval.jsonl` and
               `summary.json`
metrics        Figures of a batch, its times, and the totals of the run
metrics_page   The learner's page of `/metrics`: what rank 0 has trained, evaluated and published
run_snapshot   Run snapshot of bounded size: what the live view shows of batches and evaluations;
               sparklines
sample_writer  Rank 0's thread that keeps episodes as text in the run's files; the run's tokenizer
samples        Kept episodes: their lines in `samples.jsonl`, and that file with its older parts
trackers/      Experiment trackers: a process that sends what a run writes down to TensorBoard and
               others
"""
